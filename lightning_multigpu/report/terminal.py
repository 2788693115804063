"""Text of the terminal: lines, and tables without a frame."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDEST = 10_000


def say(console: Console, *lines: str) -> None:
    """Prints lines as they are, however wide the terminal is."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def narrow() -> Table:
    """A table without columns and frame, whose columns are close to each other."""
    return Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)


def columns(rows: Sequence[Sequence[str]], first: Literal["left", "right"] = "right", *others: str) -> list[str]:
    """A line for each row, with the cells of a column below each other; never wrapped.

    ``first`` and ``others`` are "left" or "right" for each column; the last one counts for further columns.
    """
    table = Table.grid(padding=(0, 2, 0, 0))
    for index in range(len(rows[0])):
        justify = [first, *others][min(index, len(others))]
        table.add_column(justify="left" if justify == "left" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=_WIDEST, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]
