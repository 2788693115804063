"""The error of a wrong command line."""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = "lightning-multigpu"
COMMAND = (sys.executable, "-P", str(Path(__file__).parents[1] / "__main__.py"))
"""The command line in a process of its own; ``-m`` would put the working folder before the installed packages."""


class UsageError(Exception):
    """The user asked for something that does not exist or cannot be had; the message says what to pass instead.

    The command line prints the message without a traceback and exits with status 2.
    """
