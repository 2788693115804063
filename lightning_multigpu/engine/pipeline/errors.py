"""What goes wrong when a module cannot be run as a pipeline."""

from __future__ import annotations


class PipelineError(RuntimeError):
    """The module does something that its stages cannot do apart from each other; the message says what."""
