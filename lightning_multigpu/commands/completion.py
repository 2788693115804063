"""``lightning-multigpu --print_completion bash``: a script that completes commands, settings and options in a shell.

jsonargparse completes by shtab, a further package, and for what it parses alone. The names are known here already.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence

from lightning_multigpu.commands.early_checks import settings_of
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.registry import STRATEGIES

SHELLS = ("bash", "zsh")
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_FUNCTION = """\
_lightning_multigpu() {
    local words="" prefix="" first="${COMP_WORDS[1]}" second="${COMP_WORDS[2]}"
    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
    if [[ "$before" == "=" ]]; then before="${COMP_WORDS[COMP_CWORD-2]}"; fi
    if [[ "$current" == "=" ]]; then current=""; fi
    if [[ "$current" == --*=* ]]; then before="${current%%=*}" prefix="${current%%=*}="; current="${current#*=}"; fi
    if [[ "$before" == "--trainer.strategy" ]]; then words="@strategies@"
    elif (( COMP_CWORD == 1 )); then words="@first@"
    elif [[ "$current" == -* ]]; then
        case "$first $second" in
@options@
        esac
    elif (( COMP_CWORD == 2 )); then
        case "$first" in
@words@
        esac
    fi
    COMPREPLY=($(compgen -P "$prefix" -W "$words" -- "$current"))
}
complete -o default -F _lightning_multigpu lightning-multigpu
"""


def script(shell: str, commands: Sequence[str], run: Callable[[Sequence[str]], object]) -> str:
    """The script; files are completed where it knows no words.

    Args:
        shell: one of ``SHELLS``.
        commands: the names of the commands, of one word or two.
        run: runs a command line, to which ``--help`` is given for the options.

    Raises:
        UsageError: it is another shell.
    """
    if shell not in SHELLS:
        raise UsageError(f"--print_completion {shell}: pass {' or '.join(SHELLS)}, as in\n  {_advice('bash')}")
    second: dict[str, list[str]] = {}
    for name in commands:
        first, _, word = name.partition(" ")
        second.setdefault(first, []).extend([word] if word else [])
    text = _FUNCTION
    for place, words in (
        ("@strategies@", " ".join(row.name for row in STRATEGIES)),
        ("@first@", " ".join([*second, "--help", "--version"])),
        ("@options@", _cases({f'"{name}"*': _options(name, run) for name in commands})),
        ("@words@", _cases({name: words for name, words in second.items() if words})),
    ):
        text = text.replace(place, words)
    start = _ZSH if shell == "zsh" else ""
    return f"# {_advice(shell)}\n{start}{text}"


def _cases(words: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(f'            {pattern}) words="{" ".join(offered)}" ;;' for pattern, offered in words.items())


def _advice(shell: str) -> str:
    return f'eval "$({PROGRAM} --print_completion {shell})"  # in ~/.{shell}rc'


def _options(name: str, run: Callable[[Sequence[str]], object]) -> list[str]:
    if settings := settings_of(name):
        return [*(f"--{setting}" for setting in settings), "--print_config", "--help", "--help_all"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        run([*name.split(), "--help"])
    return re.findall(r"^  (?:-\w, )?(--[a-z][\w-]*)", printed.getvalue(), re.MULTILINE)
