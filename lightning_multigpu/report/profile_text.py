"""A profile as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_multigpu.planning.step_phases import PHASES
from lightning_multigpu.report.numbers import size

_WIDTH = 100
_OPERATORS = 5


def text(profile: Mapping[str, Any]) -> str:
    """Phases by rank, transfers, operators, and the diagnosis."""
    parts = (_phases(profile), _transfers(profile), _operators(profile), ["", *_diagnosis(profile)])
    return "\n".join([_title(profile), "", *(line for part in parts for line in part)])


def comparison(profiles: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each run: the step of its slowest rank, in ms, and what is first in its diagnosis."""
    slowest = {name: max(profile["ranks"], key=lambda rank: rank["step_s"]) for name, profile in profiles.items()}
    found = [phase for phase in PHASES if any(phase in rank["phases_s"] for rank in slowest.values())]
    rows = [["run", "strategy", *(phase.replace("_", " ") for phase in found), "step, ms", "diagnosis"]]
    for name, profile in profiles.items():
        cells = [f"{1e3 * slowest[name]['phases_s'].get(phase, 0.0):.3g}" for phase in found]
        first = profile["findings"][0]["kind"] if profile["findings"] else "nothing found"
        rows.append([name, profile["strategy"]["name"], *cells, f"{1e3 * profile['step_s']:.4g}", first])
    return "\n".join(_aligned(rows))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _title(profile: Mapping[str, Any]) -> str:
    ranks = profile["ranks"]
    steps = len(ranks[0]["steps"])
    return (
        f"Profile of {profile['strategy']['name']}: {len(ranks)} rank{'s' * (len(ranks) > 1)}, {steps} optimizer "
        f"step{'s' * (steps > 1)}, {1e3 * profile['step_s']:.4g} ms a step (medians)"
    )


def _phases(profile: Mapping[str, Any]) -> list[str]:
    ranks = profile["ranks"]
    found = [phase for phase in PHASES if any(phase in rank["phases_s"] for rank in ranks)]
    names = [phase.replace("_", " ") for phase in found]
    rows = [["rank", *names, "step, ms"]]
    for rank in ranks:
        cells = [f"{1e3 * rank['phases_s'].get(phase, 0.0):.3g}" for phase in found]
        rows.append([str(rank["rank"]), *cells, f"{1e3 * rank['step_s']:.4g}"])
    return _aligned(rows)


def _transfers(profile: Mapping[str, Any]) -> list[str]:
    if not profile["operations"]:
        return []
    lines = ["", "Transfers in a step, of the rank that sends most:"]
    for operation in sorted(profile["operations"], key=lambda operation: -operation["seconds"]):
        lines.append(
            f"  {operation['operation']} ({operation['group']}, {operation['group_size']} ranks): "
            f"{operation['count']:.3g} x, {size(operation['sent_bytes'])} sent, "
            f"{1e3 * operation['seconds']:.3g} ms"
        )
    return lines


def _operators(profile: Mapping[str, Any]) -> list[str]:
    operators = profile["ranks"][0]["operators"]
    if not operators:
        return []
    lines = ["", "Operators of a step on rank 0 that take the most time by themselves:"]
    for name, calls, cpu_s, gpu_s in operators[:_OPERATORS]:
        on_gpu = f", {1e3 * gpu_s:.3g} ms on the GPU" if gpu_s else ""
        lines.append(f"  {name}: {calls} x, {1e3 * cpu_s:.3g} ms{on_gpu}")
    return lines


def _diagnosis(profile: Mapping[str, Any]) -> list[str]:
    findings = profile["findings"]
    if not findings:
        return ["Nothing was found that would save 5 % of a step."]
    lines = ["What would make a step shorter, the largest saving first:"]
    for number, finding in enumerate(findings, 1):
        share = 100 * finding["saving_s"] / profile["step_s"]
        head = f"{number}. {finding['kind']}: {1e3 * finding['step_s']:.4g} ms a step predicted ({share:.0f} % less)"
        lines.append(head)
        for part in (finding["evidence"], finding["remedy"]):
            lines += textwrap.wrap(part, _WIDTH, initial_indent="   ", subsequent_indent="   ")
    return lines
