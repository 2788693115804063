"""The error of a wrong command line."""

from __future__ import annotations

PROGRAM = "lightning-multigpu"


class UsageError(Exception):
    """The user asked for something that does not exist or cannot be had; the message says what to pass instead.

    The command line prints the message without a traceback and exits with status 2.
    """
