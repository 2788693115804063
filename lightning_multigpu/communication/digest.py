"""Tables of the settings that ranks must have in common, the differences between them, and ranks as text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

Table = Mapping[str, str]

_MAX_ENTRIES = 5
_MAX_VALUE_CHARS = 120
_ABSENT = "(none)"
_PLACE_IN_MEMORY = re.compile(r" at 0x[0-9a-f]+")


def value_text(value: Any) -> str:
    """A value as text that is the same in every process: functions and classes by their names, not their addresses."""
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    text = _PLACE_IN_MEMORY.sub("", repr(value))
    if len(text) > _MAX_VALUE_CHARS:
        text = f"{text[:_MAX_VALUE_CHARS]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
    return text


def model_table(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Name -> dtype and shape of parameters and buffers, in their order: ``{"0 layer.weight": "float32 (2, 4)"}``."""
    table: dict[str, str] = {}
    for index, (name, tensor) in enumerate(tensors):
        shape = "of no shape yet" if is_lazy(tensor) else str(tuple(tensor.shape))
        table[f"tensor {index}"] = f"{name} {str(tensor.dtype).removeprefix('torch.')} {shape}"
    return table


def fingerprint(table: Table) -> str:
    """64 hexadecimal digits that are equal for equal tables only."""
    return hashlib.sha256(json.dumps(sorted(table.items())).encode()).hexdigest()


def compared(table: Table, gather: Callable[[Any], list[Any]], what: str) -> str | None:
    """The differences between this rank's table and those of the others, as :func:`disagreement` words them.

    ``gather`` gathers an object of every rank, in rank order; all ranks call it the same number of times.
    """
    own = fingerprint(table)
    if set(gather(own)) == {own}:
        return None
    return disagreement(dict(enumerate(gather(table))), what)


def disagreement(tables: Mapping[int, Table], what: str, *, absent_differs: bool = True) -> str | None:
    """One message that names the first entries that differ, each value, and which ranks have it; None if none differ.

    ``what`` begins the message's first line: "are not set up alike", before the first entry. With ``absent_differs``
    a rank without an entry differs from ranks that have it.
    """
    # A list of dict keys keeps the order of the tables, where a set of names would not.
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    differing: list[str] = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, table in sorted(tables.items()):
            if name in table or absent_differs:
                ranks_of.setdefault(table.get(name, _ABSENT), []).append(rank)
        if len(ranks_of) > 1:
            values = "; ".join(f"{value} on {rank_list(ranks)}" for value, ranks in ranks_of.items())
            differing.append(f"  {name}: {values}")
    if not differing:
        return None
    more = len(differing) - _MAX_ENTRIES
    if more > 0:
        differing[_MAX_ENTRIES:] = [f"  and {more} more"]
    return f"the ranks {what}: " + "\n".join(differing).lstrip()


def rank_list(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    ordered = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])]
    spans = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'' if len(ordered) == 1 else 's'} {spans}"


def ranks_text(ranks: Sequence[int]) -> str:
    """The members of a group in a few characters: "0-3", with a stride "0-6:2", otherwise "0,3,4"."""
    if len(ranks) < 2:
        return ",".join(map(str, ranks))
    stride = ranks[1] - ranks[0]
    if stride > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, stride)):
        return f"{ranks[0]}-{ranks[-1]}" + (f":{stride}" if stride > 1 else "")
    return ",".join(map(str, ranks))
