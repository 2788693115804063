"""Documents as dataclasses: writing them as JSON, reading them back, and their JSON schema.

================================  =========================================================
a dataclass                       an object, whose keys are the fields
a ``NamedTuple``, a fixed tuple   an array of as many items
``X | None``                      null where there is no value
``Absent[X]``, None by default    a key that is left out where there is no value
a field with another default      a key that documents may lack
================================  =========================================================
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
Absent = Annotated[_T | None, "absent"]
"""The type of a field whose key is left out of the document while the field is None."""
_LARGEST_INTEGER = 2**64  # beyond floats Python's integers overflow where they are divided
_SCALARS: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("boolean", (bool,)),
    int: ("integer", (int,)),
    float: ("number", (int, float)),
    str: ("string", (str,)),
}


class ReportError(ValueError):
    """A document is no report, has an unknown version, or does not follow its schema."""


def as_json(value: Any) -> Any:
    """A dataclass, and what is in it, as what JSON can write."""
    if _is_document(value):
        of: Any = type(value)
        found = ((key, kind, getattr(value, each.name)) for key, each, kind in _fields(of))
        return {key: as_json(v) for key, kind, v in found if not (v is None and get_origin(kind) is Annotated)}
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


def json_schema(kind: type) -> dict[str, Any]:
    """The JSON schema of a document, as an object of JSON."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": kind.__name__, **_schema(kind)}


def _is_document(value: Any) -> bool:
    return is_dataclass(value)


@functools.cache
def _fields(kind: Any) -> list[tuple[str, Field[Any], Any]]:
    """Key, field and type of each field; a keyword of Python as a key has an underscore behind it as a field."""
    hints = get_type_hints(kind, include_extras=True)
    return [(each.name.rstrip("_"), each, hints[each.name]) for each in fields(kind)]


def _is_required(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _items(kind: Any) -> tuple[Any, ...] | None:
    """The types of the items of a tuple with a fixed length; None for another type."""
    if isinstance(kind, type) and issubclass(kind, tuple):
        return tuple(get_type_hints(kind).values())
    fixed = get_origin(kind) is tuple and Ellipsis not in get_args(kind)
    return get_args(kind) if fixed else None


def _read(kind: Any, value: Any, place: str) -> Any:
    if get_origin(kind) is Annotated:
        kind = kind.__origin__
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if NoneType in inner:
        return None if value is None else _read(next(each for each in inner if each is not NoneType), value, place)
    if kind in _SCALARS:
        is_wrong = not isinstance(value, _SCALARS[kind][1]) or isinstance(value, bool) != (kind is bool)
        if is_wrong or (kind is float and isinstance(value, float) and not math.isfinite(value)):
            raise _wrong(place, value, kind.__name__)
        if kind in (int, float) and isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise _wrong(place, value, "an integer of 64 bits")
        return value
    if origin is Literal:
        if value not in inner:
            raise _wrong(place, value, f"one of {', '.join(map(str, inner))}")
        return value
    if _is_document(kind) or origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(place, value, "an object")
        if origin in (dict, Mapping):
            return {inner[0](key): _read(inner[1], item, f"{place}, {key}") for key, item in value.items()}
        return kind(**dict(_read_fields(kind, value, place)))
    if not isinstance(value, list | tuple):
        raise _wrong(place, value, "an array")
    if (types_of_items := _items(kind)) is None:
        found = [_read(inner[0], item, f"{place}[{index}]") for index, item in enumerate(value)]
        return tuple(found) if origin is tuple else found
    if len(value) != len(types_of_items):
        raise _wrong(place, value, f"an array of {len(types_of_items)}")
    items = (_read(each, item, place) for each, item in zip(types_of_items, value, strict=True))
    return kind(*items) if origin is None else tuple(items)


def _read_fields(kind: type, value: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for key, each, inner in _fields(kind):
        if key in value:
            yield each.name, _read(inner, value[key], f"{place}, {key}")
        elif _is_required(each):
            raise ReportError(f"{place} has no {key!r}")


def _wrong(place: str, value: Any, expected: str) -> ReportError:
    return ReportError(f"{place} is {value!r:.80} and not {expected}")


def _schema(kind: Any) -> dict[str, Any]:
    if get_origin(kind) is Annotated:  # the type of the value where its key is in the document
        kind = get_args(kind.__origin__)[0]
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return {}
    if NoneType in inner:
        return {"anyOf": [_schema(each) for each in inner if each is not NoneType] + [{"type": "null"}]}
    if kind in _SCALARS:
        return {"type": _SCALARS[kind][0]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema(inner[1])}
    if _is_document(kind):
        own = _fields(kind)
        properties = {key: _schema(inner) for key, _, inner in own}
        return {"type": "object", "properties": properties, "required": [k for k, each, _ in own if _is_required(each)]}
    if (items := _items(kind)) is None:
        return {"type": "array", "items": _schema(inner[0])}
    return {"type": "array", "prefixItems": [_schema(each) for each in items], "minItems": len(items), "items": False}
