"""Where figures about devices come from, with a made-up NVML and made-up processor times."""

from __future__ import annotations

import sys
import types
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_multigpu.callbacks.probes import HostProbe, NvmlProbe, host_memory, probes_of

UUID = "GPU-0000"
CpuTimes = namedtuple("CpuTimes", "user nice system idle iowait irq softirq steal guest guest_nice")


class NVMLError(Exception): ...


class NVMLError_NotSupported(NVMLError): ...  # noqa: N801, N818  # NVML's own name


class FakeNvml(types.ModuleType):
    """The part of pynvml that is used; ``power`` None is a GPU that does not report it."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, power: int | None = 250_000, present: bool = True) -> None:
        super().__init__("pynvml")
        self.power = power
        self.present = present
        self.users = 0
        self.asked_for_power = 0
        self.unreachable = False

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.present:
            raise NVMLError("driver not loaded")
        self.users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != UUID:
            raise NVMLError(f"no such device: {uuid}")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        if self.unreachable:
            raise NVMLError("fell off the bus")
        return types.SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return types.SimpleNamespace(used=12_345, total=99_999)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        self.asked_for_power += 1
        if self.power is None:
            raise NVMLError_NotSupported
        return self.power

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_nvml_figures_have_our_units(nvml: FakeNvml) -> None:
    probe = NvmlProbe(UUID)
    assert probe.read() == {
        "device/utilization_percent": 87.0,
        "device/memory_used_bytes": 12_345.0,
        "device/power_watts": 250.0,
        "device/temperature_celsius": 61.0,
    }


def test_nvml_is_given_back_once(nvml: FakeNvml) -> None:
    probe = NvmlProbe(UUID)
    assert nvml.users == 1
    probe.close()
    probe.close()
    assert nvml.users == 0
    assert probe.read() == {}


def test_what_a_gpu_does_not_report_is_absent_and_not_asked_for_again(nvml: FakeNvml) -> None:
    nvml.power = None
    probe = NvmlProbe(UUID)
    for _ in range(3):
        assert "device/power_watts" not in probe.read()
    assert nvml.asked_for_power == 1


def test_a_reading_that_fails_now_may_succeed_later(nvml: FakeNvml) -> None:
    probe = NvmlProbe(UUID)
    nvml.unreachable = True
    assert "device/utilization_percent" not in probe.read()
    nvml.unreachable = False
    assert probe.read()["device/utilization_percent"] == 87.0


def test_a_gpu_that_nvml_does_not_know_is_named(nvml: FakeNvml) -> None:
    with pytest.raises(RuntimeError, match="NVML refuses access to GPU-1111: no such device"):
        NvmlProbe("GPU-1111")
    assert nvml.users == 0


def test_a_machine_without_a_driver(nvml: FakeNvml) -> None:
    nvml.present = False
    with pytest.raises(RuntimeError, match="driver not loaded"):
        NvmlProbe(UUID)


def test_a_gpu_without_nvidia_ml_py_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="0000"))
    with pytest.warns(UserWarning, match=r"pip install 'lightning-multigpu\[gpu\]'"):
        probes = probes_of(torch.device("cuda", 0))
    assert [type(probe) for probe in probes] == [HostProbe]


def test_a_gpu_is_found_by_its_identity(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="0000"))
    host, gpu = probes_of(torch.device("cuda", 0))
    assert gpu.read()["device/utilization_percent"] == 87.0
    assert "device/utilization_percent" not in host.read()


class Times:
    """The clocks of a host with two cores, moved by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_s = self.process_s = self.busy_s = 0.0
        monkeypatch.setattr(psutil, "cpu_times", self._cpu_times)
        monkeypatch.setattr("lightning_multigpu.callbacks.probes.usable_cores", lambda: 2)

    def _cpu_times(self) -> CpuTimes:
        waiting = 2 * self.wall_s - self.busy_s
        # A guest's time is part of the user's time.
        return CpuTimes(self.busy_s, 0.0, 0.0, waiting / 2, waiting / 2, 0.0, 0.0, 0.0, self.busy_s / 2, 0.0)

    def pass_by(self, *, wall_s: float, process_s: float, busy_s: float) -> None:
        self.wall_s += wall_s
        self.process_s += process_s
        self.busy_s += busy_s

    def probe(self, *, is_device: bool = True, num_threads: int = 1) -> HostProbe:
        return HostProbe(
            is_device=is_device,
            num_threads=num_threads,
            clock=lambda: self.wall_s,
            process_clock=lambda: self.process_s,
        )


def test_utilization_is_measured_against_the_intra_op_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_threads, expected in [(1, 75.0), (2, 37.5), (64, 37.5)]:
        times = Times(monkeypatch)
        probe = times.probe(num_threads=num_threads)
        times.pass_by(wall_s=4.0, process_s=3.0, busy_s=6.0)
        figures = probe.read()
        assert figures["device/utilization_percent"] == expected
        assert figures["device/cpu_percent"] == 75.0


def test_each_reading_covers_the_time_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch)
    probe = times.probe()
    times.pass_by(wall_s=1.0, process_s=0.5, busy_s=0.0)
    assert probe.read()["device/utilization_percent"] == 50.0
    times.pass_by(wall_s=1.0, process_s=0.25, busy_s=0.0)
    assert probe.read()["device/utilization_percent"] == 25.0


def test_more_threads_than_those_that_compute_do_not_make_more_than_100_percent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = Times(monkeypatch)
    probe = times.probe()
    times.pass_by(wall_s=1.0, process_s=1.7, busy_s=0.0)
    assert probe.read()["device/utilization_percent"] == 100.0


def test_no_share_of_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = Times(monkeypatch).probe().read()
    assert set(figures) == {"device/process_rss_bytes", "device/memory_used_bytes"}


def test_the_host_of_a_gpu_is_not_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch)
    probe = times.probe(is_device=False)
    times.pass_by(wall_s=1.0, process_s=1.0, busy_s=1.0)
    assert set(probe.read()) == {"device/process_rss_bytes", "device/cpu_percent"}


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
