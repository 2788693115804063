"""Makes compressors from a user's setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from lightning_multigpu._suggest import did_you_mean
from lightning_multigpu.communication.compression.compressors import Bf16, Compressor, Int8

COMPRESSORS: dict[str, type[Compressor]] = {kind.name: kind for kind in (Bf16, Int8)}
"""Name -> compressor."""


def make_compressor(compression: str | Mapping[str, Any] | Compressor) -> Compressor:
    """The compressor of a setting: ``"int8"``, ``{"name": "int8", "chunk_size": 256}``, or a compressor itself.

    Args:
        compression: a name, or a mapping with ``name`` and options; a compressor is returned as it is.

    Raises:
        ValueError: the name or an option is unknown, ``name`` is missing, an option's value is out of range, or
            ``compression`` has another type.
    """
    if isinstance(compression, Compressor):
        return compression
    options: dict[str, Any] = {}
    if isinstance(compression, Mapping):
        if "name" not in compression:
            raise ValueError(f"compression={dict(compression)!r} lacks 'name': use one of {_listed(COMPRESSORS)}")
        options = {str(key): value for key, value in compression.items() if key != "name"}
        compression = compression["name"]
    if not isinstance(compression, str):
        raise ValueError(f"compression={compression!r} is a {type(compression).__name__}: use a name or a mapping")
    if compression not in COMPRESSORS:
        known = f"use one of {_listed(COMPRESSORS)}. {did_you_mean(compression, COMPRESSORS)}".rstrip()
        raise ValueError(f"compression={compression!r} is unknown: {known}")
    kind = COMPRESSORS[compression]
    known_options = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for option in options:
        if option not in known_options:
            has = f"has {_listed(known_options)}" if known_options else "has no options"
            hint = f"{has}. {did_you_mean(option, known_options)}".rstrip()
            raise ValueError(f"compression {compression!r} has no option {option!r}: it {hint}")
    return kind(**options)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
