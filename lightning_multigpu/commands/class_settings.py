"""Classes and their arguments, as jsonargparse reads them from a command line or a configuration file."""

from __future__ import annotations

import re
from importlib import import_module
from pydoc import ErrorDuringImport, locate

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import callbacks, loggers

import lightning_multigpu
import lightning_multigpu.callbacks
from lightning_multigpu._suggest import did_you_mean, nearest
from lightning_multigpu.registry import STRATEGIES

# Lines that only list what a value could have been.
_NOISE = re.compile(
    r"\s*(- )?(Does not validate|Subtypes:|Errors:|Given value type:|Expected a <class 'NoneType'>|Expected a path but|"
    r"Not a valid subclass|Subclass types expect|a (class path|dict) )"
)


def find_class(path: str) -> type:
    """The class at a dotted path.

    Raises:
        ValueError: there is no such class, or importing its module fails.
    """
    module, _, name = path.rpartition(".")
    try:
        found = locate(path)
    except ErrorDuringImport as error:
        raise ValueError(f"{path}: importing it failed with {error.value!r}") from error
    if isinstance(found, type):
        return found
    try:
        hint = did_you_mean(name, dir(import_module(module)))
    except (ImportError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    raise ValueError(f"{path}: {module} has no class {name!r}. {hint}".rstrip())


def class_parser(cls: type) -> ArgumentParser:
    """A parser of the arguments that a configuration file may give the class."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, fail_untyped=False)
    return parser


def arguments_of(cls: type) -> list[str]:
    """The names of these arguments."""
    # Iterating a Namespace would go through its values.
    names = class_parser(cls).get_defaults(skip_validation=True).keys()
    return list(dict.fromkeys(name.split(".")[0] for name in [*names]))


def explained(message: str) -> str:
    """A message of jsonargparse without the types that a value does not have, and with the nearest right name."""
    lines = [line for line in message.splitlines() if line.strip() and not _NOISE.match(line)]
    hint = ""
    if found := re.search(r"class_path '(.+?)':\s+Option '(.+?)' is not accepted", message):
        hint = did_you_mean(found[2], arguments_of(find_class(found[1])))
    elif found := re.search(r"module '(.+?)' has no attribute '(.+?)'", message):
        hint = did_you_mean(found[2], dir(import_module(found[1])))
    elif found := re.search(r"Expected a dot import path string: (\S+)", message):
        known = {row.name: row.class_path for row in STRATEGIES}
        for module in (torch.optim, callbacks, loggers, lightning_multigpu, lightning_multigpu.callbacks):
            known |= {name: f"{module.__name__}.{name}" for name in module.__all__}
        near = nearest(found[1], known)
        hint = f"Did you mean {known[near]!r}?" if near else ""
    return "\n".join([*lines, *([f"  {hint}"] if hint else [])])
