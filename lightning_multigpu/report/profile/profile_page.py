"""A profile as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from lightning_multigpu.planning.numbers import ms, number
from lightning_multigpu.report import figures
from lightning_multigpu.report.figures import bars, words
from lightning_multigpu.report.profile import profile_sections, run_curves
from lightning_multigpu.report.profile.profile_document import ProfileDocument
from lightning_multigpu.report.profile.profile_sections import PHASE_COLOURS, ReportSection

FILE_NAME = "report.html"


def page(profile: ProfileDocument) -> str:
    """The whole page: the verdict and the tree of the step, the diagnosis, and all that was measured."""
    return _html(
        f"Profile of {profile.strategy.name}",
        f"{profile_sections.title(profile)}, of the slowest rank. "
        + ", ".join(f"{name} {version}" for name, version in profile.versions.items()),
        list(profile_sections.sections(profile)),
        profile=profile,
        verdict=profile_sections.verdict(profile),
        tree=profile_sections.step_tree(profile),
        saving=profile_sections.saving,
    )


def comparison(profiles: Mapping[str, ProfileDocument]) -> str:
    """A page of several runs, by name: the step of each run's slowest rank, samples a second, the first finding."""
    of_runs = [(name, profile.slowest.phases_s) for name, profile in profiles.items()]
    rates = [(name, {"samples": rate}) for name, p in profiles.items() if (rate := run_curves.rate(p))]
    found = [
        ReportSection(
            title="Phases of a step",
            legend={phase: c for phase, c in PHASE_COLOURS.items() if any(phase in parts for _, parts in of_runs)},
            figure=bars("Phases of a step by run; the table below has the numbers", of_runs, PHASE_COLOURS, ms),
            table=profile_sections.comparison(profiles),
        )
    ]
    if rates:
        meaning = "Samples a second of each run; the table above has the numbers"
        figure = bars(meaning, rates, {"samples": figures.BLUE}, number)
        found.append(ReportSection(title="Samples a second", figure=figure))
    lead = " ".join(run_curves.fastest(profiles)) + (
        " A step of the slowest rank of each run. It has more samples under some strategies than under others: samples "
        "a second, those of the whole run, tell which is faster."
    )
    return _html("Profiles compared", lead, found)


def _html(title: str, lead: str, sections: Sequence[ReportSection], **more: Any) -> str:
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("lightning_multigpu.report", "profile"), autoescape=True, trim_blocks=True
    )
    environment.filters.update(ms=ms, words=words)
    style = files("lightning_multigpu.report.profile").joinpath("page.css").read_text()
    template = environment.get_template("page.html.j2")
    return template.render(title=title, style=style, lead=lead, sections=sections, **more)
