"""The table of operations that each back end supports on each device, found by trying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_multigpu.bench.collectives.collective_run import (
    CRASHED,
    FAILED,
    NOT_SUPPORTED,
    OK,
    TIMED_OUT,
    CollectivePlan,
    measure,
)
from lightning_multigpu.bench.collectives.implementations import Implementation
from lightning_multigpu.bench.collectives.operations import Operation
from lightning_multigpu.bench.jobs.host_agents import HostAgents

NOT_BUILT, NO_GPU, WRONG = "not built", "no GPU", "wrong"
DEVICE_TYPES = ("cpu", "cuda")
_SIZE = 1 << 12
_SHOWN = {
    OK: "yes",
    WRONG: "WRONG",
    NOT_SUPPORTED: "no",
    FAILED: "fails",
    CRASHED: "crash",
    TIMED_OUT: "hang",
    NOT_BUILT: "-",
    NO_GPU: "-",
}
_MEANINGS = {
    "yes": "does it, and the result is right",
    "WRONG": "the result is wrong",
    "no": "refuses",
    "fails": "some ranks raise an exception",
    "crash": "a process ends",
    "hang": "no answer in time",
    "-": "the back end is not part of this build of torch, or there is no GPU",
}
_NO_SUCH = (NOT_SUPPORTED, None)


@dataclass(frozen=True)
class Cell:
    """One back end, one device, one operation; ``reason`` says why where the status is not "ok"."""

    implementation: str
    device_type: str
    operation: str
    status: str
    reason: str | None


def try_all(
    hosts: HostAgents, implementations: Sequence[Implementation], operations: Sequence[Operation], *, timeout_s: float
) -> Iterator[Cell]:
    """Tries each operation on a few KiB of float32, in processes of their own, which may crash or hang."""
    for implementation in implementations:
        for device_type in DEVICE_TYPES:
            missing = _missing(implementation, device_type)
            if missing is not None:
                yield from (Cell(implementation.name, device_type, o.name, *missing) for o in operations)
                continue
            plan = CollectivePlan(
                operations=operations,
                implementations=[implementation],
                sizes=[_SIZE],
                device_type=device_type,
                dtype=torch.float32,
                repetitions=1,
                warm_up=0,
                timeout_s=timeout_s,
            )
            found = {row.operation.name: row for row in measure(hosts, plan)}
            for operation in operations:
                row = found.get(operation.name)
                status, reason = _NO_SUCH if row is None else (row.status, row.reason)
                if row is not None and row.wrong:
                    status, reason = WRONG, f"{row.wrong} wrong elements"
                yield Cell(implementation.name, device_type, operation.name, status, reason)


def _missing(implementation: Implementation, device_type: str) -> tuple[str, str | None] | None:
    if not implementation.is_built:
        return NOT_BUILT, f"{implementation.backend} is not part of this build of torch"
    if device_type == "cuda" and not torch.cuda.device_count():
        return NO_GPU, "this machine has no GPU"
    if implementation.devices and device_type not in implementation.devices:
        return _NO_SUCH
    return None


def lines(cells: Sequence[Cell]) -> list[str]:
    """The table: one row an operation, one column a back end and device; below it the meanings of its entries."""
    columns = list(dict.fromkeys((cell.implementation, cell.device_type) for cell in cells))
    by_place = {(cell.implementation, cell.device_type, cell.operation): _SHOWN[cell.status] for cell in cells}
    operations = list(dict.fromkeys(cell.operation for cell in cells))
    width = max(map(len, operations))
    widths = [max(6, len(name)) for name, _ in columns]
    heads = zip(columns, widths, strict=True)
    table = [
        " ".join(["#".ljust(width), *(f"{name:>{w}}" for (name, _), w in heads)]),
        " ".join(["#".ljust(width), *(f"{device:>{w}}" for (_, device), w in zip(columns, widths, strict=True))]),
    ]
    for operation in operations:
        words = (by_place[(*column, operation)] for column in columns)
        table.append(" ".join([operation.ljust(width), *(f"{x:>{w}}" for x, w in zip(words, widths, strict=True))]))
    used = [word for word in _MEANINGS if word in by_place.values()]
    return [*table, "# " + "; ".join(f"{word}: {_MEANINGS[word]}" for word in used), *_reasons(cells)]


def _reasons(cells: Sequence[Cell]) -> list[str]:
    told = [cell for cell in cells if cell.reason is not None and cell.status not in (NOT_BUILT, NO_GPU)]
    return [f"# {cell.implementation}, {cell.device_type}, {cell.operation}: {cell.reason}" for cell in told]


def as_json(cell: Cell) -> dict[str, Any]:
    """One entry of ``support``."""
    return {
        "implementation": cell.implementation,
        "device": cell.device_type,
        "operation": cell.operation,
        "supported": cell.status == OK,
        "status": cell.status,
        "reason": cell.reason,
    }
