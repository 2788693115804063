"""Strategies and classes given by name, looked for in source files: importing Lightning or torch takes seconds.

Only names that cannot be right are refused. Other names, for example a bare class name or one that a module creates at
its import, are checked later by importing them.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from pydoc import ErrorDuringImport, locate

import lightning_multigpu
from lightning_multigpu._suggest import did_you_mean, nearest
from lightning_multigpu.registry import STRATEGIES

_CLOSE = 0.85
_MAKES_NAMES = re.compile(r"import \*|__getattr__|\b(?:exec|globals|locals|setattr|vars)\(|sys\.modules")
_WHERE = "modules are looked for in the current directory and among the installed packages"
_OURS = lightning_multigpu.__name__
_PACKAGES = (  # whose classes may be given by their bare names
    *(f"lightning.pytorch.{name}" for name in ("callbacks", "loggers", "profilers", "strategies")),
    *("torch.optim", "torch.optim.lr_scheduler"),
)


class ClassNotFoundError(LookupError):
    """There is no such class, or its module cannot be imported; the message says which of the two."""


def check_strategy(name: str) -> None:
    """Checks that a strategy's name is not a misspelt name of this pack.

    Another name may be Lightning's, or one that the user's own module registers. Such a name often contains one of this
    pack's ("my_ring_ddp"), which a misspelt one does not.

    Raises:
        ValueError: it is one; the message lists the names of this pack.
    """
    ours, given = [row.name for row in STRATEGIES], name.lower()
    near = nearest(given, ours)
    if near is None or near in given or SequenceMatcher(None, given, near).ratio() < _CLOSE:
        return
    raise ValueError(
        f"strategy={name!r} is unknown. Did you mean {near!r}?\n"
        f"  this pack's: {', '.join(ours)}\n"
        "  else pass a name of Lightning's, such as auto or ddp"
    )


def check_class(path: str) -> None:
    """Checks that the source of a dotted path's module has the class's name in it.

    Raises:
        ClassNotFoundError: there is no such module, or the name does not occur in its source.
    """
    root, *names = path.split(".")
    try:
        spec = find_spec(root)  # of a package within another one it would import that one
    except (ImportError, ValueError):
        return
    if names and spec is None and path.replace(".", "").isidentifier():
        raise ClassNotFoundError(f"No module named {root!r}; {_WHERE}")
    while spec and names and (folders := spec.submodule_search_locations) is not None:
        inner = PathFinder.find_spec(f"{spec.name}.{names[0]}", list(folders))
        if inner is None:
            break
        spec, names = inner, names[1:]
    if not spec or not names:
        return
    name, is_ours = names[0], spec.name.split(".")[0] == _OURS
    source, known = _source(Path(spec.origin or ""))
    if known is None or re.search(rf"\b{re.escape(name)}\b", source) or (_MAKES_NAMES.search(source) and not is_ours):
        return
    if len(names) > 1 and spec.submodule_search_locations is not None:
        raise ClassNotFoundError(f"No module named '{spec.name}.{name}'; {_WHERE}")
    if len(names) == 1 and (source or is_ours):
        hint = (is_ours and did_you_mean_class(name, ours=True)) or did_you_mean(name, known)
        raise ClassNotFoundError(f"{spec.name} has no {name!r}. {hint}".rstrip())


def find_class(path: str) -> type | None:
    """The class at a dotted path; None if the object there is no class.

    Raises:
        ClassNotFoundError: nothing is found.
    """
    module, _, name = path.rpartition(".")
    try:
        found = locate(path)
        if found is None:
            check_class(path)
            known = dir(importlib.import_module(module))
            raise ClassNotFoundError(f"{module} has no {name!r}. {did_you_mean(name, known)}".rstrip())
    except ErrorDuringImport as error:
        raise ClassNotFoundError(f"importing it failed with {error.value!r}") from error
    except ModuleNotFoundError as error:
        raise ClassNotFoundError(f"{error.msg}; {_WHERE}") from error
    return found if isinstance(found, type) else None


def no_such_class(name: str) -> str:
    """What is wrong with a bare name that jsonargparse does not know."""
    for row in STRATEGIES:
        if row.name == name:
            return f"a strategy's name takes no options; with options, pass its class {row.strategy.__name__}"
    return f"there is no such class. {did_you_mean_class(name)}".rstrip()


def did_you_mean_class(name: str, *, ours: bool = False) -> str:
    """A hint at a public class of this pack, or of Lightning and torch too, by the name that a command line takes."""
    found = {} if ours else {known: known for package in _PACKAGES for known in _public(package)}
    found |= {known: known for known in lightning_multigpu.__all__}
    found |= {known: f"{_OURS}.callbacks.{known}" for known in _public(f"{_OURS}.callbacks")}
    near = nearest(name, found)
    return "" if near is None else f"Did you mean {found[near]!r}?"


def same_name_of_ours(name: str) -> str:
    """A hint at this pack's callback of the same name; Lightning's was taken for the bare one."""
    package = f"{_OURS}.callbacks"
    return f"Or did you mean '{package}.{name}'?" if name in _public(package) else ""


def _public(package: str) -> list[str]:
    """The classes that a package's ``__init__`` defines or imports; those above it are imported."""
    spec = PathFinder.find_spec(package, lightning_multigpu.__path__)
    spec = spec if package.startswith(_OURS) else find_spec(package)
    return _source(Path((spec and spec.origin) or ""))[1] or []


def _source(file: Path) -> tuple[str, list[str] | None]:
    """The text of a module, and the classes that it defines or imports; None where it cannot be read."""
    try:
        source = file.read_text() if file.suffix == ".py" and file.is_file() else ""
        return source, list(_names(ast.parse(source)))
    except (OSError, SyntaxError, ValueError):
        return "", None


def _names(module: ast.Module) -> Iterable[str]:
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
