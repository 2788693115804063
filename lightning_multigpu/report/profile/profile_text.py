"""A profile as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_multigpu.planning.numbers import ms, number, size
from lightning_multigpu.planning.step_phases import PHASES
from lightning_multigpu.report.profile import profile_document, run_curves
from lightning_multigpu.report.profile.page_figures import words

_WIDTH = 100
_OPERATORS = 5


def text(profile: Mapping[str, Any]) -> str:
    """Phases by rank, transfers, memory, figures of the whole run, operators, and the diagnosis."""
    sections = (_phases, _transfers, _pipeline, _memory, _over_time, _staleness, _operators)
    parts = (*(section(profile) for section in sections), ["", *_diagnosis(profile)])
    return "\n".join([_title(profile), "", *(line for part in parts for line in part)])


def comparison(profiles: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each run: samples a second, the step of its slowest rank in ms, its first finding, and its phases.

    Steps have more samples under some strategies than under others: samples a second tell which is faster.
    """
    slowest = {name: max(profile["ranks"], key=lambda rank: rank["step_s"]) for name, profile in profiles.items()}
    found = [phase for phase in PHASES if any(phase in rank["phases_s"] for rank in slowest.values())]
    rows = [["run", "strategy", "samples/s", "step, ms", "diagnosis", *(phase.replace("_", " ") for phase in found)]]
    for name, profile in profiles.items():
        cells = [number(1e3 * slowest[name]["phases_s"].get(phase, 0.0)) for phase in found]
        first = profile["findings"][0]["kind"] if profile["findings"] else "nothing found"
        whole = run_curves.samples_a_second(profile), number(1e3 * profile["step_s"])
        rows.append([name, profile["strategy"]["name"], *whole, first, *cells])
    return "\n".join(_aligned(rows))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _title(profile: Mapping[str, Any]) -> str:
    ranks = profile["ranks"]
    steps = len(ranks[0]["steps"])
    return (
        f"Profile of {profile['strategy']['name']}: {len(ranks)} rank{'s' * (len(ranks) > 1)}, {steps} optimizer "
        f"step{'s' * (steps > 1)}, {ms(profile['step_s'])} a step (medians)"
    )


def _phases(profile: Mapping[str, Any]) -> list[str]:
    ranks = profile["ranks"]
    found = [phase for phase in PHASES if any(phase in rank["phases_s"] for rank in ranks)]
    names = [phase.replace("_", " ") for phase in found]
    rows = [["rank", *names, "step, ms", "hidden transfers"]]
    for rank in ranks:
        cells = [number(1e3 * rank["phases_s"].get(phase, 0.0)) for phase in found]
        hidden = number(1e3 * profile_document.hidden_s(rank))
        rows.append([str(rank["rank"]), *cells, number(1e3 * rank["step_s"]), hidden])
    lines = _aligned(rows)
    if error_s := profile_document.clock_error_s(profile):
        lines.append(f"clocks of ranks are compared to within {ms(error_s)}")
    return lines


def _transfers(profile: Mapping[str, Any]) -> list[str]:
    rows = transfers(profile)
    note = profile_document.unmeasured(profile)
    lines = ["", "Transfers in a step, of the rank that sends most:", *_aligned(rows)] if rows else []
    return [*lines, note] if note else lines


def transfers(profile: Mapping[str, Any]) -> list[list[str]]:
    """The transfers of a step by operation and group, the longest first, below a header; empty without any."""
    rows = []
    for operation in sorted(profile["operations"], key=lambda operation: -operation["seconds"]):
        bandwidth = profile_document.Bandwidth.of(operation, profile)
        share = None if bandwidth is None else bandwidth.share_of_peak
        rates = (0.0, 0.0) if bandwidth is None else (bandwidth.algbw, bandwidth.busbw)
        rows.append(
            [
                f"{operation['operation']} ({operation['group']}, {operation['group_size']} ranks)",
                f"{round(operation['count'], 1):g}",
                size(operation["sent_bytes"]),
                size(operation["memory_bytes"]),
                f"{number(1e3 * operation['seconds'])} ms",
                *(f"{size(rate)}/s" if rate else "-" for rate in rates),  # a rank sends nothing in a pull
                *(["-" if share is None else f"{100 * share:.0f} %"] if profile.get("link_gbit") else []),
            ]
        )
    header = ["transfers", "count", "sent", "through memory", "time", "algbw", "busbw"]
    return [[*header, *["of the link"] * bool(profile.get("link_gbit"))], *rows] if rows else []


def _pipeline(profile: Mapping[str, Any]) -> list[str]:
    section = profile_document.pipelines(profile).section()
    if section is None:
        return []
    return [
        f"\n{section['schedule']}, {pipeline['num_micro_batches']} micro-batch"
        f"{'es' * (pipeline['num_micro_batches'] > 1)}: ranks are not busy for "
        f"{100 * pipeline['bubble']:.1f} % of {ms(pipeline['wall_s'])}; in theory for "
        f"{100 * pipeline['theoretical_bubble']:.1f} %"
        for pipeline in section["pipelines"]
        if "wall_s" in pipeline
    ]


def _memory(profile: Mapping[str, Any]) -> list[str]:
    held = profile_document.memory(profile)
    kinds = list(dict.fromkeys(kind for of_rank in held.values() for kind in of_rank))
    rows = [["rank", *map(words, kinds)]]
    rows += [[str(r), *(size(of_rank[k]) if k in of_rank else "-" for k in kinds)] for r, of_rank in held.items()]
    return ["", "Memory that each rank holds:", *_aligned(rows)] if held else []


def _over_time(profile: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, (title, show) in run_curves.KEYS.items():
        courses = [run_curves.course(curve) for curve in run_curves.curves(profile, key).values()]
        if courses:
            # Samples add up; the others are those of the rank with the most.
            first, middle, last = (sum(c) if key == run_curves.SAMPLES else max(c) for c in zip(*courses, strict=True))
            lines.append(f"  {title}: {show(middle)} (first tenth {show(first)}, last tenth {show(last)})")
    return ["", "Medians over the whole run, of all ranks together or of the largest:", *lines] if lines else []


def _staleness(profile: Mapping[str, Any]) -> list[str]:
    lines = [
        f"  rank {worker['rank']}: {worker['updates']} updates, staleness {worker['staleness']['median']} (median), "
        f"{worker['staleness']['max']} (largest)"
        for worker in profile.get("servers", {}).get("workers", ())
    ]
    return ["", "Updates that other ranks made between a rank's pull and its update:", *lines] if lines else []


def _operators(profile: Mapping[str, Any]) -> list[str]:
    operators = profile["ranks"][0]["operators"]
    if not operators:
        return []
    lines = ["", "Operators of a step on rank 0 that take the most time by themselves:"]
    for name, calls, cpu_s, gpu_s in operators[:_OPERATORS]:
        on_gpu = f", {ms(gpu_s)} on the GPU" if gpu_s else ""
        lines.append(f"  {name}: {round(calls, 1):g} x, {ms(cpu_s)}{on_gpu}")
    return lines


def _diagnosis(profile: Mapping[str, Any]) -> list[str]:
    savings, limits = profile_document.by_saving(profile)
    lines = ["What would make a step shorter, the largest saving first:"]
    if not savings:
        lines = ["Nothing was found that would save 5 % of a step."]
    for place, finding in enumerate(savings, 1):
        share = 100 * finding["saving_s"] / profile["step_s"]
        head = f"{place}. {finding['kind']}: {ms(finding['step_s'])} a step predicted ({share:.0f} % less)"
        lines += [head, *_reasons(finding)]
    for finding in limits:
        lines += ["", f"{finding['kind'].capitalize()}:", *_reasons(finding)]
    return lines


def _reasons(finding: Mapping[str, Any]) -> list[str]:
    parts = (finding["evidence"], finding["remedy"])
    return [line for p in parts for line in textwrap.wrap(p, _WIDTH, initial_indent="   ", subsequent_indent="   ")]
