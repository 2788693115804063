"""The header of a benchmark's results: machine, versions, ranks and command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from lightning_multigpu.bench.jobs.placement import Placement
from lightning_multigpu.callbacks.probes import machine_of
from lightning_multigpu.callbacks.run_report import versions_of
from lightning_multigpu.commands.usage import PROGRAM
from lightning_multigpu.job.shared_gpus import sharing_note


def header(placement: Placement, *, threads: int, device_type: str, command: Sequence[str]) -> dict[str, Any]:
    """The first host and the job, as JSON; ``command`` is what follows the program's name."""
    machine = machine_of(device_type)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": shlex.join([PROGRAM, *command]),
        "machine": machine,
        "versions": versions_of(torch.device(device_type)),
        "ranks": placement.world_size,
        "nodes": placement.num_nodes,
        "ranks_per_node": placement.devices,
        "threads_per_rank": threads,
        "device": device_type,
        "note": sharing_note(placement.devices, len(machine["gpus"])) if device_type == "cuda" else None,
    }


def header_lines(header: dict[str, Any]) -> list[str]:
    """The header for people, as comment lines."""
    machine, versions = header["machine"], header["versions"]
    gpus = f", {', '.join(sorted(set(machine['gpus'])))} x {len(machine['gpus'])}" if machine["gpus"] else ""
    return [
        f"# {header['date']}: {header['command']}",
        f"# {machine['processor']}, {machine['usable_cores']} of {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB{gpus}, {machine['system']}",
        "# " + ", ".join(f"{name} {number}" for name, number in versions.items()),
        f"# {header['ranks']} ranks ({header['nodes']} x {header['ranks_per_node']}), "
        f"{header['threads_per_rank']} intra-op thread(s) a rank, {header['device']} tensors",
        *([f"# {header['note']}"] if header["note"] else []),
    ]
