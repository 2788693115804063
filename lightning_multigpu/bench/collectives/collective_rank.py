"""One rank of one implementation, which tries, checks and times operations on request."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.bench.collectives.implementations import Call, Implementation
from lightning_multigpu.bench.collectives.operations import BY_NAME, Buffers
from lightning_multigpu.bench.collectives.pattern import Pattern
from lightning_multigpu.bench.jobs.local_ranks import Requests, Seat
from lightning_multigpu.communication.metering.clocks import clock_of
from lightning_multigpu.runtime.shared_gpus import rank_devices, refusal_of_nccl, share_a_gpu

_ESTIMATING_CALLS = 2
_LATE_S = 0.05


@dataclass(frozen=True)
class CollectiveSettings:
    """The settings of a job.

    Args:
        implementation: a row of the table.
        device_type: "cpu" or "cuda".
        dtype: of the tensors.
        timeout_s: after which a collective may give up.
    """

    implementation: Implementation
    device_type: str
    dtype: torch.dtype
    timeout_s: float


@dataclass(frozen=True)
class Join:
    """Answered by None once the process group is there."""


@dataclass(frozen=True)
class Try:
    """Prepare tensors, do it once, check the result, and time it; answered by the fields of :class:`Tried`."""

    operation: str
    size: int


@dataclass(frozen=True)
class Tried:
    """``seconds`` is of a call after the first."""

    numel: int = 0
    size_bytes: int = 0
    wrong: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Time:
    """Call it ``calls`` times after ``warm_up`` others; answered by the seconds of each call."""

    warm_up: int
    calls: int


@dataclass(frozen=True)
class Check:
    """Do it once more and answer how many elements are wrong."""


def serve(settings: CollectiveSettings, seat: Seat, requests: Requests) -> None:
    """Joins the other ranks, then serves the requests."""
    store = _join(settings, seat)
    assert dist.group.WORLD is not None
    hosts = (seat.placement.devices,) if settings.implementation.knows_hosts else ()
    operations = settings.implementation.make(dist.group.WORLD, *hosts)
    bench: _Bench | None = None
    for request in requests:
        if isinstance(request, Join):
            requests.answer(None)
        elif isinstance(request, Try):
            bench = None  # gives its tensors back before new ones are made
            bench = _Bench(request, operations[request.operation], settings, seat, store)
            requests.answer(asdict(bench.tried()))
        elif bench is not None:
            requests.answer(bench.check() if isinstance(request, Check) else bench.time(request.warm_up, request.calls))
    dist.destroy_process_group()


def _join(settings: CollectiveSettings, seat: Seat) -> Store:
    device = _device(settings, seat)
    refusal = refusal_of_nccl() if _meets_over_nccl(settings, seat) else None
    if refusal is not None:
        raise RuntimeError(refusal)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = PrefixStore(seat.job, TCPStore(seat.placement.main_address, seat.store_port, is_master=False))
    dist.init_process_group(
        settings.implementation.backend,
        store=store,
        rank=seat.rank,
        world_size=seat.placement.world_size,
        timeout=timedelta(seconds=2 * settings.timeout_s),
        device_id=device if settings.implementation.backend == "nccl" and device.type == "cuda" else None,
    )
    return store


def _meets_over_nccl(settings: CollectiveSettings, seat: Seat) -> bool:
    """Whether ranks are to share a GPU over NCCL, which may refuse with a message that does not say why."""
    return settings.implementation.backend == "nccl" and share_a_gpu(_devices(settings, seat))


def _device(settings: CollectiveSettings, seat: Seat) -> torch.device:
    return _devices(settings, seat)[seat.local_rank]


def _devices(settings: CollectiveSettings, seat: Seat) -> list[torch.device]:
    return rank_devices(settings.device_type, seat.placement.devices, max(1, torch.cuda.device_count()))


class _Bench:
    """One operation on one size."""

    def __init__(self, request: Try, call: Call, settings: CollectiveSettings, seat: Seat, store: Store) -> None:
        device = _device(settings, seat)
        self._call = call
        self._seat = seat
        self._store = store
        self._barriers = 0
        self._timeline = clock_of(device)
        operation = BY_NAME[request.operation]
        self._pattern = Pattern(seat.placement.world_size, settings.dtype, device, summed=operation.is_sum)
        self._buffers = Buffers.make(
            operation,
            request.size,
            rank=seat.rank,
            world_size=seat.placement.world_size,
            dtype=settings.dtype,
            device=device,
        )

    def tried(self) -> Tried:
        wrong = self.check()
        seconds = min(self.time(0, _ESTIMATING_CALLS))
        return Tried(self._buffers.numel, self._buffers.size_bytes, wrong, seconds)

    def check(self) -> int:
        if not self._buffers.operation.has_size:
            return self._check_barrier()
        self._buffers.fill(self._pattern)
        self._call(self._buffers)
        wrong = self._buffers.wrong(self._pattern)
        self._buffers.clear()
        return wrong

    def _check_barrier(self) -> int:
        """Ranks that had not arrived when the barrier let this one go; the last rank comes late on purpose."""
        if self._seat.rank == self._seat.placement.world_size - 1:
            time.sleep(_LATE_S)
        self._barriers += 1
        self._store.add(f"barrier/{self._barriers}", 1)
        self._call(self._buffers)
        return self._seat.placement.world_size - int(self._store.add(f"barrier/{self._barriers}", 0))

    def time(self, warm_up: int, calls: int) -> list[float]:
        for _ in range(warm_up):
            self._call(self._buffers)
        marks = [self._timeline.mark()]
        for _ in range(calls):
            self._call(self._buffers)
            marks.append(self._timeline.mark())
        self._timeline.wait(marks[-1])
        return [self._timeline.seconds(a, b) for a, b in pairwise(marks)]
