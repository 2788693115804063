"""``lightning-multigpu pipeline plan``: what there is to know of a pipeline without training it."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_multigpu.commands.subcommands import run_word

WORDS = {"plan": "the split, and the predicted time and memory for several numbers of micro-batches"}


def run(name: str, arguments: Sequence[str]) -> int:
    """Does what the first argument says.

    Raises:
        UsageError: it is none of the words, or an option or a setting is wrong; nothing has been measured.
        SystemExit: for ``--help``.
    """
    return run_word(name, arguments, WORDS, what="what to do", kind="command of pipeline")
