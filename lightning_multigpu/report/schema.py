"""Documents as dataclasses: writing them as JSON, and reading them back.

================================  =========================================================
a dataclass                       an object, whose keys are the fields
a ``NamedTuple``                  an array of as many items
``X | None``, None by default     a key that is left out where there is no value
a field with another default      a key that documents may lack
================================  =========================================================
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_LARGEST_INTEGER = 2**64  # beyond floats Python's integers overflow where they are divided
_SCALARS: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}


class ReportError(ValueError):
    """A document is no report, has an unknown version, or does not follow its schema."""


def as_json(value: Any) -> Any:
    """A dataclass, and what is in it, as what JSON can write."""
    if is_dataclass(value) and not isinstance(value, type):
        found = ((key, getattr(value, each.name), each.default) for key, each, _ in _fields(type(value)))
        return {key: as_json(v) for key, v, default in found if not (v is None and default is None)}
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value


def attributes(value: Any, *names: str) -> dict[str, Any]:
    """Some fields and properties of an object as what JSON can write."""
    return {name: as_json(getattr(value, name)) for name in names}


def from_json(kind: type[_T], value: Any, place: str = "the document") -> _T:
    """The dataclass ``kind`` from what JSON has read; keys that it does not know are left out.

    Raises:
        ReportError: a key is missing, or a value has another type; the message names its place.
    """
    found: _T = _read(kind, value, place)
    return found


@functools.cache
def _fields(kind: Any) -> list[tuple[str, Field[Any], Any]]:
    """Key, field and type of each field; a keyword of Python as a key has an underscore behind it as a field."""
    hints = get_type_hints(kind)
    return [(each.name.rstrip("_"), each, hints[each.name]) for each in fields(kind)]


def _read(kind: Any, value: Any, place: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if NoneType in inner:
        return None if value is None else _read(inner[0], value, place)
    if kind in _SCALARS:
        is_wrong = not isinstance(value, _SCALARS[kind]) or isinstance(value, bool) != (kind is bool)
        if is_wrong or (kind is float and isinstance(value, float) and not math.isfinite(value)):
            raise _wrong(place, value, kind.__name__)
        if kind in (int, float) and isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise _wrong(place, value, "an integer of 64 bits")
        return value
    if origin is Literal:
        if value not in inner:
            raise _wrong(place, value, f"one of {', '.join(map(str, inner))}")
        return value
    if is_dataclass(kind) or origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(place, value, "an object")
        if origin in (dict, Mapping):
            return {inner[0](key): _read(inner[1], item, f"{place}, {key}") for key, item in value.items()}
        for key, each, _ in _fields(kind):
            if key not in value and each.default is MISSING and each.default_factory is MISSING:
                raise ReportError(f"{place} has no {key!r}")
        found = {each.name: _read(t, value[key], f"{place}, {key}") for key, each, t in _fields(kind) if key in value}
        return kind(**found)
    if not isinstance(value, list | tuple):
        raise _wrong(place, value, "an array")
    if isinstance(kind, type) and issubclass(kind, tuple):
        types = get_type_hints(kind).values()
        if len(value) != len(types):
            raise _wrong(place, value, f"an array of {len(types)}")
        return kind(*(_read(each, item, place) for each, item in zip(types, value, strict=True)))
    items = [_read(inner[0], item, f"{place}[{index}]") for index, item in enumerate(value)]
    return tuple(items) if origin is tuple else items


def _wrong(place: str, value: Any, expected: str) -> ReportError:
    return ReportError(f"{place} is {value!r:.80} and not {expected}")
