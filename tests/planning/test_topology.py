"""Places and links of devices, on /sys trees of machines whose topology is published."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_multigpu.planning.topology import (
    NETWORKS,
    Gpu,
    GpuPair,
    Location,
    NetworkDevice,
    gpu_pair,
    gpudirect_obstacles,
    link,
    location,
    matrix,
    network_devices,
    paths,
    processor,
)
from lightning_multigpu.registry import STRATEGIES
from tests.planning.machines import DGX_GPUS, dgx_a100, laptop

# Rows that "nvidia-smi topo -m" prints on a DGX A100.
DGX = {
    "GPU0": "X NV12 NV12 NV12 NV12 NV12 NV12 NV12 PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS",
    "GPU4": "NV12 NV12 NV12 NV12 X NV12 NV12 NV12 SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS SYS SYS",
    "mlx5_1": "PXB PXB SYS SYS SYS SYS SYS SYS PXB X SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS",
    "mlx5_4": "SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS X PIX SYS SYS SYS SYS SYS SYS",
    "mlx5_10": "SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS X PIX",
}


def located(root: Path, *buses: str) -> dict[str, Location]:
    """The GPUs of a tree."""
    nodes = processor(root).numa_nodes
    folder = root / "bus/pci/devices"
    return {f"GPU{index}": location(folder / f"0000:{bus}:00.0", nodes) for index, bus in enumerate(buses)}


def test_dgx_a100(tmp_path: Path) -> None:
    dgx_a100(tmp_path)
    chip = processor(tmp_path)
    assert (chip.sockets, len(chip.numa_nodes), chip.numa_nodes[3]) == (2, 8, "48-63,176-191")
    assert chip.caches == {"L1d": (32 * 1024, 2), "L3": (16 * 2**20, 2)}
    gpus, devices = located(tmp_path, *DGX_GPUS), network_devices(tmp_path, {}, chip.numa_nodes)
    assert [place.numa_node for place in gpus.values()] == [3, 3, 1, 1, 7, 7, 5, 5]
    assert [device.name for device in devices] == [f"mlx5_{index}" for index in range(12)], "10 comes after 9"
    assert (devices[4].interface, devices[4].bits_per_s, devices[4].is_up) == ("enp97s0f0", 200e9, True)
    places = gpus | {device.name: device.location for device in devices}
    nvlinks = {(one, other): "NV12" for one in gpus for other in gpus if one < other}
    rows = dict(zip(places, matrix(places, nvlinks), strict=True))
    assert {name: " ".join(rows[name]) for name in DGX} == DGX
    assert gpudirect_obstacles(gpus, devices, has_module=True) == []


def test_laptop_without_numa_nodes(tmp_path: Path) -> None:
    laptop(tmp_path)
    chip = processor(tmp_path)
    assert chip.numa_nodes == {0: "0-1"}
    [gpu] = located(tmp_path, "01").values()
    [wifi] = network_devices(tmp_path, {"wlan0": (True, None)}, chip.numa_nodes)
    assert (gpu.numa_node, wifi.location.pci) == (0, ("pci0000:00", "0000:00:14.3"))
    assert link(gpu, wifi.location) == "PHB"


@pytest.mark.parametrize(
    ("one", "other", "joined"),
    [
        (Location(("pci0000:00", "p", "a"), 0), Location(("pci0000:40", "q", "b"), 0), "NODE"),
        (Location(("pci0000:00", "p", "a"), 0), Location(("pci0000:40", "q", "b"), 1), "SYS"),
        (Location(("pci0000:00", "p", "a"), None), Location(("pci0000:40", "q", "b"), None), "SYS"),
        (Location(("pci0000:00", "p", "s", "d", "a"), 0), Location(("pci0000:00", "p", "s", "e", "b"), 0), "PIX"),
        (Location((), 0), Location(("pci0000:00", "a"), 0), "PHB"),
        (Location((), 1), Location(("pci0000:00", "a"), 0), "SYS"),
        (Location((), 0), Location((), 1), "SYS"),
    ],
)
def test_links(one: Location, other: Location, joined: str) -> None:
    """The last three are of the cores of a NUMA node."""
    assert link(one, other) == link(other, one) == joined


def test_nvlinks_to_another_gpu_and_to_switches() -> None:
    a, b, c = (
        Gpu("A100", "PCIe 4.0 x16", ends, "3.0", Location(("pci0000:00", bus)))
        for bus, ends in (("a", ("b", "b", "c", None)), ("b", ("a", "a", "s", "s")), ("c", ("s", None, "s")))
    )
    gpus = [a, b, c]
    assert gpu_pair(gpus, (0, 1), "SYS", True, True) == GpuPair((0, 1), "NV2", "SYS", True, "NVLink")
    assert gpu_pair(gpus, (2, 0), "PHB", True, True).link == "NV3", "none leads to the GPU itself: all to switches"
    assert gpu_pair(gpus, (1, 2), "PXB", False, True) == GpuPair((1, 2), "PXB", "PXB", True, "PCIe peer-to-peer")
    assert gpu_pair(gpus, (1, 2), "SYS", False, False).path == "the host's memory"


def test_what_stands_in_the_way_of_gpudirect_rdma() -> None:
    gpus = {"GPU0": Location(("pci0000:00", "p", "a"), 0), "GPU1": Location(("pci0000:80", "p", "a"), 1)}
    near, down = (
        NetworkDevice(name, None, True, is_up, 1e11, Location(pci, 0))
        for name, is_up, pci in (
            ("mlx5_0", True, ("pci0000:00", "q", "b")),
            ("mlx5_1", False, ("pci0000:00", "p", "b")),
        )
    )
    module, phb, sys = gpudirect_obstacles(gpus, [near, down], has_module=False)
    assert "modprobe nvidia_peermem" in module
    assert phb == "PHB joins GPU0 to mlx5_0, its nearest: NCCL takes it with NCCL_NET_GDR_LEVEL=PHB only"
    assert sys == "SYS joins GPU1 to mlx5_0, its nearest: NCCL takes it with NCCL_NET_GDR_LEVEL=SYS only"
    assert gpudirect_obstacles(gpus, [down], has_module=True) == ["there is no RDMA device with an active port"]
    assert gpudirect_obstacles({}, [near], has_module=True) == ["there is no GPU"]


def test_paths_of_every_strategy() -> None:
    on_cpus = {row.name: paths(row.transport, None, NETWORKS[-1]) for row in STRATEGIES}
    assert on_cpus["ring_ddp"] == on_cpus["tensor_split"] == on_cpus["sync_ps"] == ("shared memory", "TCP")
    assert on_cpus["gpipe"] == on_cpus["ddp_sharded"] == ("TCP inside the host", "TCP")
    assert on_cpus["dp"] == ("memory of the process", None)
    on_gpus = {row.name: paths(row.transport, "NVLink", NETWORKS[0]) for row in STRATEGIES}
    assert on_gpus["ring_ddp"] == on_gpus["gpipe"] == on_gpus["hybrid"] == ("NVLink", "GPUDirect RDMA")
    assert on_gpus["async_ps"] == ("PCIe to the host, then shared memory", "TCP through the host's memory")
    assert on_gpus["cpu_ps"] == ("PCIe to the host, then shared memory", None)
    assert on_gpus["dp"] == ("NVLink", None)
