"""The planner of ``lightning-multigpu plan``: step time, memory and scaling under every strategy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_multigpu.commands.usage import UsageError


def run(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Not there yet."""
    raise UsageError("a plan of all strategies comes with the planner; pass --micro-batches or --blocks")
