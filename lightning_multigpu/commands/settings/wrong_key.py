"""Errors that name a wrong key or value, the file or option it stands in, and the nearest right name.

Before Lightning is imported, keys are compared with the names of settings. What is below a class's setting jsonargparse
decides: its message is turned into one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_multigpu._suggest import nearest
from lightning_multigpu.commands.settings.sources import Settings, sources
from lightning_multigpu.commands.settings.spelling import (
    ClassNotFoundError,
    check_class,
    find_class,
    no_such_class,
    same_name_of_ours,
)
from lightning_multigpu.commands.usage import UsageError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
_CLASS_SETTINGS = ("model", "data", "optimizer", "lr_scheduler", "trainer.callbacks", "trainer.logger")
_INDEX = re.compile(r"\[\d+\]")
_REFUSED = re.compile(r"given class_path '(?P<cls>.+?)':\s+Option '(?P<key>.+?)' is not accepted")
_WRONG_VALUE = re.compile(
    r"given class_path '.+?':\s+Parser key \"(?P<key>.+?)\":\s+(?P<expected>.+?)(?:\n    - |\n  Given|$)", re.DOTALL
)


def checked_keys(arguments: Sequence[str], known: Sequence[str]) -> Settings:
    """The settings given, after all keys and classes have been checked, as far as that needs no import.

    Args:
        arguments: those after the subcommand.
        known: all settings of the subcommand, as dotted names: ``"trainer.max_epochs"``.

    Raises:
        UsageError: for the first wrong one in the order given.
    """
    merged: Settings = {}
    for file, settings in sources(arguments):
        for path, value in settings.items():
            _check_key(file, path, known)
            merged = {key: each for key, each in merged.items() if not key.startswith((f"{path}.", f"{path}["))}
            merged[path] = value
            is_class = _INDEX.sub("", path) in _CLASS_SETTINGS and not Path(str(value)).is_file()
            if isinstance(value, str) and (is_class or path.endswith(".class_path")):
                try:
                    check_class(value)
                except ClassNotFoundError as error:
                    raise _wrong(file, path.removesuffix(".class_path"), f"={value}: {error}") from error
    return merged


def explained(message: str, arguments: Sequence[str]) -> UsageError:
    """The error for a command line that jsonargparse has refused.

    Args:
        message: jsonargparse's.
        arguments: those after the subcommand.
    """
    given = [(file, path, value) for file, settings in sources(arguments) for path, value in settings.items()]
    top = re.match(r'Parser key "(.+?)":', message)
    below = [each for each in given[::-1] if top and each[1].startswith((f"{top[1]}.", f"{top[1]}["))]
    if found := _REFUSED.search(message):
        accepted = arguments_of(find_class(found["cls"]))
        for file, path, _ in below:
            if f".{found['key']}" in path:
                prefix = path[: path.rindex(f".{found['key']}") + 1]
                return _unknown(file, prefix, found["key"], accepted, nearest(found["key"], accepted))
    if found := _WRONG_VALUE.search(message):
        for file, path, value in below:
            if path.endswith(f".{found['key']}"):
                return _wrong(file, path, f"={value!r}: {_types(found['expected'])}")
    if found := re.search(r"given class_path '(.+?)':\s+the following arguments are required: (.+)", message):
        name = found[1].rpartition(".")[2]
        for file, path, value in below:
            if str(value).rpartition(".")[2] == name:
                needs = f"={value}: {found[1]} needs {found[2]}. {same_name_of_ours(name)}".rstrip()
                return _wrong(file, path.removesuffix(".class_path"), needs)
    several = re.search(
        r"Multiple subclasses with name (\w+)\. Give the full class path to avoid ambiguity: (.+)\.", message
    )
    if found := several or re.search(r"dot import path string: (\S+)", message):
        for file, path, value in given:
            if value == found[1]:
                problem = f"several classes have this name: write {several[2]}" if several else no_such_class(value)
                return _wrong(file, path.removesuffix(".class_path"), f"={value}: {problem}")
    for file, path, _ in below:
        prefix, _, key = path.rpartition(".")
        if file is not None and _INDEX.sub("", prefix) == (top and top[1]) and key not in _CLASS_KEYS:
            return _unknown(file, f"{prefix}.", key, _CLASS_KEYS, nearest(key, _CLASS_KEYS) or f"init_args.{key}")
    return UsageError(condensed(message))


def class_parser(cls: type | None) -> ArgumentParser:
    """A parser of the arguments that a configuration file may give the class."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, fail_untyped=False)
    return parser


def arguments_of(cls: type | None) -> list[str]:
    """The names of these arguments."""
    # Iterating a Namespace would go through its values.
    names = class_parser(cls).get_defaults(skip_validation=True).keys()
    return list(dict.fromkeys(name.split(".")[0] for name in [*names]))


def condensed(message: str) -> str:
    """A message of jsonargparse in one line, where it only says which types a value could have."""
    if message.startswith("the following arguments are required") and message.endswith(".model"):
        return "there is no model; pass --model=package.module.Class, or 'model:' in a configuration file"
    key = re.match(r'Parser key "(.+?)":\s*', message)
    value = re.search(r"(?:Given value|Got value): (.*)$", message, re.DOTALL)
    if not key or not value or "Expected a" not in message or "Problem with" in message:
        return message
    return f"{key[1]}={value[1]}: {_types(message)}"


def _types(message: str) -> str:
    expected = re.findall(r"Expected an? (.+?)(?:\.? Got value|\n|$)", message)
    types = " or ".join(re.sub(r"<class '(?:.*\.)?(\w+)'>", r"\1", t).replace("NoneType", "None") for t in expected)
    return "expected " + re.sub(r"typing\.Literal\[(.*?)\]", r"one of \1", types)


def _check_key(file: str | None, path: str, known: Sequence[str]) -> None:
    keys = _INDEX.sub("", path).split(".")
    for end, key in enumerate(keys):
        prefix = "".join(f"{outer}." for outer in keys[:end])
        if prefix[:-1] in known:
            return
        here = {name.removeprefix(prefix).split(".")[0] for name in known if name.startswith(prefix)}
        if key in here:
            continue
        by_last_word = {name.rpartition(".")[2]: name for name in known}
        near, elsewhere = nearest(key, here), key if key in by_last_word else nearest(key, by_last_word)
        if key in by_last_word or (near is None and elsewhere is not None):
            right = _name(file, by_last_word[str(elsewhere)])
            raise _wrong(file, prefix + key, f" is not a setting. Did you mean {right!r}?")
        raise _unknown(file, prefix, key, here, near)


def _unknown(file: str | None, prefix: str, key: str, known: Iterable[str], near: str | None) -> UsageError:
    if near is None:
        return _wrong(file, prefix + key, f" is not a setting. Known here: {', '.join(sorted(known))}")
    return _wrong(file, prefix + key, f" is not a setting. Did you mean {_name(file, prefix + near)!r}?")


def _wrong(file: str | None, path: str, problem: str) -> UsageError:
    return UsageError(f"{'' if file is None else f'{file}: '}{_name(file, path)}{problem}")


def _name(file: str | None, path: str) -> str:
    """The setting as it is written in this source; options leave ``init_args`` out."""
    return path if file is not None else "--" + path.replace(".init_args", "")
