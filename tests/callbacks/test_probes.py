"""Where figures about devices come from, with a made-up NVML and made-up processor times."""

from __future__ import annotations

import sys
import types
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lightning_multigpu.callbacks import probes
from lightning_multigpu.callbacks.probes import HostProbe, host_memory, probes_of

CpuTimes = namedtuple("CpuTimes", "user nice system idle iowait irq softirq steal guest guest_nice")
GPU = torch.device("cuda", 0)


class NVMLError(Exception): ...


class FakeNvml(types.ModuleType):
    """NVML of a machine whose second GPU is CUDA's first one; what raises is not there."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.readings: dict[str, Any] = {
            "UtilizationRates": SimpleNamespace(gpu=87, memory=40),
            "MemoryInfo": SimpleNamespace(used=12_345, total=99_999),
            "PowerUsage": 250_000,
            "Temperature": 61,
        }
        self.error: Exception | None = None
        self.nvmlInit = lambda: self._answer(None)
        self.nvmlDeviceGetHandleByUUID = lambda uuid: self._answer(uuid if uuid == "GPU-2222" else None)
        for name in self.readings:
            setattr(self, f"nvmlDeviceGet{name}", lambda gpu, *_, name=name: self._read(gpu, name))

    def _read(self, gpu: str, name: str) -> Any:
        assert gpu == "GPU-2222"
        if name not in self.readings:
            raise NVMLError("Not Supported")
        return self._answer(self.readings[name])

    def _answer(self, value: Any) -> Any:
        if self.error is not None:
            raise self.error
        return value


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    found = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="2222"))
    return found


def test_figures_of_a_gpu_have_our_units_and_what_it_does_not_report_is_absent(gpu: FakeNvml) -> None:
    """They are those of the GPU that trains, in whichever order CUDA counts."""
    host, probe = probes_of(GPU)
    found = {
        "device/utilization_percent": 87.0,
        "device/memory_used_bytes": 12_345.0,
        "device/power_watts": 250.0,
        "device/temperature_celsius": 61.0,
    }
    assert probe.read() == found
    assert "device/utilization_percent" not in host.read()
    gpu.error = NVMLError("fell off the bus")
    assert probe.read() == {}
    gpu.error = None
    del gpu.readings["PowerUsage"]
    assert probe.read() == {key: value for key, value in found.items() if key != "device/power_watts"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (None, r"nvidia-ml-py is not installed; pip install 'lightning-multigpu\[gpu\]'"),
        (NVMLError("Driver Not Loaded"), "are not measured: Driver Not Loaded"),
    ],
)
def test_a_gpu_that_cannot_be_read_says_why(
    gpu: FakeNvml, error: Exception | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.error = error
    if error is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.warns(UserWarning, match=message):
        found = probes_of(GPU)
    assert [type(probe) for probe in found] == [HostProbe]


class Times:
    """The clocks of a host with two cores, moved by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_s = self.process_s = self.busy_s = 0.0
        self.num_threads = 1
        monkeypatch.setattr(psutil, "cpu_times", self._cpu_times)
        monkeypatch.setattr(probes, "usable_cores", lambda: 2)
        clocks = SimpleNamespace(perf_counter=lambda: self.wall_s, process_time=lambda: self.process_s)
        monkeypatch.setattr(probes, "time", clocks)
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.num_threads)

    def _cpu_times(self) -> CpuTimes:
        waiting = 2 * self.wall_s - self.busy_s
        # A guest's time is part of the user's time.
        return CpuTimes(self.busy_s, 0.0, 0.0, waiting / 2, waiting / 2, 0.0, 0.0, 0.0, self.busy_s / 2, 0.0)

    def pass_by(self, *, wall_s: float, process_s: float, busy_s: float) -> None:
        self.wall_s += wall_s
        self.process_s += process_s
        self.busy_s += busy_s


def test_utilization_is_measured_against_the_intra_op_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_threads, expected in [(1, 75.0), (2, 37.5), (64, 37.5)]:
        times = Times(monkeypatch)
        times.num_threads = num_threads
        probe = HostProbe(is_device=True)
        times.pass_by(wall_s=4.0, process_s=3.0, busy_s=6.0)
        figures = probe.read()
        assert figures["device/utilization_percent"] == expected
        assert figures["device/cpu_percent"] == 75.0


def test_each_reading_covers_the_time_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch)
    probe = HostProbe(is_device=True)
    assert set(probe.read()) == {"device/process_rss_bytes", "device/memory_used_bytes"}, "no share of no time"
    # More threads than those that compute do not make more than 100 %.
    for process_s, percent in ((0.5, 50.0), (0.25, 25.0), (1.7, 100.0)):
        times.pass_by(wall_s=1.0, process_s=process_s, busy_s=0.0)
        assert probe.read()["device/utilization_percent"] == percent
    host = HostProbe(is_device=False)
    times.pass_by(wall_s=1.0, process_s=1.0, busy_s=1.0)
    assert set(host.read()) == {"device/process_rss_bytes", "device/cpu_percent"}, "a GPU is the device"


def test_this_process_has_a_size_that_its_host_can_hold() -> None:
    figures = HostProbe(is_device=True).read()
    assert 0 < figures["device/process_rss_bytes"] < psutil.virtual_memory().total
    assert 0 < figures["device/memory_used_bytes"] <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("cgroup", "folder", "limit", "used", "files"),
    [
        ("0::/job/step\n", "job", "memory.max", "memory.current", "inactive_file"),
        ("4:memory:/job/step\n0::/\n", "memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes",
         "total_inactive_file"),
    ],
)  # fmt: skip
def test_the_limit_of_a_container(tmp_path: Path, cgroup: str, folder: str, limit: str, used: str, files: str) -> None:
    """The limit is that of the group around; what the kernel can drop of files is not in use."""
    proc, groups = tmp_path / "cgroup", tmp_path / "groups"
    proc.write_text(cgroup)
    (groups / folder / "step").mkdir(parents=True)
    (groups / folder / "step" / limit).write_text("max\n")
    (groups / folder / limit).write_text("9000000\n")
    (groups / folder / used).write_text("5000000\n")
    (groups / folder / "memory.stat").write_text(f"anon 1\n{files} 2000000\n")
    assert host_memory(proc, groups) == ("container", 3_000_000, 9_000_000)
    (groups / folder / limit).write_text(f"{2**63 - 4096}\n")
    place, used_bytes, limit_bytes = host_memory(proc, groups)
    assert (place, limit_bytes) == ("host", psutil.virtual_memory().total)
    assert 0 < used_bytes < limit_bytes
    assert host_memory(tmp_path / "absent", groups).place == "host"
