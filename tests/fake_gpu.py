"""A stand-in for a GPU: tensors without memory on "cuda", and streams and events whose time the test moves.

The host's clock stands still unless something waits for the device. Work that is put on a stream ends later::

    host        |launch|launch|...                      wait
    compute     [--- backward ---][ waits ....][ step ]
    nccl                          [--- all-reduce ---]

Values are not computed: torch's fake tensors have shapes, dtypes and devices only.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

DEVICE = torch.device("cuda", 0)
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier", "recv")


class FakeGPU:
    """The streams of one device: the time at which each has done all that it was given."""

    def __init__(self) -> None:
        self.now_s = 0.0  # the host's clock
        self.collective_s = 1.0
        self.waits = 0  # of the host for the device
        self.stream = "compute"
        self._ends: dict[str, float] = {}

    def end_s(self, stream: str) -> float:
        return max(self._ends.get(stream, 0.0), self.now_s)

    def run(self, seconds: float, *, stream: str | None = None, after: str | None = None) -> None:
        """Puts work on a stream, after all that is there and on the stream ``after``."""
        stream = stream or self.stream
        self._ends[stream] = max(self.end_s(stream), self.end_s(after or stream)) + seconds

    def synchronize(self, device: Any = None) -> None:
        self.waits += 1
        self.now_s = max([self.now_s, *self._ends.values()])

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def collective(self, *args: Any, async_op: bool = False, **kwargs: Any) -> "Work | None":
        """In place of a function of ``torch.distributed``: on NCCL's stream, behind the current one."""
        self.run(self.collective_s, stream="nccl", after=self.stream)
        work = Work(self, args[0] if args else None, self.end_s("nccl"))
        if async_op:
            return work
        work.wait()
        return None


class Work:
    """NCCL's work and its future: both are known to the host at once, and make streams wait, not the host."""

    def __init__(self, gpu: FakeGPU, value: Any, end_s: float) -> None:
        self._gpu, self._value, self._end_s = gpu, value, end_s

    def wait(self) -> None:
        self._gpu.run(max(0.0, self._end_s - self._gpu.end_s(self._gpu.stream)))

    def get_future(self) -> "Work":
        return self

    def value(self) -> list[Any]:
        return [self._value]

    def then(self, callback: Callable[[Any], Any]) -> "Work":
        """Runs the callback at once, on a stream that waits for the work; as torch does for futures of a device."""
        with self._gpu.on("of a callback"):
            self.wait()
            callback(self)
        return self

    add_done_callback = then


class Event:
    gpu: FakeGPU
    device = DEVICE

    def __init__(self, *, enable_timing: bool = False) -> None:
        assert enable_timing, "an event without timing has no time"
        self._at_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._at_s = self.gpu.end_s(self.gpu.stream)

    def query(self) -> bool:
        return self._at_s is not None and self._at_s <= self.gpu.now_s

    def synchronize(self) -> None:
        assert self._at_s is not None
        self.gpu.waits += 1
        self.gpu.now_s = max(self.gpu.now_s, self._at_s)

    def elapsed_time(self, end: "Event") -> float:
        assert self.query()
        assert end.query(), "its time is not known yet"
        assert self._at_s is not None
        assert end._at_s is not None
        return (end._at_s - self._at_s) * 1e3


@contextlib.contextmanager
def installed() -> Iterator[FakeGPU]:
    """A GPU, and a world of two ranks over torch's fake back end, which calls itself NCCL; this one is rank 0.

    Functions of ``torch.distributed`` that are told apart by their effect on streams take the time of a collective.
    """
    gpu = FakeGPU()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    try:
        with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
            patch.setattr(Event, "gpu", gpu, raising=False)
            patch.setattr(torch.cuda, "Event", Event)
            patch.setattr(torch.cuda, "synchronize", gpu.synchronize)
            patch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
            patch.setattr(torch.cuda, "set_device", lambda device: None)
            patch.setattr(dist, "get_backend", lambda group=None: "nccl")
            for name in COLLECTIVES:
                patch.setattr(dist, name, gpu.collective)
            # These look for a driver of CUDA, or for values: a fake tensor has neither. Its numbers count as 1.
            patch.setattr(FakeTensor, "copy_", lambda tensor, *given: torch.ops.aten.copy_.default(tensor, *given))
            patch.setattr(FakeTensor, "tolist", lambda tensor: [1.0] * tensor.numel())
            yield gpu
    finally:
        dist.destroy_process_group()
