"""A profile as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

from importlib.resources import files

from lightning_multigpu.planning.numbers import ms
from lightning_multigpu.report.figures import words
from lightning_multigpu.report.profile import profile_sections
from lightning_multigpu.report.profile.profile_document import ProfileDocument

FILE_NAME = "report.html"


def page(profile: ProfileDocument) -> str:
    """The whole page: the verdict and the tree of the step, the diagnosis, and all that was measured."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("lightning_multigpu.report", "profile"), autoescape=True, trim_blocks=True
    )
    environment.filters.update(ms=ms, words=words)
    return environment.get_template("page.html.j2").render(
        profile=profile,
        style=files("lightning_multigpu.report.profile").joinpath("page.css").read_text(),
        sections=profile_sections,
    )
