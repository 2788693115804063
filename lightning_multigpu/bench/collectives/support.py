"""The table of operations that each back end supports on each device, found by trying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_multigpu.bench.collectives.collective_run import OK, CollectivePlan, measure
from lightning_multigpu.bench.collectives.implementations import Implementation
from lightning_multigpu.bench.collectives.operations import Operation
from lightning_multigpu.bench.jobs.host_agents import HostAgents
from lightning_multigpu.report.terminal import columns

WRONG, NOT_SUPPORTED = "wrong", "not supported"
_SIZE = 1 << 12


def try_all(
    hosts: HostAgents, implementations: Sequence[Implementation], operations: Sequence[Operation], timeout_s: float
) -> list[dict[str, Any]]:
    """The entries of ``support``: each operation is tried on a few KiB of float32, in processes of their own."""
    cells = []
    for implementation in implementations:
        for device in ("cpu", "cuda"):
            missing = _missing(implementation, device)
            plan = CollectivePlan(
                operations=operations, implementations=[implementation], sizes=[_SIZE], device_type=device,
                timeout_s=timeout_s,
            )  # fmt: skip
            rows = {} if missing else {row.operation.name: row for row in measure(hosts, plan)}
            for operation in operations:
                row = rows.get(operation.name)
                status = missing or NOT_SUPPORTED if row is None else WRONG if row.wrong else row.status
                reason = None if row is None else f"{row.wrong} wrong elements" if row.wrong else row.reason
                cells.append(
                    {
                        "implementation": implementation.name,
                        "device": device,
                        "operation": operation.name,
                        "supported": status == OK,
                        "status": status,
                        "reason": reason,
                    }
                )
    return cells


def _missing(implementation: Implementation, device: str) -> str | None:
    if not implementation.is_built:
        return "not built"
    if device == "cuda" and not torch.cuda.device_count():
        return "no GPU"
    return NOT_SUPPORTED if implementation.devices and device not in implementation.devices else None


def lines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """The table: a row for each back end and device, a column for each operation; below it the reasons of failures."""
    operations = list(dict.fromkeys(cell["operation"] for cell in cells))
    statuses = {(cell["implementation"], cell["device"], cell["operation"]): cell["status"] for cell in cells}
    places = dict.fromkeys((cell["implementation"], cell["device"]) for cell in cells)
    rows = [[name, device, *(statuses[name, device, each] for each in operations)] for name, device in places]
    failures = [cell for cell in cells if cell["reason"] is not None]
    reasons = ["# {implementation}, {device}, {operation}: {reason}".format(**cell) for cell in failures]
    return [*columns([["# back end", "device", *operations], *rows], "left", "left"), *reasons]
