"""One rank of one implementation, which tries, checks and times operations in its turns."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from lightning_multigpu.bench.collectives.implementations import Call, Implementation
from lightning_multigpu.bench.collectives.operations import BY_NAME, Buffers
from lightning_multigpu.bench.collectives.pattern import Pattern
from lightning_multigpu.bench.jobs.rank_process import Seat, Turns
from lightning_multigpu.communication.metering.clocks import clock_of
from lightning_multigpu.job.shared_gpus import rank_devices, refusal_of_nccl, share_a_gpu

MAX_CALLS = 50
_TURN_S = 0.05
_ESTIMATING_CALLS = 2
_LATE_S = 0.05


@dataclass(frozen=True)
class CollectiveSettings:
    """The settings of a job.

    Args:
        implementation: a row of the table.
        device_type: "cpu" or "cuda".
        dtype: of the tensors.
        warm_up: calls at the start of each turn that are not timed.
        max_calls: the most calls of a turn.
        timeout_s: after which a collective may give up.
    """

    implementation: Implementation
    device_type: str
    dtype: torch.dtype
    timeout_s: float
    warm_up: int = 0
    max_calls: int = MAX_CALLS


@dataclass(frozen=True)
class CollectiveTurn:
    """A turn of an implementation: ``step`` is one of

    - "try": prepare tensors, do it once, check the result, and time it; answered by the fields of :class:`Tried`.
    - "time": call it as often as fits into a turn; answered by the seconds of each call.
    - "check": do it once more; answered by the number of elements that are wrong.
    """

    implementation: str
    operation: str
    size: int
    step: Literal["try", "time", "check"]


@dataclass(frozen=True)
class Tried:
    """``seconds`` is of a call after the first."""

    numel: int = 0
    size_bytes: int = 0
    wrong: int = 0
    seconds: float = 0.0


def serve(settings: CollectiveSettings, seat: Seat, turns: Turns) -> None:
    """Joins the other ranks, then takes its turns."""
    _join(settings, seat)
    assert dist.group.WORLD is not None
    hosts = (seat.placement.devices,) if settings.implementation.knows_hosts else ()
    operations = settings.implementation.make(dist.group.WORLD, *hosts)
    bench: _Bench | None = None
    calls = 1
    for turn in turns:
        if turn.step == "try":
            bench = None  # gives its tensors back before new ones are made
            bench = _Bench(turn, operations[turn.operation], settings, seat)
            slowest_s = max(each["seconds"] for each in turns.answer(asdict(bench.tried())))
            calls = max(1, min(settings.max_calls, int(_TURN_S / max(slowest_s, 1e-9))))
        elif bench is not None:
            turns.answer(bench.check() if turn.step == "check" else bench.time(settings.warm_up, calls))
    dist.destroy_process_group()


def _join(settings: CollectiveSettings, seat: Seat) -> None:
    device = _device(settings, seat)
    refusal = refusal_of_nccl() if _meets_over_nccl(settings, seat) else None
    if refusal is not None:
        raise RuntimeError(refusal)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        settings.implementation.backend,
        rank=seat.rank,
        world_size=seat.placement.world_size,
        timeout=timedelta(seconds=2 * settings.timeout_s),
        device_id=device if settings.implementation.backend == "nccl" and device.type == "cuda" else None,
    )


def _meets_over_nccl(settings: CollectiveSettings, seat: Seat) -> bool:
    """Whether ranks are to share a GPU over NCCL, which may refuse with a message that does not say why."""
    return settings.implementation.backend == "nccl" and share_a_gpu(_devices(settings, seat))


def _device(settings: CollectiveSettings, seat: Seat) -> torch.device:
    return _devices(settings, seat)[seat.local_rank]


def _devices(settings: CollectiveSettings, seat: Seat) -> list[torch.device]:
    return rank_devices(settings.device_type, seat.placement.devices, max(1, torch.cuda.device_count()))


class _Bench:
    """One operation on one size."""

    def __init__(self, turn: CollectiveTurn, call: Call, settings: CollectiveSettings, seat: Seat) -> None:
        device = _device(settings, seat)
        self._call = call
        self._seat = seat
        self._store = PrefixStore(seat.job, seat.store())
        self._barriers = 0
        self._timeline = clock_of(device)
        operation = BY_NAME[turn.operation]
        self._pattern = Pattern(seat.placement.world_size, settings.dtype, device, summed=operation.is_sum)
        self._buffers = Buffers.make(
            operation,
            turn.size,
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
