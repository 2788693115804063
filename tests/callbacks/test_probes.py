"""Where figures about devices come from, with a made-up NVML and made-up processor times."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lightning_multigpu.callbacks import probes
from lightning_multigpu.callbacks.probes import HostProbe, probes_of
from lightning_multigpu.engine.main_memory import host_memory

GPU = torch.device("cuda", 0)


class NVMLError(Exception): ...


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A made-up NVML; CUDA's first GPU is NVML's third one."""
    found: Any = ModuleType("pynvml")
    found.NVMLError, found.NVML_TEMPERATURE_GPU = NVMLError, 0
    found.nvmlInit = lambda: None
    found.nvmlDeviceGetHandleByUUID = lambda uuid: ("07", "0f", "47", "4e").index(uuid.removeprefix("GPU-"))
    found.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(used=10_000 + gpu)
    found.nvmlDeviceGetUtilizationRates = lambda gpu: SimpleNamespace(gpu=87)
    found.nvmlDeviceGetPowerUsage, found.nvmlDeviceGetTemperature = lambda gpu: 250_000, lambda gpu, sensor: 61
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="47"))
    return found


def raises(message: str) -> Callable[..., Any]:
    def reading(*_: Any) -> Any:
        raise NVMLError(message)

    return reading


def test_figures_of_a_gpu_have_our_units_and_what_it_does_not_report_is_absent(gpu: Any) -> None:
    """They are those of the GPU that trains, in whichever order CUDA counts."""
    host, probe = probes_of(GPU)
    found = {
        "device/utilization_percent": 87.0,
        "device/memory_used_bytes": 10_002.0,
        "device/power_watts": 250.0,
        "device/temperature_celsius": 61.0,
    }
    assert probe.read() == found
    assert "device/utilization_percent" not in host.read()
    gpu.nvmlDeviceGetPowerUsage = raises("Not Supported")
    assert probe.read() == {key: value for key, value in found.items() if key != "device/power_watts"}


@pytest.mark.parametrize(
    ("is_installed", "message"),
    [
        (False, r"nvidia-ml-py is not installed; pip install 'lightning-multigpu\[gpu\]'"),
        (True, "are not measured: Driver Not Loaded"),
    ],
)
def test_a_gpu_that_cannot_be_read_says_why(
    gpu: Any, is_installed: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "nvmlInit", raises("Driver Not Loaded"))
    if not is_installed:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.warns(UserWarning, match=message):
        found = probes_of(GPU)
    assert [type(probe) for probe in found] == [HostProbe]


@pytest.mark.parametrize(
    ("num_threads", "used_s", "percents"),
    [(1, (2.0, 1.0, 6.8), (50.0, 25.0, 100.0)), (2, (3.0, 1.0), (37.5, 12.5)), (64, (3.0,), (37.5,))],
)
def test_each_reading_covers_the_time_since_the_last_of_the_intra_op_threads(
    num_threads: int, used_s: tuple[float, ...], percents: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two cores. More threads than those that compute do not make more than 100 %."""
    clocks = SimpleNamespace(wall_s=0.0, process_s=0.0)
    clocks.perf_counter, clocks.process_time = lambda: clocks.wall_s, lambda: clocks.process_s
    monkeypatch.setattr(probes, "usable_cores", lambda: 2)
    monkeypatch.setattr(probes, "time", clocks)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    host, probe = HostProbe(is_device=False), HostProbe(is_device=True)
    assert set(probe.read()) == {"device/process_rss_bytes", "device/memory_used_bytes"}, "no share of no time"
    for process_s, percent in zip(used_s, percents, strict=True):
        clocks.wall_s += 4.0
        clocks.process_s += process_s
        assert probe.read()["device/utilization_percent"] == percent
    assert set(host.read()) == {"device/process_rss_bytes"}, "a GPU is the device"


def test_the_limit_of_a_container(tmp_path: Path) -> None:
    """The limit is that of the group around; what the kernel can drop of files is not in use."""
    proc, groups = tmp_path / "cgroup", tmp_path / "groups"
    proc.write_text("4:memory:/old\n0::/job/step\n")
    (groups / "job/step").mkdir(parents=True)
    (groups / "job/step/memory.max").write_text("max\n")
    (groups / "job/memory.max").write_text("9000000\n")
    (groups / "job/memory.current").write_text("5000000\n")
    (groups / "job/memory.stat").write_text("anon 1\ninactive_file 2000000\n")
    assert host_memory(proc, groups) == ("container", 3_000_000, 9_000_000)
    (groups / "job/memory.max").write_text(f"{2**63 - 4096}\n")
    place, used_bytes, limit_bytes = host_memory(proc, groups)
    assert (place, limit_bytes) == ("host", psutil.virtual_memory().total)
    assert 0 < used_bytes < limit_bytes
    assert host_memory(tmp_path / "absent", groups).place == "host"
