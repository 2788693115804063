"""``lightning-multigpu topology``: what joins the devices of this host, or of all hosts of a job.

Every process of a job runs the command, and the first one prints, as ``doctor``. With ``--json`` one object is written.
Its keys are stable: a change of their meaning raises ``schema_version``; new keys do not. Names in capitals are in
``planning.topology``; no obstacle means that GPUDirect RDMA is possible. ::

    {
      "schema_version": 1, "bytes_per_s": {"host": float, "network": float},          of send_recv, as far as calibrated
      "hosts": {name: {
        "processor": {"cores": int, "threads": int, ... Processor}, "no_gpus_because": str or null,
        "gpus": [Gpu], "gpu_pairs": [GpuPair], "network_devices": [NetworkDevice], "gpudirect_obstacles": [str],
        "matrix": {device: [key of LEGEND, for each device]},
        "paths": [{"strategies": [name], "one_host": str, "two_hosts": str or null}]
      }}
    }
"""

from __future__ import annotations

import contextlib
import importlib
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain, combinations
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lightning_multigpu.commands.doctor import add_meeting_options, meet
from lightning_multigpu.commands.option_parser import OptionParser, check_directories
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.planning import topology
from lightning_multigpu.planning.numbers import number, size
from lightning_multigpu.planning.scaling.machine_model import from_json
from lightning_multigpu.registry import STRATEGIES
from lightning_multigpu.report.terminal import columns

SCHEMA_VERSION = 1
SYS = Path("/sys")
T = TypeVar("T")
_ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # NVML_TOPOLOGY_INTERNAL, SINGLE ...
_GENERATIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}  # NVML_NVLINK_VERSION_*
_DESCRIPTION = f"""\
Show what joins the devices of this host, in the manner of "nvidia-smi topo -m", whether GPUDirect RDMA is possible,
and the path that each strategy's bytes take. On several hosts, start it as {PROGRAM} doctor.
"""


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the topology on the first process of a job; returns 1 where processes are missing."""
    parser = OptionParser(f"{PROGRAM} {name}", _DESCRIPTION)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the topology there too")
    parser.add_argument("--machine", type=Path, metavar="PATH", help="a file of calibrate: show the bandwidth of paths")
    add_meeting_options(parser)
    options = parser.parse(arguments)
    check_directories(options, "json")
    bytes_per_s = calibrated(options.machine)
    from lightning_multigpu.bench.jobs.placement import placement
    from lightning_multigpu.communication.rendezvous import RendezvousError

    hosts = [devices_of_host()]
    try:
        if (place := placement(None, options.num_nodes)).num_agents > 1:
            _, hosts = meet(place, hosts[0], options.timeout)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except RendezvousError as error:
        print(f"{PROGRAM} {name}: {error}".replace("join_timeout_s", "--timeout"), file=sys.stderr)
        return 1
    if place.agent == 0:
        slowest = max((host.pop("network") for host in hosts), key=topology.NETWORKS.index)
        for host in hosts:
            inside, found = host.pop("inside"), dict[tuple[str, str | None], list[str]]()
            for row in STRATEGIES:
                found.setdefault(topology.paths(row.transport, inside, slowest), []).append(row.name)
            host["paths"] = [{"strategies": found[path], "one_host": path[0], "two_hosts": path[1]} for path in found]
        named = {f"node {node} ({host.pop('host')})": host for node, host in enumerate(hosts)}
        document = {"schema_version": SCHEMA_VERSION, "bytes_per_s": bytes_per_s, "hosts": named}
        print("\n".join(lines(document)), flush=True)
        if options.json:
            options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def calibrated(machine: Path | None) -> dict[str, float]:
    """Bytes/s of send_recv inside a host ("host") and between hosts ("network"), from a file of calibrate."""
    if machine is None:
        return {}
    try:
        found = from_json(machine.read_text(), str(machine))
    except (OSError, ValueError) as error:
        raise UsageError(f"--machine={machine}: {error}") from error
    between = {} if found.between is None else {"network": found.between.bytes_per_s}
    return {"host": found.inside.bytes_per_s, **between}


def devices_of_host() -> dict[str, Any]:
    """What the report has about this host, with its name ("host") and the paths of GPUs ("inside", "network")."""
    found, reason = read_nvml(gpus_and_pairs)
    gpus, pairs = found or ([], [])
    chip, places = topology.processor(SYS), {f"GPU{index}": gpu.location for index, gpu in enumerate(gpus)}
    stats = {name: found for name, found in psutil.net_if_stats().items() if "loopback" not in found.flags}
    known = {name: (found.isup, found.speed * 1e6 or None) for name, found in stats.items()}
    network = topology.network_devices(SYS, known, chip.numa_nodes)
    has_dma_buf = "Open Kernel Module" in topology.text_of(Path("/proc/driver/nvidia/version"))
    has_module = has_dma_buf or (SYS / "module/nvidia_peermem").exists()
    obstacles = topology.gpudirect_obstacles(places, network, has_module)
    has_rdma = any(device.is_rdma and device.is_up for device in network)
    cores = {f"NUMA{node}": topology.Location((), node) for node in chip.numa_nodes}
    rows = (places or cores) | {device.name: device.location for device in network if device.location.pci}
    links = {(f"GPU{pair.gpus[0]}", f"GPU{pair.gpus[1]}"): pair.link for pair in pairs}
    return {
        "host": platform.node(),
        "processor": {"cores": psutil.cpu_count(logical=False), "threads": psutil.cpu_count(), **asdict(chip)},
        "gpus": [asdict(gpu) for gpu in gpus],
        "gpu_pairs": [asdict(pair) for pair in pairs],
        "no_gpus_because": reason,
        "network_devices": [asdict(device) for device in network],
        "matrix": dict(zip(rows, topology.matrix(rows, links), strict=True)),
        "gpudirect_obstacles": obstacles,
        "inside": (topology.grouped(pairs, "path") or "memory of the GPU, which ranks share") if gpus else None,
        "network": topology.NETWORKS[1 + (not has_rdma) if obstacles else 0],
    }


def read_nvml(read: Callable[[Any, list[Any]], T]) -> tuple[T | None, str | None]:
    """What ``read`` returns for NVML and the handles of all GPUs; or None, and why there is nothing."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return read(nvml, handles), None
        finally:
            nvml.nvmlShutdown()
    except Exception as error:  # it is not installed, there is no driver, or a GPU does not answer
        return None, "pip install 'lightning-multigpu[gpu]'" if isinstance(error, ImportError) else str(error)


def gpus_and_pairs(nvml: Any, handles: Sequence[Any]) -> tuple[list[topology.Gpu], list[topology.GpuPair]]:
    """The GPUs, and what joins each two of them."""

    def ask(what: str, *arguments: Any) -> Any:
        with contextlib.suppress(nvml.NVMLError):  # there is no such link, or a virtual machine does not tell
            return getattr(nvml, f"nvmlDeviceGet{what}")(*arguments)

    def address(info: Any) -> str | None:  # as /sys writes it: NVML's domain has eight digits
        return info and f"{int(info.busId[:8], 16):04x}{info.busId[8:].lower()}"

    gpus, pairs, numa_nodes = [], [], topology.processor(SYS).numa_nodes
    for handle in handles:
        active = [index for index in range(nvml.NVML_NVLINK_MAX_LINKS) if ask("NvLinkState", handle, index)]
        gpu = topology.Gpu(
            name=nvml.nvmlDeviceGetName(handle),
            pcie=f"PCIe {ask('MaxPcieLinkGeneration', handle)}.0 x{ask('CurrPcieLinkWidth', handle)}",
            nvlinks=tuple(address(ask("NvLinkRemotePciInfo", handle, index)) for index in active),
            nvlink_generation=_GENERATIONS.get(ask("NvLinkVersion", handle, active[0])) if active else None,
            location=topology.location(SYS / f"bus/pci/devices/{address(ask('PciInfo', handle))}", numa_nodes),
        )
        gpus.append(gpu)
    for (i, one), (j, other) in combinations(enumerate(handles), 2):
        nvlink, peer_access = (
            ask("P2PStatus", one, other, capability) == nvml.NVML_P2P_STATUS_OK
            for capability in (nvml.NVML_P2P_CAPS_INDEX_NVLINK, nvml.NVML_P2P_CAPS_INDEX_WRITE)
        )
        level = _ANCESTORS.get(ask("TopologyCommonAncestor", one, other))
        ancestor = level or topology.link(gpus[i].location, gpus[j].location)
        pairs.append(topology.gpu_pair(gpus, (i, j), ancestor, nvlink, peer_access))
    return gpus, pairs


def lines(document: dict[str, Any]) -> list[str]:
    """The report as text; hosts that are alike are shown once."""
    alike: dict[str, list[str]] = {}
    for name, host in document["hosts"].items():
        alike.setdefault(json.dumps(host), []).append(name)
    speeds = {level: f" ({size(speed)}/s)" for level, speed in document["bytes_per_s"].items()}
    text = [[", ".join(names), *_lines_of_host(json.loads(host), speeds)] for host, names in alike.items()]
    return [*chain(*text), *(f"{code:<4} = {meaning}" for code, meaning in topology.LEGEND.items())]


def _lines_of_host(host: dict[str, Any], speeds: dict[str, str]) -> list[str]:
    """Tables of facts, links and paths; ``speeds`` of send_recv stand over the paths."""
    chip, obstacles = host["processor"], "; ".join(host["gpudirect_obstacles"])
    caches = [f"{count} x {size(of)} {name}" for name, (of, count) in chip["caches"].items()]
    parts = [f"{kind} {chip[kind]}" for kind in ("sockets", "cores", "threads")]
    facts = [("processor", ", ".join(parts + caches))]
    facts += [(f"NUMA{node}", f"threads {threads}") for node, threads in chip["numa_nodes"].items()]
    for index, gpu in enumerate(host["gpus"]):
        nvlinks = f", {len(gpu['nvlinks'])} NVLinks {gpu['nvlink_generation'] or ''}" if gpu["nvlinks"] else ""
        facts.append((f"GPU{index}", f"{_where(gpu['location'])}, {gpu['name']}, {gpu['pcie']}{nvlinks}"))
    if not host["gpus"]:
        facts.append(
            ("GPUs", f"none ({host['no_gpus_because']}): the devices are the cores on which CPU ranks compute")
        )
    for device in host["network_devices"]:
        kind = f"RDMA, interface {device['interface'] or '-'}" if device["is_rdma"] else "interface"
        speed = f"{number(device['bits_per_s'] / 1e9)} Gbit/s" if device["bits_per_s"] else "speed unknown"
        facts.append(
            (device["name"], f"{_where(device['location'])}, {kind}, {'up' if device['is_up'] else 'down'}, {speed}")
        )
    facts.append(("GPUDirect RDMA", f"not possible: {obstacles}" if obstacles else "possible"))
    links = [("", *host["matrix"]), *((name, *row) for name, row in host["matrix"].items())]
    paths = [(f"in one host{speeds.get('host', '')}", f"between hosts{speeds.get('network', '')}", "bytes of")]
    paths += [(path["one_host"], path["two_hosts"] or "-", ", ".join(path["strategies"])) for path in host["paths"]]
    tables = (columns(rows, "left") for rows in (facts, links, paths))
    return [line for table in tables for line in (*table, "")]


def _where(location: dict[str, Any]) -> str:
    known = location["numa_node"] is not None
    return f"NUMA{location['numa_node'] if known else '?'}" if location["pci"] else "virtual"
