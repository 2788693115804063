"""The error for modules that cannot be run as a pipeline."""

from __future__ import annotations


class PipelineError(RuntimeError):
    """A module whose stages cannot run apart from each other; the message names the reason."""
