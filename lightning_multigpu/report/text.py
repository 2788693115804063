"""A report as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_multigpu.planning.numbers import ms
from lightning_multigpu.report import sections
from lightning_multigpu.report.document import Profile, RunDocument
from lightning_multigpu.report.schema import from_json
from lightning_multigpu.report.terminal import columns

_WIDTH = 100


def text(report: RunDocument | Mapping[str, Any]) -> str:
    """The verdict, with a profile the tree of the step; then all that was measured, and the diagnosis.

    Raises:
        ReportError: ``report`` is a mapping that does not follow the schema.
    """
    if not isinstance(report, RunDocument):
        report = from_json(RunDocument, report)
    if not report.steps:
        return "No optimizer step was taken: there is nothing to report"
    lines = [sections.title(report), *_wrapped(sections.verdict(report), "")]
    if report.profile is not None:
        rows = [
            (f"{'  ' * depth}{name}", ms(seconds), f"{100 * share:.0f} %", cause and f"<- {cause}")
            for depth, name, seconds, share, cause in sections.step_tree(report.profile)
        ]
        lines += ["", *columns(rows, "left", "right", "right", "left")]
    for section in sections.sections(report):
        shown = columns(section.table, "left", "right") if section.table else []
        lines += ["", f"{section.title}:", *shown, *section.note.splitlines()]
    return "\n".join([*lines, *([] if report.profile is None else _diagnosis(report.profile))])


def _diagnosis(profile: Profile) -> list[str]:
    lines = ["", "What would make a step shorter, the largest saving first:"]
    if not profile.findings:
        lines = ["", "Nothing was found that would save 5 % of a step."]
    for place, finding in enumerate(profile.findings, 1):
        lines.append(f"{place}. {finding.kind}: {sections.saving(profile, finding)}")
        lines += _wrapped((finding.evidence, finding.remedy))
    return lines


def _wrapped(parts: Sequence[str], indent: str = "   ") -> list[str]:
    return [line for p in parts for line in textwrap.wrap(p, _WIDTH, initial_indent=indent, subsequent_indent=indent)]
