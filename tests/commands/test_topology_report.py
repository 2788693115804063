"""``lightning-multigpu topology``: this machine, a DGX A100 that is faked, hosts of a job, and wrong files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import psutil
import pytest

from lightning_multigpu.cli import main
from lightning_multigpu.commands import topology_report
from lightning_multigpu.planning.scaling.links import Link
from lightning_multigpu.planning.scaling.machine_model import Machine
from lightning_multigpu.registry import STRATEGIES
from tests.fake_nvml import SWITCH, FakeNvml
from tests.planning.machines import DGX_GPUS, dgx_a100, workstation
from tests.world import free_port


@pytest.fixture
def sys_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(topology_report, "SYS", tmp_path / "sys")
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    (tmp_path / "sys").mkdir()
    return tmp_path / "sys"


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert main(["topology", f"--json={tmp_path / 'found.json'}"]) == 0
    document = json.loads((tmp_path / "found.json").read_text())
    assert list(document) == ["schema_version", "bytes_per_s", "hosts"]
    [host] = document["hosts"].values()
    assert host["gpus"] == []
    assert host["processor"]["threads"] == psutil.cpu_count()
    assert {device["interface"] for device in host["network_devices"]} >= psutil.net_if_addrs().keys() - {"lo"}
    assert sorted(name for path in host["paths"] for name in path["strategies"]) == sorted(r.name for r in STRATEGIES)
    printed = capsys.readouterr().out
    assert (
        "none (pip install 'lightning-multigpu[gpu]'): the devices are the cores on which CPU ranks compute" in printed
    )
    assert "\nNUMA0  X" in printed


def test_dgx_a100(sys_tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    dgx_a100(sys_tree)
    (sys_tree / "module/nvidia_peermem").mkdir(parents=True)
    nvml = FakeNvml(DGX_GPUS, {index: [SWITCH] * 12 for index in range(8)})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert main(["topology"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert nvml.users == 0
    assert "GPU4            NUMA7, NVIDIA A100, PCIe 4.0 x16, 12 NVLinks 3.0" in printed
    assert "mlx5_5          NUMA0, RDMA, interface enp97s0f1, up, 200 Gbit/s" in printed
    assert "GPUDirect RDMA  possible" in printed
    [row] = [line.split() for line in printed if line.startswith("GPU7  ") and "NV12" in line and "NUMA" not in line]
    assert row[1:11] == ["NV12"] * 7 + ["X", "SYS", "SYS"]
    [path] = [line for line in printed if "ring_ddp," in line]
    assert path.split("  ")[0] == "NVLink"
    assert "GPUDirect RDMA" in path
    assert "gpipe" in path


@pytest.mark.parametrize(("peers", "path"), [(True, "PCIe peer-to-peer"), (False, "the host's memory")])
def test_workstation_whose_driver_does_not_tell_the_ancestor(
    peers: bool, path: str, sys_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workstation(sys_tree)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(("01", "02"), {}, peers=peers, level=None))
    assert main(["topology", f"--json={tmp_path / 'found.json'}"]) == 0
    [host] = json.loads((tmp_path / "found.json").read_text())["hosts"].values()
    pair = {"gpus": [0, 1], "link": "PHB", "ancestor": "PHB", "peer_access": peers, "path": path}
    assert host["gpu_pairs"] == [pair]
    assert host["matrix"] == {"GPU0": ["X", "PHB"], "GPU1": ["PHB", "X"]}
    assert host["paths"][0]["one_host"] == path
    assert host["paths"][0]["two_hosts"] == "TCP through the host's memory"


def test_bandwidth_of_a_calibrated_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links = {"inside": Link(1e-5, 1 / 2.5e9), "between": Link(1e-5, 1 / 1.1e8)}
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(Machine(name="m", device_type="cpu", **links).as_json()))
    assert main(["topology", f"--machine={machine}"]) == 0
    [header] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("in one host")]
    assert header.split("  ")[0] == "in one host (2.50 GB/s)"
    assert "between hosts (110 MB/s)" in header


@pytest.mark.parametrize("text", [None, "[]", '{"schema_version": 1}', "no JSON"])
def test_a_file_that_calibrate_has_not_written(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "machine.json").write_text(text)
    assert main(["topology", f"--machine={tmp_path / 'machine.json'}"]) == 2
    assert "machine.json" in capsys.readouterr().err


@pytest.fixture
def node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the first of several hosts."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("node_0")
def test_hosts_of_a_job_that_are_alike_are_shown_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How they meet, test_doctor proves with two processes."""
    monkeypatch.setattr(topology_report, "meet", lambda place, own, timeout_s: (None, [own, {**own}]))
    assert main(["topology", "--num-nodes=2"]) == 0
    printed = capsys.readouterr().out
    assert re.match(r"node 0 \(.*\), node 1 \(", printed)
    assert printed.count("\nGPUDirect RDMA  ") == 1
    monkeypatch.setenv("NODE_RANK", "1")
    assert main(["topology", "--num-nodes=2"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("node_0")
def test_missing_processes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--num-nodes=2", "--timeout=0.2"]) == 1
    assert "rank 1 of 2 did not come within 0.2 s (--timeout)" in capsys.readouterr().err
