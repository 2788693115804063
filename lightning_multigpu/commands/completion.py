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


def script(shell: str, commands: Mapping[str, Sequence[str]], run: Callable[[Sequence[str]], object]) -> str:
    """The script; files are completed where it knows no words.

    Args:
        shell: one of ``SHELLS``.
        commands: the names of the commands, with their second words.
        run: runs a command line, to which ``--help`` is given for the options.

    Raises:
        UsageError: it is another shell.
    """
    if shell not in SHELLS:
        raise UsageError(f"--print_completion {shell}: pass {' or '.join(SHELLS)}, as in\n  {_advice('bash')}")
    options = {
        f"{name} {word}".strip(): _options(name, word, run)
        for name, words in commands.items()
        for word in words or [""]
    }
    text = _FUNCTION
    for place, words in (
        ("@strategies@", " ".join(row.name for row in STRATEGIES)),
        ("@first@", " ".join([*commands, "--help", "--version"])),
        ("@options@", _cases({f'"{name}"*': words for name, words in options.items()})),
        ("@words@", _cases({name: words for name, words in commands.items() if words})),
    ):
        text = text.replace(place, words)
    start = _ZSH if shell == "zsh" else ""
    return f"# {_advice(shell)}\n{start}{text}"


def _cases(words: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(f'            {pattern}) words="{" ".join(offered)}" ;;' for pattern, offered in words.items())


def _advice(shell: str) -> str:
    return f'eval "$({PROGRAM} --print_completion {shell})"  # in ~/.{shell}rc'


def _options(name: str, word: str, run: Callable[[Sequence[str]], object]) -> list[str]:
    if settings := settings_of(name):
        return [*(f"--{setting}" for setting in settings), "--print_config", "--help", "--help_all"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        run([name, *([word] if word else []), "--help"])
    return re.findall(r"^  (?:-\w, )?(--[a-z][\w-]*)", printed.getvalue(), re.MULTILINE)
