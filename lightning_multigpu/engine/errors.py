"""The error for modules that cannot be run as a pipeline."""

from __future__ import annotations

from collections.abc import Iterable


class PipelineError(RuntimeError):
    """A module whose stages cannot run apart from each other; the message names the reason.

    ``lacking`` are the sources of placeholders whose values the step needs; empty for another reason.
    """

    def __init__(self, message: str, lacking: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.lacking = tuple(lacking)
