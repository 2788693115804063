"""The header of a benchmark's results: machine, versions, ranks and command."""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_multigpu.bench.jobs.placement import Placement
from lightning_multigpu.commands.usage import PROGRAM
from lightning_multigpu.strategies.option_checks import available_cpu_count

_FILES = ("--json", "--plot")
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
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": _shown(command),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count() or 1,
            "usable_cores": available_cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": _gpus() if device_type == "cuda" else [],
            "system": f"{platform.system()} {platform.release()}",
        },
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
    }


def header_lines(header: dict[str, Any]) -> list[str]:
    """The header for people, as comment lines."""
    machine, versions = header["machine"], header["versions"]
    gpus = f", {', '.join(sorted(set(machine['gpus'])))} x {len(machine['gpus'])}" if machine["gpus"] else ""
    return [
        f"# {header['date']}: {header['command']}",
        f"# {machine['processor']}, {machine['usable_cores']} of {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB{gpus}, {machine['system']}",
        "# " + ", ".join(f"{name} {number}" for name, number in versions.items()),
        f"# {header['ranks']} ranks ({header['nodes']} x {header['ranks_per_node']}), "
        f"{header['threads_per_rank']} intra-op thread(s) a rank, {header['device']} tensors",
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


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
