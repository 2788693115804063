"""Commands of two words, as ``lightning-multigpu bench collectives``: which module runs the second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from lightning_multigpu._suggest import did_you_mean
from lightning_multigpu.commands.usage import PROGRAM, UsageError


def run_word(name: str, arguments: Sequence[str], words: Mapping[str, str], *, what: str, kind: str) -> int:
    """Runs the function ``run(arguments) -> exit status`` of ``commands.<name>_<word>`` for the first argument.

    Args:
        name: the first word of the command.
        arguments: those that follow it.
        words: with what each does.
        what: comes first: "what to bench".
        kind: what a wrong word is none of: "bench".

    Raises:
        UsageError: there is no such word, or one of its options is wrong.
        SystemExit: for ``--help``.
    """
    word, *rest = arguments or ("",)
    if word in ("-h", "--help"):
        print(_help(name, words))
        raise SystemExit(0)
    if word not in words:
        known = ", ".join(words)
        if not word or word.startswith("-"):
            raise UsageError(f"{what} comes first, one of {known}; {PROGRAM} {name} --help describes them")
        raise UsageError(f"{word!r} is no {kind}; known are {known}. {did_you_mean(word, words)}".rstrip())
    run: Callable[[Sequence[str]], int] = import_module(f"lightning_multigpu.commands.{name}_{word}").run
    return run(rest)


def _help(name: str, words: Mapping[str, str]) -> str:
    width = max(map(len, words))
    options = " and ".join(f"{PROGRAM} {name} {word} --help" for word in words)
    return "\n".join(
        [
            f"usage: {PROGRAM} {name} {{{','.join(words)}}} [options]",
            "",
            *(f"  {word:<{width}}  {summary}" for word, summary in words.items()),
            "",
            f"{options} {'lists' if len(words) == 1 else 'list'} the options.",
        ]
    )
