"""NVML of machines that are not here: GPUs at PCI addresses, with NVLinks to each other or to switches."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

SWITCH = "d0"


class NVMLError(Exception): ...


class FakeNvml(types.ModuleType):
    """Four GPUs by default, of which 0 and 1, and 2 and 3, have four NVLinks.

    Args:
        buses: the bus of each GPU.
        links: GPU -> the bus at the other end of each of its NVLinks; SWITCH for a switch.
        peers: GPUs access each other's memory also without NVLinks.
        level: what joins all GPUs on PCIe; None on a virtual machine that does not tell.
        is_lost: the GPUs do not answer.
    """

    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_WRITE, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 1, 2, 0
    NVML_NVLINK_MAX_LINKS, NVML_TEMPERATURE_GPU = 18, 0

    def __init__(
        self,
        buses: Sequence[str] = ("07", "0f", "47", "4e"),
        links: Mapping[int, Sequence[str]] = types.MappingProxyType(
            {0: ["0f"] * 4, 1: ["07"] * 4, 2: ["4e"] * 4, 3: ["47"] * 4}
        ),
        *,
        peers: bool = True,
        level: int | None = 50,
        is_lost: bool = False,
    ) -> None:
        super().__init__("pynvml")
        self.users = 0

        def count(step: int) -> None:
            self.users += step

        def answer(value: Any, is_there: bool = True) -> Any:
            if not is_there:
                raise NVMLError("GPU is lost" if is_lost else "Not Supported")
            return value

        def pci(bus: str) -> Any:
            return types.SimpleNamespace(busId=f"00000000:{bus.upper()}:00.0")

        def status(one: int, other: int, kind: int) -> int:
            is_joined = bool({SWITCH, buses[other]} & {*links.get(one, ())})
            return 0 if is_joined or (kind == self.NVML_P2P_CAPS_INDEX_WRITE and peers) else 1

        self.nvmlInit, self.nvmlShutdown = lambda: count(1), lambda: count(-1)
        self.nvmlDeviceGetCount = lambda: len(buses)
        self.nvmlDeviceGetHandleByIndex = lambda index: answer(index, not is_lost)
        self.nvmlSystemGetDriverVersion, self.nvmlDeviceGetName = lambda: "580.65.06", lambda gpu: "NVIDIA A100"
        self.nvmlDeviceGetHandleByUUID = lambda uuid: answer(buses.index(uuid.removeprefix("GPU-")))
        self.nvmlDeviceGetMemoryInfo = lambda gpu: types.SimpleNamespace(total=85 * 10**9, used=10_000 + gpu)
        self.nvmlDeviceGetUtilizationRates = lambda gpu: types.SimpleNamespace(gpu=87)
        self.nvmlDeviceGetPowerUsage, self.nvmlDeviceGetTemperature = lambda gpu: 250_000, lambda gpu, sensor: 61
        self.nvmlDeviceGetMaxPcieLinkGeneration, self.nvmlDeviceGetCurrPcieLinkWidth = lambda gpu: 4, lambda gpu: 16
        self.nvmlDeviceGetPciInfo = lambda gpu: pci(buses[gpu])
        self.nvmlDeviceGetNvLinkState = lambda gpu, link: answer(1, link < len(links.get(gpu, ())))
        self.nvmlDeviceGetNvLinkVersion = lambda gpu, link: 4
        self.nvmlDeviceGetNvLinkRemotePciInfo = lambda gpu, link: pci(links[gpu][link])
        self.nvmlDeviceGetTopologyCommonAncestor = lambda one, other: answer(level, level is not None)
        self.nvmlDeviceGetP2PStatus = status
