"""The header of a benchmark's results: machine, versions, ranks and command."""

from __future__ import annotations

import platform
import re
import shlex
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_multigpu.bench.jobs.placement import Placement
from lightning_multigpu.callbacks.probes import machine_of
from lightning_multigpu.commands.usage import PROGRAM
from lightning_multigpu.job.shared_gpus import sharing_note

_FILES = ("--json", "--plot", "--config")
_PATH = re.compile(r"(?<![^\s'\"\[(=:,])(?:~|\.{0,2})/(?:[^\s:,;'\"\])/]+/)*([^\s:,;'\"\])/]+)")
_ADDRESS = re.compile(r"\[?\b\d{1,3}(?:\.\d{1,3}){3}\b\]?(?::\d+)?")


def header(placement: Placement, *, threads: int, device_type: str, command: Sequence[str]) -> dict[str, Any]:
    """The first host and the job, as JSON: no host name, no address and no path is in it.

    Args:
        placement: ranks and hosts.
        threads: intra-op threads of each rank.
        device_type: "cpu" or "cuda".
        command: what follows the program's name.
    """
    machine = machine_of(device_type)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": _shown(command),
        "machine": machine,
        "versions": {
            "lightning_multigpu": version("lightning-multigpu"),
            "lightning": version("lightning"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
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


def without_places(text: str) -> str:
    """The first line of a message without this host's name, addresses, and the directories of paths."""
    line = next((part.strip() for part in text.splitlines() if part.strip()), "")
    line = _ADDRESS.sub("<address>", _PATH.sub(r"\1", line))
    name = socket.gethostname()
    return re.sub(rf"\b{re.escape(name)}\b", "<host>", line) if name else line


def _shown(command: Sequence[str]) -> str:
    words: list[str] = []
    for word in command:
        name, _, value = word.partition("=")
        if words and words[-1] in _FILES:
            word = Path(word).name
        elif name in _FILES and value:
            word = f"{name}={Path(value).name}"
        words.append(word)
    return shlex.join([PROGRAM, *words])
