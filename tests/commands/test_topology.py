"""``lightning-multigpu topology``: this machine, and machines whose ``nvidia-smi topo`` is faked."""

import re
from pathlib import Path

import psutil
import pytest

from lightning_multigpu.cli import main
from lightning_multigpu.commands import topology
from lightning_multigpu.commands.topology import NETWORKS, links_in, path_inside, paths
from lightning_multigpu.registry import STRATEGIES

MATRIX = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tPXB\tSYS\t48-63,176-191\t3\t\tN/A
GPU1\tNV12\t X \tSYS\tNODE\t16-31,144-159\t1\t\tN/A
NIC0\tPXB\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tNODE\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
ACCESS = " \tGPU0\tGPU1\t\n GPU0\tX\t{0}\t\n GPU1\t{0}\tX\t\n\nLegend:\n\n  X    = Self\n"


def gpus_are_there(monkeypatch: pytest.MonkeyPatch, access: str = "OK", matrix: str = MATRIX) -> None:
    class Ended:
        def __init__(self, command: list[str], **options: object) -> None:
            gpus = "NVIDIA A100, 81920 MiB, 580.65.06\n" * 2
            self.stdout = matrix if "-m" in command else ACCESS.format(access) if "-p2p" in command else gpus

    monkeypatch.setattr(topology.subprocess, "run", Ended)


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /sys tree with two cards, of which the second has no active port."""
    monkeypatch.setattr(topology, "SYS", tmp_path)
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    return tmp_path


def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["topology"]) == 0
    printed = capsys.readouterr().out
    assert f"'nvidia-smi'): CPU ranks compute, on {psutil.cpu_count()} threads" in printed
    assert all(f"\n{name} " in printed for name in psutil.net_if_addrs())
    assert all(row.name in printed for row in STRATEGIES)


def test_nvlinks_and_a_card(cards: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_are_there(monkeypatch)
    assert main(["topology"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "GPU1\tNV12\t X \tSYS" in printed
    assert re.search(r"^mlx5_0 +RDMA, 200 Gb/sec \(4X HDR\)$", printed, re.MULTILINE)
    assert "\nmlx5_1" not in printed
    [path] = [line for line in printed.splitlines() if "ring_ddp," in line]
    assert path.startswith("NVLink  ")
    assert "  RDMA  " in path


@pytest.mark.parametrize(("access", "path"), [("OK", "PCIe peer-to-peer"), ("CNS", "the host's memory")])
def test_gpus_without_nvlinks(access: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_are_there(monkeypatch, access)
    assert path_inside(links_in(MATRIX.replace("NV12", "PHB"))) == path


def test_pairs_of_gpus_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_are_there(monkeypatch)
    links = {"GPU0": {"GPU1": "NV4", "GPU2": "SYS"}, "GPU1": {"GPU2": "SYS"}, "GPU2": {}}
    assert path_inside(links) == "NVLink (0-1), the host's memory (0-2, 1-2)"
    assert path_inside({"GPU0": {}}) == "memory of the GPU, which ranks share"


def test_paths_of_every_strategy() -> None:
    on_cpus = {row.name: paths(row.transport, None, NETWORKS[-1]) for row in STRATEGIES}
    assert on_cpus["ring_ddp"] == on_cpus["tensor_split"] == on_cpus["sync_ps"] == ("shared memory", "TCP")
    assert on_cpus["gpipe"] == on_cpus["ddp_sharded"] == ("TCP inside the host", "TCP")
    assert on_cpus["dp"] == ("memory of the process", "-")
    on_gpus = {row.name: paths(row.transport, "NVLink", NETWORKS[0]) for row in STRATEGIES}
    assert on_gpus["ring_ddp"] == on_gpus["gpipe"] == on_gpus["hybrid"] == ("NVLink", "RDMA")
    assert on_gpus["async_ps"] == ("PCIe to the host, then shared memory", "TCP through the host's memory")
    assert on_gpus["cpu_ps"] == ("PCIe to the host, then shared memory", "-")
    assert on_gpus["dp"] == ("NVLink", "-")
