"""``lightning-multigpu topology``: what joins the devices of this host, and the paths of bytes.

What joins GPUs and network cards is read by ``nvidia-smi``, which comes with the driver.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import psutil

from lightning_multigpu.commands.option_parser import OptionParser
from lightning_multigpu.commands.usage import PROGRAM
from lightning_multigpu.registry import STRATEGIES
from lightning_multigpu.report.terminal import columns

Links = dict[str, dict[str, str]]
"""GPU -> GPU -> what joins them, in the words of ``nvidia-smi``, such as "NV4" or "PXB"."""
SYS = Path("/sys")
NETWORKS = ("RDMA", "TCP through the host's memory")
"""Paths between GPUs of two hosts, the fastest first."""
_INSIDE = {
    "messages": "TCP inside the host",
    "collectives and messages": "shared memory; between stages TCP inside the host",
    "one process": "memory of the process",
}


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the topology."""
    description = (
        'Show what joins the devices of this host ("nvidia-smi topo -m"), and the path that each strategy\'s bytes '
        f'take. "{PROGRAM} doctor" compares the hosts of a job.'
    )
    OptionParser(f"{PROGRAM} {name}", description).parse(arguments)
    matrix, reason = nvidia_smi("topo", "-m")
    inside, rdma = path_inside(links_in(matrix)), rdma_devices()
    facts = [("GPUs", inside or f"none ({reason}): CPU ranks compute, on {psutil.cpu_count()} threads")]
    facts += [(device, f"RDMA, {speed}") for device, speed in rdma.items()]
    for interface, found in psutil.net_if_stats().items():
        speed = f"{found.speed / 1e3:g} Gbit/s" if found.speed else "speed unknown"
        facts.append((interface, f"interface, {'up' if found.isup else 'down'}, {speed}"))
    network = NETWORKS[0 if rdma else 1]
    by_path: dict[tuple[str, str], list[str]] = {}
    for row in STRATEGIES:
        by_path.setdefault(paths(row.transport, inside, network), []).append(row.name)
    rows = [("in one host", "between hosts", "bytes of"), *((*path, ", ".join(by_path[path])) for path in by_path)]
    print(matrix, *columns(facts, "left"), "", *columns(rows, "left"), sep="\n")
    return 0


def nvidia_smi(*arguments: str) -> tuple[str, str]:
    """What ``nvidia-smi`` prints, without colours; or nothing, and the reason."""
    try:
        ended = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(getattr(error, "stdout", None) or error).strip()
    return re.sub(r"\x1b\[\d*m", "", ended.stdout), ""


def links_in(table: str) -> Links:
    """What a table of ``nvidia-smi topo`` says."""
    header, *rows = [line.split() for line in table.splitlines() if line.split()] or [[]]
    return {row[0]: dict(zip(header, row[1:], strict=False)) for row in rows if row[0].startswith("GPU")}


def path_inside(links: Links) -> str | None:
    """The paths of NCCL between the GPUs of this host; None without GPUs."""
    access = links_in(nvidia_smi("topo", "-p2p", "rw")[0]) if len(links) > 1 else {}
    groups: dict[str, list[str]] = {}
    for one, other in combinations(links, 2):
        joined, may = links[one][other], access.get(one, {}).get(other) == "OK"
        path = "NVLink" if joined.startswith("NV") else "PCIe peer-to-peer" if may else "the host's memory"
        groups.setdefault(path, []).append(f"{one[3:]}-{other[3:]}")
    paths = [path + f" ({', '.join(pairs)})" * (len(groups) > 1) for path, pairs in groups.items()]
    return ", ".join(paths) or ("memory of the GPU, which ranks share" if links else None)


def rdma_devices() -> dict[str, str]:
    """The speeds of RDMA devices with an active port, as "200 Gb/sec (4X HDR)"."""
    active = [port for port in SYS.glob("class/infiniband/*/ports/*") if "ACTIVE" in text_of(port / "state")]
    return {port.parts[-3]: text_of(port / "rate") for port in sorted(active)}


def paths(transport: str, inside: str | None, network: str) -> tuple[str, str]:
    """The path of bytes between ranks of one host, and of two hosts ("-": the strategy trains on one host).

    Args:
        transport: that of the strategy in the registry.
        inside, network: the paths of NCCL between GPUs of one host (None for ranks on CPUs), and of two hosts.
    """
    if inside is None:
        inside, network = _INSIDE.get(transport, "shared memory"), "TCP"
    elif transport in ("servers", "host memory"):
        inside, network = "PCIe to the host, then shared memory", NETWORKS[-1]
    return inside, "-" if transport in ("one process", "host memory") else network


def text_of(path: Path) -> str:
    """What a file of the system has; empty if there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
