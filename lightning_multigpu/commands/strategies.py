"""``lightning-multigpu strategies``: every registered strategy and the bytes that it sends between ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_multigpu.commands.option_parser import OptionParser
from lightning_multigpu.commands.usage import PROGRAM
from lightning_multigpu.registry import STRATEGIES, StrategyRow

SYMBOLS = {
    "S": "bytes of the gradients, equal to the bytes of the model",
    "N": "ranks",
    "n": "nodes",
    "K": "servers",
    "P": "devices of a pipeline",
    "v": "stages of each device",
    "M": "micro-batches of a batch",
    "A": "bytes of a batch's activations between two stages or blocks",
    "d": "pipelines of hybrid",
    "p": "stages of a pipeline of hybrid",
    "t": "ranks of a tensor group of hybrid",
}


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the strategies as a table."""
    parser = OptionParser(
        f"{PROGRAM} {name}",
        "List every training strategy of this pack: what Trainer(strategy=...) accepts, where computation "
        "happens, how gradients and the model travel, and how many bytes that is per step.",
    )
    parser.parse(arguments)
    Console(file=sys.stdout).print(as_table(STRATEGIES))
    return 0


def as_table(rows: Sequence[StrategyRow]) -> Table:
    """A table with one block of rows a strategy: six columns of sentences would not fit on 80 characters."""
    symbols = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in SYMBOLS.items())
    table = Table(title="Trainer(strategy=...)", caption=symbols, show_header=False, title_justify="left")
    table.caption_justify = "left"
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for row in rows:
        details = Table.grid(padding=(0, 1))
        details.add_column(no_wrap=True, style="dim")
        details.add_column()
        options = ", ".join(f"{name}={value!r}" for name, value in row.options.items())
        for label, value in (
            ("summary", row.summary),
            ("class", row.class_path + (f" with {options}" if options else "")),
            ("compute", row.compute),
            ("gradients", row.gradients),
            ("model", row.model),
            ("bytes/step", row.bytes_per_step),
        ):
            details.add_row(label, Text(value))
        table.add_row(row.name, details, end_section=True)
    return table
