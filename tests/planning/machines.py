"""/sys trees of machines, as far as topology reads them; bridges are simplified to ports and switches."""

from __future__ import annotations

from pathlib import Path

DGX_GPUS = ("07", "0f", "47", "4e", "87", "90", "b7", "bd")
_DGX = (  # host bridge, NUMA node, devices of mlx5 in pairs; of GPUs in pairs
    ("00", 3, ("0c", "12"), ("07", "0f")),
    ("40", 1, ("4b", "54"), ("47", "4e")),
    ("60", 0, ("61", "61"), ()),
    ("80", 7, ("8d", "94"), ("87", "90")),
    ("b0", 5, ("ba", "cc"), ("b7", "bd")),
    ("e0", 4, ("e1", "e1"), ()),
)


def dgx_a100(root: Path) -> None:
    """Two sockets of four NUMA nodes; each two GPUs and two RDMA devices are below one of four trees of switches."""
    for cpu, package in ((0, 0), (64, 1)):
        _cpu(root, cpu, package, {"index0": ("1", "Data", "32K"), "index3": ("3", "Unified", "16384K")})
    for node in range(8):
        _write(
            root / f"devices/system/node/node{node}/cpulist",
            f"{16 * node}-{16 * node + 15},{16 * node + 128}-{16 * node + 143}",
        )
    number = 0
    for bridge, node, interfaces, gpus in _DGX:
        port = f"pci0000:{bridge}/0000:{bridge}:01.1"
        for index, bus in enumerate((*gpus, *interfaces)):
            switches = f"0000:{bridge}:00.0/0000:{bridge}:02.{index}/0000:{bridge}:03.{index}/0000:{bridge}:04.{index}/"
            is_dual = interfaces[0] == interfaces[1]
            folder = _device(root, f"{port}/{'' if is_dual else switches}0000:{bus}:00.{index * is_dual}", node)
            if bus in interfaces:
                _rdma(root, f"mlx5_{number}", folder, f"enp{int(bus, 16)}s0f{index}" if is_dual else None)
                number += 1


def workstation(root: Path) -> None:
    """One socket; two GPUs at ports of the CPU, and an interface on the board."""
    _cpu(root, 0, 0, {})
    _write(root / "devices/system/node/node0/cpulist", "0-15")
    for port, bus in (("01.1", "01"), ("03.1", "02")):
        _device(root, f"pci0000:00/0000:00:{port}/0000:{bus}:00.0", 0)
    _interface(root, "eno1", _device(root, "pci0000:00/0000:00:1f.6", 0))
    (root / "class/net/docker0").mkdir()


def laptop(root: Path) -> None:
    """One GPU and wifi, and a kernel without NUMA nodes."""
    _write(root / "devices/system/cpu/online", "0-1")
    _device(root, "pci0000:00/0000:00:01.0/0000:01:00.0", -1)
    _interface(root, "wlan0", _device(root, "pci0000:00/0000:00:14.3", -1))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _cpu(root: Path, number: int, package: int, caches: dict[str, tuple[str, str, str]]) -> None:
    folder = root / f"devices/system/cpu/cpu{number}"
    _write(folder / "topology/physical_package_id", str(package))
    for index, values in caches.items():
        for name, value in zip(("level", "type", "size", "shared_cpu_list"), (*values, str(number)), strict=True):
            _write(folder / "cache" / index / name, value)


def _device(root: Path, path: str, numa_node: int) -> Path:
    folder = root / "devices" / path
    _write(folder / "numa_node", str(numa_node))
    (root / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (root / "bus/pci/devices" / folder.name).symlink_to(folder)
    return folder


def _interface(root: Path, name: str, device: Path) -> None:
    (device / "net" / name).mkdir(parents=True)
    (device / "net" / name / "device").symlink_to(device)
    (root / "class/net").mkdir(parents=True, exist_ok=True)
    (root / "class/net" / name).symlink_to(device / "net" / name)


def _rdma(root: Path, name: str, device: Path, interface: str | None) -> None:
    _write(device / "infiniband" / name / "ports/1/state", "4: ACTIVE")
    _write(device / "infiniband" / name / "ports/1/rate", "200 Gb/sec (4X HDR)")
    (device / "infiniband" / name / "device").symlink_to(device)
    (root / "class/infiniband").mkdir(parents=True, exist_ok=True)
    (root / "class/infiniband" / name).symlink_to(device / "infiniband" / name)
    if interface:
        _interface(root, interface, device)
