"""``lightning-multigpu bench collectives|strategies``: the subcommands of the benches."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_multigpu.commands.subcommands import run_word

BENCHES = {
    "collectives": "time, bandwidth and correctness of every collective, on each back end",
    "strategies": "the training step of one model under several strategies, and what communication costs",
}


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs the bench that the first argument names.

    Raises:
        UsageError: there is no bench of that name, or one of its options is wrong; no process has been started.
        SystemExit: for ``--help``.
    """
    return run_word(name, arguments, BENCHES, what="what to bench", kind="bench")
