"""Classes given on a command line by path or bare name, and their arguments."""

from __future__ import annotations

import importlib
from argparse import ArgumentError
from collections.abc import Iterator
from pydoc import ErrorDuringImport, locate

from lightning_multigpu._suggest import did_you_mean, nearest
from lightning_multigpu.registry import REGIMES

WHERE = "modules are looked for in the current directory and among the installed packages"


class ClassNotFoundError(LookupError):
    """There is no such class, or its module cannot be imported; the message says which of the two."""


def find_class(path: str) -> type | None:
    """The class at a dotted path, or the known class of that bare name; None if the object there is no class.

    Raises:
        ClassNotFoundError: nothing is found.
    """
    if "." not in path:
        return _class_of_name(path)
    module_name, _, name = path.rpartition(".")
    try:
        found = locate(path)
        if found is None:
            module = importlib.import_module(module_name)
            is_ours = module_name.split(".")[0] == "lightning_multigpu"
            hint = (is_ours and _did_you_mean_class(name)) or did_you_mean(name, dir(module))
            raise ClassNotFoundError(f"{module_name} has no {name!r}. {hint}".rstrip())
    except ErrorDuringImport as error:
        raise ClassNotFoundError(f"importing it failed with {error.value!r}") from error
    except ModuleNotFoundError as error:
        raise ClassNotFoundError(f"{error.msg}; {WHERE}") from error
    return found if isinstance(found, type) else None


def arguments_of(cls: type) -> list[str]:
    """The names of the arguments that a configuration file may give the class."""
    from jsonargparse import ArgumentParser

    names = ArgumentParser(exit_on_error=False).add_class_arguments(cls, fail_untyped=False)
    return list(dict.fromkeys(name.split(".")[0] for name in names))


def refusal(cls: type, name: str, value: object) -> str | None:
    """The objection of jsonargparse to this value of the argument ``name``; None without one."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, fail_untyped=False)
    heading = f'Parser key "{name}":'
    try:
        parser.parse_object({name: value})
    except ArgumentError as error:
        # Other arguments may be missing here; what was given for them is not this function's concern.
        return error.message.removeprefix(heading).strip() if error.message.startswith(heading) else None
    return None


def _class_of_name(name: str) -> type:
    found = [cls for cls in _classes() if cls.__name__ == name]
    if len(found) > 1:
        paths = " or ".join(sorted(map(_short_path, found), reverse=True))
        raise ClassNotFoundError(f"{len(found)} classes have this name: write {paths}")
    if found:
        return found[0]
    for regime in REGIMES:
        if regime.name == name:
            raise ClassNotFoundError(
                f"a strategy's name takes no options; with options, pass its class {regime.strategy.__name__}"
            )
    raise ClassNotFoundError(f"there is no such class. {_did_you_mean_class(name)}".rstrip())


def _did_you_mean_class(name: str) -> str:
    """A hint at a class of Lightning or of torch by its bare name, or of this pack's callbacks by its path."""
    ours = "lightning_multigpu.callbacks"
    module = importlib.import_module(ours)
    paths = {found: f"{ours}.{found}" for found in module.__all__ if isinstance(getattr(module, found), type)}
    near = nearest(name, [cls.__name__ for cls in _classes()])
    return "" if near is None else f"Did you mean {paths.get(near, near)!r}?"


def _short_path(cls: type) -> str:
    """The shortest path at which the class can be imported."""
    parts = cls.__module__.split(".")
    short = (".".join([*parts[:number], cls.__name__]) for number in range(1, len(parts)))
    return next((path for path in short if locate(path) is cls), f"{cls.__module__}.{cls.__name__}")


def _classes() -> set[type]:
    """The classes that a command line may give by their bare names: those that have been imported."""
    from lightning.pytorch import Callback, LightningDataModule, LightningModule
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.profilers import Profiler
    from lightning.pytorch.strategies import Strategy
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    bases = (Strategy, Callback, Logger, Profiler, LightningModule, LightningDataModule, Optimizer, LRScheduler)
    return {cls for base in bases for cls in _subclasses(base)}


def _subclasses(cls: type) -> Iterator[type]:
    subclass: type
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
