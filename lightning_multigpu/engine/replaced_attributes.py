"""Attributes of objects and modules that have other values within a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, **attributes: Any) -> Iterator[None]:
    """Within the block ``owner``, an object or an imported module, has these attributes as its own."""
    table = vars(owner)
    before = {name: table[name] for name in attributes if name in table}
    table.update(attributes)
    try:
        yield
    finally:
        table.update(before)  # first: another thread may read them
        for name in attributes.keys() - before.keys():
            table.pop(name, None)
