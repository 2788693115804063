"""The error for modules that cannot be run as a pipeline, and the text of errors of the user's code."""

from __future__ import annotations

import traceback
from collections.abc import Iterable


class PipelineError(RuntimeError):
    """A module whose stages cannot run apart from each other; the message names the reason.

    ``lacking`` are the sources of placeholders whose values the step needs; empty for another reason.
    """

    def __init__(self, message: str, lacking: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.lacking = tuple(lacking)


def error_of_users(error: Exception) -> str:
    """The first line of an error that a step on trial raises, whatever the user's code or the device raises.

    Raises:
        Exception: the error itself, where it is a mistake of this package, and says nothing about the module.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_own = frame.f_globals.get("__name__", "").partition(".")[0] == "lightning_multigpu"
    if is_own and isinstance(error, AssertionError | AttributeError | ImportError | NameError):
        raise error
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
