"""Search for the wrong key of a command line or a configuration file, with the nearest right key.

jsonargparse decides whether a command line is accepted. When it is not, its message quotes the outermost value that
did not fit, which may be the whole of ``trainer.callbacks``; this module then looks for the innermost cause. It is not
asked about what jsonargparse accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lightning_multigpu._suggest import nearest
from lightning_multigpu.commands.settings.classes import ClassNotFoundError, arguments_of, find_class, refusal
from lightning_multigpu.commands.settings.sources import CLASS_KEYS, Settings, load, merge, nested, options
from lightning_multigpu.commands.settings.spelling import check_class
from lightning_multigpu.commands.usage import UsageError

_CLASS_SETTINGS = ("model", "data", "optimizer", "lr_scheduler", "trainer.callbacks", "trainer.logger")
_INDEX = re.compile(r"\[\d+\]$")


def raise_for_wrong_key(arguments: Sequence[str], known: Sequence[str], *, values: bool = True) -> Settings:
    """Raises for the first wrong key or value in the order given; where none is found, returns what was given.

    Args:
        arguments: those after the subcommand.
        known: all settings of the subcommand, as dotted names: ``"trainer.max_epochs"``.
        values: look into the values of the settings too: import classes, and look into their arguments. Else classes
            are looked for in source files alone.

    Raises:
        UsageError: the message names file, key and the nearest right key.
    """
    merged: Settings = {}
    for option, value in options(arguments):
        if option in ("c", "config"):
            search, settings = _Search(known, value, values), load(value)
        else:
            search, settings = _Search(known, None, values), nested(option, value, known)
        merge(merged, settings)
        search.level(settings, merged, "")
    return merged


def condensed(message: str) -> str:
    """A message of jsonargparse in one line, where it only says which types a value could have."""
    if message.startswith("the following arguments are required") and message.endswith(".model"):
        return "no model is given; pass --model=package.module.Class, or 'model:' in a configuration file"
    key = re.match(r'Parser key "(.+?)":\s*', message)
    value = re.search(r"(?:Given value|Got value): (.*)$", message, re.DOTALL)
    expected = re.findall(r"Expected an? (.+?)(?:\.? Got value|\n|$)", message)
    if not value or not expected or "Problem with" in message:
        return message
    types = " or ".join(re.sub(r"<class '(?:.*\.)?(\w+)'>", r"\1", t).replace("NoneType", "None") for t in expected)
    types = re.sub(r"typing\.Literal\[(.*?)\]", r"one of \1", types)
    return f"{key[1]}={value[1]}: expected {types}" if key else f"expected {types}"


@dataclass(frozen=True)
class _Search:
    """Looks for the first wrong key of one source, from the outside in, and raises ``UsageError`` for it.

    Args:
        known: all settings, as dotted names.
        file: the source; None for the command line.
        values: import classes and look into their arguments.
    """

    known: Sequence[str]
    file: str | None
    values: bool

    def level(self, settings: Mapping[str, Any], merged: Mapping[str, Any], prefix: str) -> None:
        """``settings`` are those of the source below ``prefix``, ``merged`` all that were given there so far."""
        for key, value in settings.items():
            path = f"{prefix}{key}"
            if any(path == name or path.startswith(f"{name}.") for name in self.known):
                if path in self.known:
                    self.value(value, merged.get(key), path)
            elif not any(name.startswith(f"{path}.") for name in self.known):
                self.unknown_setting(prefix, str(key))
            elif isinstance(value, Mapping):
                self.level(value, merged[key], f"{path}.")

    def value(self, value: object, merged: object, path: str) -> None:
        if isinstance(value, list):
            for index, item in enumerate(value):
                self.value(item, item, f"{path}[{index}]")
        elif isinstance(value, Mapping):
            self.class_settings(value, merged if isinstance(merged, Mapping) else value, path)
        elif isinstance(value, str) and _INDEX.sub("", path) in _CLASS_SETTINGS and not Path(value).is_file():
            self.find_class(value, path)

    def class_settings(self, value: Mapping[str, Any], merged: Mapping[str, Any], path: str) -> None:
        class_path = merged.get("class_path")
        cls = self.find_class(class_path, path) if isinstance(class_path, str) else None
        if not self.values:
            return
        accepted = arguments_of(cls) if cls is not None else []
        for key in value:
            here, inside = nearest(key, CLASS_KEYS), nearest(key, accepted)
            if key not in CLASS_KEYS and (here or inside or class_path is not None):
                self.unknown(f"{path}.", key, CLASS_KEYS, here or (inside and f"init_args.{inside}"))
        arguments = value.get("init_args")
        if cls is not None and isinstance(arguments, Mapping):
            self.class_arguments(cls, accepted, arguments, f"{path}.init_args.")

    def class_arguments(self, cls: type, accepted: Sequence[str], arguments: Mapping[str, Any], prefix: str) -> None:
        for name, argument in arguments.items():
            if name not in accepted:
                self.unknown(prefix, name, accepted, nearest(name, accepted))
            self.value(argument, argument, f"{prefix}{name}")
            objection = refusal(cls, name, argument)
            if objection is not None:
                self.wrong(f"{prefix}{name}", f"={argument!r}: {condensed(objection)}")

    def find_class(self, class_path: str, path: str) -> type | None:
        try:
            check_class(class_path)
            return find_class(class_path) if self.values else None
        except ClassNotFoundError as error:
            self.wrong(path, f"={class_path}: {error}")

    def unknown_setting(self, prefix: str, key: str) -> NoReturn:
        here = {name.removeprefix(prefix).split(".")[0] for name in self.known if name.startswith(prefix)}
        by_last_word = {name.rpartition(".")[2]: name for name in self.known}
        near, near_elsewhere = nearest(key, here), nearest(key, by_last_word)
        if key in by_last_word or (near is None and near_elsewhere is not None):
            elsewhere = by_last_word[key if key in by_last_word else str(near_elsewhere)]
            self.wrong(prefix + key, f" is not a setting. Did you mean {self.name(elsewhere)!r}?")
        self.unknown(prefix, key, here, near)

    def unknown(self, prefix: str, key: str, known: Iterable[str], near: str | None) -> NoReturn:
        if near is None:
            self.wrong(prefix + key, f" is not a setting. Known here: {', '.join(sorted(known))}")
        self.wrong(prefix + key, f" is not a setting. Did you mean {self.name(prefix + near)!r}?")

    def wrong(self, path: str, problem: str) -> NoReturn:
        where = f"{self.file}: " if self.file is not None else ""
        raise UsageError(f"{where}{self.name(path)}{problem}")

    def name(self, path: str) -> str:
        """The setting as it is written in this source; options leave ``init_args`` out."""
        return path if self.file is not None else "--" + path.replace(".init_args", "")
