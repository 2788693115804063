"""``lightning-multigpu bench collectives|strategies``: the subcommands of the benches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from lightning_multigpu._suggest import did_you_mean
from lightning_multigpu.commands.usage import PROGRAM, UsageError

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
    word, *rest = arguments or ("",)
    if word in ("-h", "--help"):
        print(_help(name))
        raise SystemExit(0)
    if word not in BENCHES:
        known = ", ".join(BENCHES)
        if not word or word.startswith("-"):
            raise UsageError(f"what to bench comes first, one of {known}; {PROGRAM} {name} --help describes them")
        raise UsageError(f"{word!r} is no bench; known are {known}. {did_you_mean(word, BENCHES)}".rstrip())
    bench: Callable[[Sequence[str]], int] = import_module(f"lightning_multigpu.commands.bench_{word}").run
    return bench(rest)


def _help(name: str) -> str:
    width = max(map(len, BENCHES))
    lines = [f"  {word:<{width}}  {summary}" for word, summary in BENCHES.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} {name} {{{','.join(BENCHES)}}} [options]",
            "",
            *lines,
            "",
            f"{PROGRAM} {name} collectives --help and {PROGRAM} {name} strategies --help list the options.",
        ]
    )
