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
"""GPU -> GPU or network card -> what joins them, in the words of ``nvidia-smi``, such as "NV4" or "PXB"."""
SYS = Path("/sys")
_DRIVER = Path("/proc/driver/nvidia/version")
NETWORKS = ("GPUDirect RDMA", "RDMA through the host's memory", "TCP through the host's memory")
"""Paths between GPUs of two hosts, the fastest first."""
_LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # of a PCIe path, the nearest first, in the words of nvidia-smi
_INSIDE = {
    "messages": "TCP inside the host",
    "collectives and messages": "shared memory; between stages TCP inside the host",
    "one process": "memory of the process",
}


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the topology."""
    description = (
        'Show what joins the devices of this host ("nvidia-smi topo -m"), whether GPUDirect RDMA is possible, and the '
        f'path that each strategy\'s bytes take. "{PROGRAM} doctor" compares the hosts of a job.'
    )
    OptionParser(f"{PROGRAM} {name}", description).parse(arguments)
    matrix, reason = nvidia_smi("topo", "-m")
    links, rdma = links_in(matrix), rdma_devices()
    inside, gpudirect = path_inside(links), gpudirect_rdma(links, [*rdma])
    facts = [("GPUs", inside or f"none ({reason}): CPU ranks compute, on {psutil.cpu_count()} threads")]
    facts += [(device, f"RDMA, {speed}") for device, speed in rdma.items()]
    for interface, found in psutil.net_if_stats().items():
        speed = f"{found.speed / 1e3:g} Gbit/s" if found.speed else "speed unknown"
        facts.append((interface, f"interface, {'up' if found.isup else 'down'}, {speed}"))
    facts.append((NETWORKS[0], gpudirect))
    network = NETWORKS[0 if gpudirect == "possible" else 1 if rdma else 2]
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
    cards = dict(re.findall(r"(NIC\d+): (\S+)", table))
    header, *rows = [line.split() for line in table.splitlines() if line.split()] or [[]]
    names = [cards.get(name, name) for name in header if re.search(r"\d", name)]
    return {row[0]: dict(zip(names, row[1:], strict=False)) for row in rows if row[0].startswith("GPU")}


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


def gpudirect_rdma(links: Links, rdma: Sequence[str]) -> str:
    """ "possible", or what stands in its way between this host's GPUs and RDMA devices."""
    found = [] if links else ["there is no GPU"]
    if not rdma:
        found.append("there is no RDMA device with an active port")
    if links and not (SYS / "module/nvidia_peermem").exists() and "Open Kernel" not in text_of(_DRIVER):
        found.append("modprobe nvidia_peermem is needed, or the driver's open kernel modules, which have dma-buf")
    for gpu, joined in links.items():
        known = [name for name in rdma if joined.get(name) in _LEVELS]
        near = min(known, key=lambda name: _LEVELS.index(joined[name]), default="")
        if joined.get(near) in _LEVELS[2:]:
            allowed = f"NCCL_NET_GDR_LEVEL={'SYS' if joined[near] == 'SYS' else 'PHB'}"
            found.append(f"{joined[near]} joins {gpu} to {near}, its nearest: NCCL takes it with {allowed} only")
    return f"not possible: {'; '.join(found)}" if found else "possible"


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
