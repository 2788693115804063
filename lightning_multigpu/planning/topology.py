"""Topology of a host: locations of devices in a /sys tree, the matrix of links, GPUDirect RDMA, the paths of bytes.

A device's folder in /sys is below those of all bridges on its way to the CPU; what two folders share joins them::

    pci0000:00 --- 0000:00:01.1 --- 0000:01:00.0 -+- 0000:02:00.0 --- 0000:03:00.0    a GPU
    host bridge    root port        switch        +- 0000:02:01.0 --- 0000:04:00.0    a network interface: PIX
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

LEGEND = {
    "X": "the device itself",
    "NV#": "# NVLinks",
    "PIX": "at most one PCIe switch",
    "PXB": "several PCIe switches, and no host bridge",
    "PHB": "a PCIe host bridge, as a rule that of the CPU",
    "NODE": "the host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}
"""Links of a matrix, the nearest first, in the words of ``nvidia-smi topo -m``."""
NETWORKS = ("GPUDirect RDMA", "RDMA through the host's memory", "TCP through the host's memory")
"""Paths between GPUs of two hosts, the fastest first."""

_PCI = re.compile(r"pci[\da-f]{4,}:[\da-f]{2}|[\da-f]{4,}:[\da-f]{2}:[\da-f]{2}\.[\da-f]")
_KINDS = {"Data": "d", "Instruction": "i"}
_INSIDE = {
    "messages": "TCP inside the host",
    "collectives and messages": "shared memory; between stages TCP inside the host",
    "one process": "memory of the process",
}


@dataclass(frozen=True)
class Location:
    """PCI addresses from host bridge to device (none for cores and virtual devices), and the NUMA node if known."""

    pci: tuple[str, ...] = ()
    numa_node: int | None = None


@dataclass(frozen=True)
class Processor:
    """Sockets, NUMA nodes (number -> list of threads, "0-15,128-143"), and caches ("L2" -> bytes, how many)."""

    sockets: int
    numa_nodes: dict[int, str]
    caches: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class NetworkDevice:
    """An RDMA device and its interface (None: it has none), or an interface alone; its speed if known."""

    name: str
    interface: str | None
    is_rdma: bool
    is_up: bool
    bits_per_s: float | None
    location: Location


@dataclass(frozen=True)
class Gpu:
    """A GPU: product, "PCIe 4.0 x16", and of each active NVLink the PCI address at its other end, if known."""

    name: str
    pcie: str
    nvlinks: tuple[str | None, ...]
    nvlink_generation: str | None
    location: Location


@dataclass(frozen=True)
class GpuPair:
    """Two GPUs: what joins them, in all and on PCIe (keys of :data:`LEGEND`), and the path of bytes between them."""

    gpus: tuple[int, int]
    link: str
    ancestor: str
    peer_access: bool
    path: str


def processor(root: Path) -> Processor:
    """The processor of the /sys tree ``root``; a tree without NUMA nodes has all threads on node 0."""
    cpus, nodes = root / "devices/system/cpu", root / "devices/system/node"
    caches: dict[str, dict[str, int]] = {}
    for index in cpus.glob("cpu[0-9]*/cache/index*"):
        name = f"L{text_of(index / 'level')}{_KINDS.get(text_of(index / 'type'), '')}"
        size_bytes = int(text_of(index / "size").removesuffix("K") or 0) * 1024
        caches.setdefault(name, {})[text_of(index / "shared_cpu_list")] = size_bytes
    threads = dict(sorted((int(node.name[4:]), text_of(node / "cpulist")) for node in nodes.glob("node[0-9]*")))
    return Processor(
        sockets=len({text_of(package) for package in cpus.glob("cpu[0-9]*/topology/physical_package_id")}),
        numa_nodes=threads or {0: text_of(cpus / "online")},
        caches={name: (max(shared.values()), len(shared)) for name, shared in sorted(caches.items())},
    )


def location(device: Path, numa_nodes: Iterable[int]) -> Location:
    """The location of a device's folder in /sys, on a host with these NUMA nodes."""
    parts = device.resolve().parts
    places = [index for index, part in enumerate(parts) if _PCI.fullmatch(part)]
    if not places:
        return Location()
    node, (first, *others) = int(text_of(Path(*parts[: places[-1] + 1], "numa_node")) or -1), numa_nodes
    return Location(tuple(parts[place] for place in places), node if node >= 0 else None if others else first)


def network_devices(
    root: Path, known: Mapping[str, tuple[bool, float | None]], numa_nodes: Iterable[int]
) -> list[NetworkDevice]:
    """RDMA devices of the /sys tree ``root``, then the other ones of ``known`` interfaces (name -> up, bits/s)."""
    found: list[NetworkDevice] = []
    for path in sorted((root / "class/infiniband").glob("*"), key=lambda path: (len(path.name), path.name)):
        ports = [port for port in path.glob("ports/*") if "ACTIVE" in text_of(port / "state")]
        bits_per_s = max((float(text_of(port / "rate").split()[0]) * 1e9 for port in ports), default=None)
        interface = min((interface.name for interface in path.glob("device/net/*")), default=None)
        place = location(path / "device", numa_nodes)
        found.append(NetworkDevice(path.name, interface, True, bool(ports), bits_per_s, place))
    for name in sorted(known.keys() - {device.interface for device in found}):
        place = location(root / "class/net" / name / "device", numa_nodes)
        found.append(NetworkDevice(name, name, False, *known[name], place))
    return found


def link(one: Location, other: Location) -> str:
    """What joins two devices, or the cores of a NUMA node and a device: "PIX" to "SYS" of :data:`LEGEND`."""
    shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one.pci, other.pci, strict=False)))
    if shared > 1:
        return "PIX" if max(len(one.pci), len(other.pci)) - shared <= 2 else "PXB"
    if not shared and (one.numa_node is None or one.numa_node != other.numa_node):
        return "SYS"
    return "NODE" if one.pci and other.pci and not shared else "PHB"


def gpu_pair(gpus: Sequence[Gpu], which: tuple[int, int], ancestor: str, nvlink: bool, peer_access: bool) -> GpuPair:
    """Two of the host's GPUs, by what NVML says of them; links to switches count where none leads to the other GPU."""
    one, other = (gpus[index] for index in which)
    ends = [end if any(end in gpu.location.pci for gpu in gpus) else None for end in one.nvlinks]
    num_nvlinks = sum(end in other.location.pci for end in ends) or ends.count(None)
    path = "NVLink" if nvlink else "PCIe peer-to-peer" if peer_access else "the host's memory"
    return GpuPair(which, f"NV{num_nvlinks}" if nvlink else ancestor, ancestor, peer_access, path)


def matrix(locations: Mapping[str, Location], gpu_links: Mapping[tuple[str, str], str]) -> list[list[str]]:
    """What joins each device (row) with each other one (column): by NVML between GPUs, else by their locations."""
    known = {**gpu_links, **{(other, one): joined for (one, other), joined in gpu_links.items()}}
    return [
        ["X" if one == other else known.get((one, other)) or link(here, there) for other, there in locations.items()]
        for one, here in locations.items()
    ]


def grouped(pairs: Iterable[GpuPair], what: str) -> str:
    """The "link" or "path" of pairs in one line: "NV4", or "NV4 (0-1, 2-3), SYS (0-2, 0-3, 1-2, 1-3)"; "" for none."""
    groups: dict[str, list[str]] = {}
    for pair in pairs:
        groups.setdefault(getattr(pair, what), []).append("-".join(map(str, pair.gpus)))
    return ", ".join(name + f" ({', '.join(which)})" * (len(groups) > 1) for name, which in groups.items())


def gpudirect_obstacles(gpus: Mapping[str, Location], devices: Iterable[NetworkDevice], has_module: bool) -> list[str]:
    """What stands in the way of GPUDirect RDMA for these GPUs; ``has_module``: there is nvidia_peermem or dma-buf."""
    rdma, levels = [device for device in devices if device.is_rdma and device.is_up], tuple(LEGEND)
    found = [] if rdma else ["there is no RDMA device with an active port"]
    if not gpus:
        return ["there is no GPU", *found]
    if not has_module:
        found.append("modprobe nvidia_peermem is needed, or the driver's open kernel modules, which have dma-buf")
    for name, place in gpus.items() if rdma else ():
        level, near = min((levels.index(link(place, device.location)), device.name) for device in rdma)
        if level > levels.index("PXB"):
            allowed = f"NCCL_NET_GDR_LEVEL={'SYS' if levels[level] == 'SYS' else 'PHB'}"
            found.append(f"{levels[level]} joins {name} to {near}, its nearest: NCCL takes it with {allowed} only")
    return found


def paths(transport: str, inside: str | None, network: str) -> tuple[str, str | None]:
    """The path of bytes between ranks of one host, and of two hosts (None: the strategy trains on one host).

    Args:
        transport: that of the strategy in the registry.
        inside, network: the paths of NCCL between GPUs of one host (None for ranks on CPUs), and of two hosts.
    """
    if inside is None:
        inside, network = _INSIDE.get(transport, "shared memory"), "TCP"
    elif transport in ("servers", "host memory"):
        inside, network = "PCIe to the host, then shared memory", NETWORKS[-1]
    return inside, None if transport in ("one process", "host memory") else network


def text_of(path: Path) -> str:
    """What a file of /sys has, or "": it does not exist, or the device has no such figure."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
