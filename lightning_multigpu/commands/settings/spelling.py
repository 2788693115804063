"""Misspelt strategies and classes, found by names and source files alone: importing Lightning or torch takes seconds.

Only names that cannot be right are refused. Other names, for example a bare class name or one that a module creates at
its import, are checked later by importing them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from importlib.util import find_spec
from pathlib import Path

import lightning_multigpu
from lightning_multigpu._suggest import did_you_mean, nearest
from lightning_multigpu.commands.settings.classes import WHERE, ClassNotFoundError
from lightning_multigpu.registry import REGIMES

_CLOSE = 0.85
_MAKES_NAMES = re.compile(r"import \*|__getattr__|\b(?:exec|globals|locals|setattr|vars)\(|sys\.modules")


def check_strategy(name: str) -> None:
    """Checks that a strategy's name is not a misspelt name of this pack.

    Another name may be Lightning's, or one that the user's own module registers. Such a name often contains one of this
    pack's ("my_ring_ddp"), which a misspelt one does not.

    Raises:
        ValueError: it is one; the message lists the names of this pack.
    """
    ours, given = [regime.name for regime in REGIMES], name.lower()
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
        raise ClassNotFoundError(f"No module named {root!r}; {WHERE}")
    if spec is None or not names:
        return
    module, file = root, Path(spec.origin or "")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    for index, name in enumerate(names):
        inside = [found for folder in folders for found in folder.glob(f"{name}*") if found.name.split(".")[0] == name]
        if not inside:
            _check_name(module, file, name, is_last=index == len(names) - 1, is_package=bool(folders))
            return
        folders = [found for found in inside if found.is_dir()]
        file = folders[0] / "__init__.py" if folders else min(inside, key=lambda found: found.suffix != ".py")
        module = f"{module}.{name}"


def _check_name(module: str, file: Path, name: str, *, is_last: bool, is_package: bool) -> None:
    is_ours = module.split(".")[0] == lightning_multigpu.__name__
    try:
        source = file.read_text() if file.suffix == ".py" and file.is_file() else ""
        known = _names(ast.parse(source))
    except (OSError, SyntaxError, ValueError):
        return
    if re.search(rf"\b{re.escape(name)}\b", source) or (_MAKES_NAMES.search(source) and not is_ours):
        return
    if not is_last:
        if is_package:
            raise ClassNotFoundError(f"No module named '{module}.{name}'; {WHERE}")
    elif is_ours:
        if near := nearest(name, _ours()):
            raise ClassNotFoundError(f"{module} has no {name!r}. Did you mean {_ours()[near]!r}?")
    elif source:
        raise ClassNotFoundError(f"{module} has no {name!r}. {did_you_mean(name, known)}".rstrip())


def _names(module: ast.Module) -> Iterable[str]:
    """Of classes that a module defines or imports."""
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def _ours() -> dict[str, str]:
    """This pack's public names, and its callbacks with their module, which is not imported."""
    callbacks = Path(lightning_multigpu.__file__).with_name("callbacks") / "__init__.py"
    found = {name: f"lightning_multigpu.callbacks.{name}" for name in _names(ast.parse(callbacks.read_text()))}
    return found | {name: name for name in lightning_multigpu.__all__}
