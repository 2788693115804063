"""A report as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

from importlib.resources import files

from lightning_multigpu.planning.numbers import ms
from lightning_multigpu.report import sections
from lightning_multigpu.report.document import RunDocument

FILE_NAME = "report.html"


def page(report: RunDocument) -> str:
    """The whole page: the verdict, the tree of the step, the diagnosis, and all that was measured."""
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("lightning_multigpu", "report")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(ms=ms, words=sections.words, total=lambda parts: sum(parts.values()))
    return environment.get_template("page.html.j2").render(
        report=report,
        profile=report.profile,
        style=files("lightning_multigpu.report").joinpath("page.css").read_text(),
        contents=sections,
    )
