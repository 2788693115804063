"""Monitor of the utilization, memory and power of devices."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_multigpu.callbacks.monitor import Group, Monitor
from lightning_multigpu.callbacks.probes import probes_of

Sample = dict[str, float]

_STOP_TIMEOUT_S = 5.0


class Sampler(threading.Thread):
    """Calls a function every ``interval_s`` seconds and keeps the results; an exception ends it.

    Attributes:
        samples: oldest first; the caller takes them away.
        error: that has ended it.
    """

    def __init__(self, read: Callable[[], Sample], *, interval_s: float) -> None:
        super().__init__(name="device-sampler", daemon=True)
        self.samples: deque[Sample] = deque()
        self.any_taken = False
        self.error: Exception | None = None
        self._read, self._interval_s = read, interval_s
        self._stopping, self._reading = threading.Event(), threading.Lock()

    def run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.sample()

    def sample(self) -> None:
        """Takes a sample now, in any thread."""
        with self._reading:
            try:
                self.samples.append(self._read())
                self.any_taken = True
            except Exception as error:
                self.error = error
                self._stopping.set()

    def stop(self) -> None:
        """Ends the thread; one that a driver does not give back within 5 s is left to end with the process."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout=_STOP_TIMEOUT_S)


class DeviceUtilizationMonitor(Monitor):
    """Utilization, memory, power and temperature of every rank's device, and the main memory of its process.

    NVML reads NVIDIA GPUs (``pip install 'lightning-multigpu[gpu]'``), psutil hosts and CPU ranks.
    A background thread takes a sample every ``interval_s``, from the start of training to its end, validation
    included; statistics are over samples, not over steps. The first interval has at least one sample, taken at its
    end; a later one without a sample logs nothing. The thread ends with training, also when it fails.

    Keys, sampled in the background, with how the ranks' values become the run's:

    - `device/utilization_percent` (%, mean): GPU: share of time in which a kernel ran, as in nvidia-smi; CPU: processor
      time of this process, 100 being all of its intra-op threads, each on a core that it may use.
    - `device/memory_used_bytes` (bytes, maximum): memory in use by all processes, on the GPU, or on the host or in
      the container that limits it.
    - `device/power_watts` (W, sum): power that the GPUs draw.
    - `device/temperature_celsius` (degrees Celsius, maximum): temperature of the hottest GPU.
    - `device/process_rss_bytes` (bytes, maximum): main memory (resident set) of the largest training process.

    Args:
        interval_s: seconds from one sample to the next.
        log: whether to log, or only to collect for a report.

    Raises:
        ValueError: ``interval_s`` is not above 0.
    """

    group: ClassVar[Group] = "device"
    warm_up: ClassVar[int] = 0

    def __init__(self, *, interval_s: float = 0.5, log: bool = True) -> None:
        super().__init__(log=log)
        if not interval_s > 0:
            raise ValueError(f"interval_s={interval_s}: the time between two samples must be above 0 seconds")
        self._interval_s = interval_s
        self._sampler: Sampler | None = None

    @override
    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end()
        probes = probes_of(trainer.strategy.root_device)
        self._sampler = Sampler(
            lambda: {key: value for probe in probes for key, value in probe.read().items()}, interval_s=self._interval_s
        )
        self._sampler.start()

    @override
    def collect(self, trainer: Trainer, pl_module: LightningModule, batch: object) -> None:
        self._record(first_now=False)

    @override
    def settle(self) -> None:
        self._record(first_now=True)

    @override
    def end(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()

    def _record(self, *, first_now: bool) -> None:
        sampler = self._sampler
        if sampler is None:
            return
        if first_now and not sampler.any_taken:
            sampler.sample()
        while sampler.samples:
            for key, value in sampler.samples.popleft().items():
                self.observe(key, value)
        if (error := sampler.error) is not None:  # figures about the device are not worth a training run
            rank_zero_warn(f"devices are not measured any longer: {type(error).__name__}: {error}")
            self.end()
