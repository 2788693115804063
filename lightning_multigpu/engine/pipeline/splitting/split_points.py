"""Finds the module that split points cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from torch.nn import Module, ModuleDict, ModuleList


def find_whole(module: Module, name: str, points: Sequence[str]) -> tuple[str, Module]:
    """Name and module of what is cut at ``points``, names of submodules of ``module``.

    Args:
        name: the name, or "auto" for the smallest submodule that has all points in its forward pass.

    Raises:
        ValueError: there are no such submodules.
    """
    name = _smallest_around(module, points) if name == "auto" else name
    return name, _checked(module, name, points)


def _smallest_around(module: Module, points: Sequence[str]) -> str:
    """The name of the smallest submodule that has all points, and a forward pass."""
    parts = [point.split(".")[:-1] for point in points]
    common = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))]
    while common and isinstance(_part(module, ".".join(common)), ModuleList | ModuleDict | None):
        common = common[:-1]
    return ".".join(common)


def _part(module: Module, name: str) -> Module | None:
    return dict(module.named_modules()).get(name)


def _checked(module: Module, name: str, points: Sequence[str]) -> Module:
    whole = _part(module, name)
    if whole is None:
        raise ValueError(f"module={name!r} is no part of the module; {_children(module, '')}")
    for point in points:
        if _part(module, point) is None:
            parent = point.rpartition(".")[0]
            raise ValueError(
                f"split_points names {point!r}, which is no part of the module; {_children(module, parent)}"
            )
        if name and not point.startswith(f"{name}."):
            raise ValueError(f"split_points names {point!r}, which is not within module={name!r}; leave module= out")
    return whole


def _children(module: Module, parent: str) -> str:
    found = _part(module, parent) if parent else None
    prefix, title = (f"{parent}.", repr(parent)) if found is not None else ("", "the module")
    names = [f"{prefix}{child}" for child, _ in (found or module).named_children()]
    return f"{title} has {', '.join(map(repr, names)) or 'no parts'}"
