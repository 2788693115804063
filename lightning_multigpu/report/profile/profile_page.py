"""A profile as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from lightning_multigpu.planning.numbers import ms, number
from lightning_multigpu.planning.step_phases import PHASES
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
    slowest = {name: profile.slowest for name, profile in profiles.items()}
    used = [phase for phase in PHASES if any(phase in rank.phases_s for rank in slowest.values())]
    # What the runs are compared for stands first: a phone shows three columns.
    rows = [
        [
            name,
            run_curves.samples_a_second(profile),
            ms(profile.step_s),
            profile.findings[0].kind if profile.findings else "nothing found",
            *(ms(slowest[name].phases_s.get(phase, 0.0)) for phase in used),
            profile.strategy.name,
        ]
        for name, profile in profiles.items()
    ]
    rates = [(name, {"samples": rate}) for name, p in profiles.items() if (rate := run_curves.rate(p))]
    of_runs = [(name, rank.phases_s) for name, rank in slowest.items()]
    fastest = "Samples a second of each run; the table above has the numbers"
    found = [
        ReportSection(
            title="Phases of a step",
            legend={phase: PHASE_COLOURS[phase] for phase in used},
            figure=bars("Phases of a step by run; the table below has the numbers", of_runs, PHASE_COLOURS, ms),
            table=[["run", "samples/s", "step", "diagnosis", *map(words, used), "strategy"], *rows],
        )
    ]
    if rates:
        figure = bars(fastest, rates, {"samples": figures.BLUE}, number)
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
