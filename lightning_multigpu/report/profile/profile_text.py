"""A profile as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from lightning_multigpu.planning.numbers import ms
from lightning_multigpu.report.profile import profile_sections
from lightning_multigpu.report.profile.profile_document import ProfileDocument
from lightning_multigpu.report.terminal import columns

_WIDTH = 100


def text(profile: ProfileDocument) -> str:
    """The verdict and the tree of the step; then all that was measured, and the diagnosis."""
    lines = [profile_sections.title(profile), *_wrapped(profile_sections.verdict(profile), ""), ""]
    rows = [
        (
            f"{'  ' * each.depth}{each.name}",
            ms(each.seconds),
            f"{100 * each.share:.0f} %",
            each.cause and f"<- {each.cause}",
        )
        for each in profile_sections.step_tree(profile)
    ]
    lines += columns(rows, "left", "right", "right", "left")
    for section in profile_sections.sections(profile):
        shown = columns(section.table, "left", "right") if section.table else []
        if shown or section.note:
            lines += ["", f"{section.title}:", *shown, *section.note.splitlines()]
    return "\n".join([*lines, "", *_diagnosis(profile)])


def comparison(profiles: Mapping[str, ProfileDocument]) -> str:
    """The fastest run, and a row for each run."""
    rows = profile_sections.comparison(profiles)
    return "\n".join([*profile_sections.fastest(profiles), *columns(rows, "left", "right")])


def _diagnosis(profile: ProfileDocument) -> list[str]:
    lines = ["What would make a step shorter, the largest saving first:"]
    if not profile.savings:
        lines = ["Nothing was found that would save 5 % of a step."]
    for place, finding in enumerate(profile.savings, 1):
        lines.append(f"{place}. {finding.kind}: {profile_sections.saving(profile, finding)}")
        lines += _wrapped((finding.evidence, finding.remedy))
    for finding in profile.limits:
        lines += ["", f"{finding.kind.capitalize()}:", *_wrapped((finding.evidence, finding.remedy))]
    return lines


def _wrapped(parts: Sequence[str], indent: str = "   ") -> list[str]:
    return [line for p in parts for line in textwrap.wrap(p, _WIDTH, initial_indent=indent, subsequent_indent=indent)]
