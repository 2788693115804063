"""The run of a collectives bench: every operation on every size, the implementations in turn.

For one operation and size::

    ring    try . . . . . . time . . . . time . . . . . . time          ranks that are not asked sleep
    gloo    . . try . . . . . . . . time . . . . time . . . . . time
                            round 1      round 2      ...               every other round in reverse order

Each implementation has a job of its own. Where one fails, its row says how, its ranks are ended and started anew for
the next operation, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from lightning_multigpu.bench.collectives.implementations import Call, Implementation
from lightning_multigpu.bench.collectives.operations import BY_NAME, Buffers, Operation, Pattern
from lightning_multigpu.bench.jobs.host_agents import HostAgents, JobError, RankJob
from lightning_multigpu.bench.jobs.rank_process import Seat, Turns
from lightning_multigpu.communication.metering.clocks import clock_of
from lightning_multigpu.job.shared_gpus import SHARING_VARIABLE, rank_devices, share_a_gpu, sharing_backend
from lightning_multigpu.report.statistics import Spread

OK = "ok"

_TURN_S = 0.05
_MAX_CALLS = 50
_ESTIMATING_CALLS = 2
_LATE_S = 0.05


@dataclass(frozen=True)
class CollectiveTurn:
    """A turn of an implementation: in round 0 it is tried, in others called as often as fits into a turn.

    It is answered by the number of elements, the size in bytes, the number of elements that are wrong, in the first and
    the last round, and the seconds of each call.
    """

    implementation: str
    operation: str
    size: int
    round: int


@dataclass(frozen=True, kw_only=True)
class CollectivePlan:
    """The plan of a bench: every combination of operations, implementations and sizes in bytes.

    Each implementation has ``repetitions`` turns, and each turn ``warm_up`` calls that are not timed. A turn may take
    ``timeout_s``, and the first one ``join_s`` longer, from the start of the ranks.
    """

    operations: Sequence[Operation]
    implementations: Sequence[Implementation]
    sizes: Sequence[int]
    device_type: str
    dtype: torch.dtype = torch.float32
    repetitions: int = 1
    warm_up: int = 0
    timeout_s: float
    join_s: float = 60.0

    def turns(self) -> Iterator[CollectiveTurn]:
        for operation in self.operations:
            having = [each.name for each in self.implementations if each.has(operation.name)]
            for size in self.sizes if operation.has_size else [0]:
                yield from (CollectiveTurn(name, operation.name, size, 0) for name in having)
                for number in range(1, 1 + self.repetitions):
                    order = having if (self.repetitions - number) % 2 == 0 else having[::-1]
                    yield from (CollectiveTurn(name, operation.name, size, number) for name in order)


@dataclass(frozen=True, kw_only=True)
class CollectiveResult:
    """One row: one operation on one size by one implementation.

    ``seconds`` is of one call, on the slowest rank; ``wrong`` counts the wrong elements on all ranks. A row whose
    status is not "ok" has a reason in place of figures.
    """

    operation: Operation
    implementation: str
    size_bytes: int
    numel: int = 0
    status: str = OK
    reason: str | None = None
    wrong: int = 0
    seconds: Spread | None = None

    def algbw(self) -> float | None:
        """Bytes per second: S over the median time; None where nothing was moved or timed."""
        if self.seconds is None or not self.numel:
            return None
        return self.size_bytes / self.seconds.median

    def busbw(self, world_size: int) -> float | None:
        """algbw times the operation's factor: comparable with the speed of the wire."""
        algbw = self.algbw()
        return None if algbw is None else algbw * self.operation.bus_factor(world_size)


def measure(hosts: HostAgents, plan: CollectivePlan) -> Iterator[CollectiveResult]:
    """The rows, one after another; an operation that fails on one size is not tried on larger ones."""
    turns = hosts.turns(list(plan.turns()))
    runs = {
        each.name: ImplementationRun(hosts, each, plan, [turn for turn in turns if turn[1].implementation == each.name])
        for each in plan.implementations
    }
    for number, turn in turns:
        result = runs[turn.implementation].take(number, turn)
        if result is not None:
            yield result
    for run in runs.values():
        if run.job is not None:
            run.job.end()


@dataclass
class ImplementationRun:
    """One implementation in the course of the table; in the operation ``failed`` it takes no further part."""

    hosts: HostAgents
    implementation: Implementation
    plan: CollectivePlan
    turns: Sequence[tuple[int, CollectiveTurn]]
    job: RankJob | None = None
    failed: str | None = None
    _row: CollectiveResult | None = None
    _seconds: list[float] = field(default_factory=list)

    def take(self, number: int, turn: CollectiveTurn) -> CollectiveResult | None:
        """Takes a turn. The last one of a size has the row, or the first one that fails."""
        if self.failed == turn.operation:
            self.hosts.skip(number)
            return None
        if turn.round == 0:
            name = self.implementation.name
            self._row = CollectiveResult(operation=BY_NAME[turn.operation], implementation=name, size_bytes=turn.size)
            self._seconds = []
        assert self._row is not None
        try:
            self.job = self.job or self._started(number)
            answers = self.job.answers(number)
        except JobError as error:
            self.job, self.failed = None, turn.operation
            # Where every rank refuses at the first try, the operation is not supported.
            refused = error.status == "failed" and turn.round == 0 and error.all_ranks
            return replace(
                self._row, numel=0, wrong=0, status="not supported" if refused else error.status, reason=str(error)
            )
        numels, sizes, wrong, seconds = zip(*answers, strict=True)
        self._row = replace(self._row, numel=numels[0], size_bytes=sizes[0], wrong=max(self._row.wrong, sum(wrong)))
        if turn.round:
            self._seconds += [max(call) for call in zip(*seconds, strict=True)]
        is_last = turn.round == self.plan.repetitions
        return replace(self._row, seconds=Spread.of(self._seconds)) if is_last else None

    def _started(self, number: int) -> RankJob:
        left = [turn for turn in self.turns if turn[0] >= number]
        timeout_s = self.plan.timeout_s
        return self.hosts.start(
            self.implementation.name,
            serve,
            (self.implementation, replace(self.plan, operations=(), implementations=())),  # turns have their names
            left,
            timeout_s=timeout_s,
            start_timeout_s=timeout_s + self.plan.join_s,
        )


def serve(settings: tuple[Implementation, CollectivePlan], seat: Seat, turns: Turns) -> None:
    """The main function of a rank of one implementation: joins the other ranks, then takes its turns."""
    implementation, plan = settings
    device = join(implementation, plan.device_type, plan.timeout_s, seat)
    assert dist.group.WORLD is not None
    operations = implementation.make(dist.group.WORLD, seat.placement.devices)
    bench: _Bench | None = None
    calls, wrong = 1, 0
    for turn in turns:
        if turn.round == 0:
            bench = None  # gives its tensors back before new ones are made
            bench = _Bench(turn, operations[turn.operation], plan.dtype, device, seat)
            wrong = bench.check()
        assert bench is not None
        seconds = bench.time(plan.warm_up, calls) if turn.round else bench.time(0, _ESTIMATING_CALLS)
        if turn.round and turn.round == plan.repetitions:
            wrong = bench.check()
        answers = turns.answer((bench.buffers.numel, bench.buffers.size_bytes, wrong, seconds))
        if turn.round == 0:
            slowest_s = max(seconds[-1] for *_, seconds in answers)
            calls = max(1, min(_MAX_CALLS, int(_TURN_S / max(slowest_s, 1e-9))))
    dist.destroy_process_group()


def join(implementation: Implementation, device_type: str, timeout_s: float, seat: Seat) -> torch.device:
    """Makes the default group of the ranks; returns the device of this one.

    Raises:
        RuntimeError: ranks are to share a GPU over NCCL, whose own message does not say what it needs.
    """
    devices = rank_devices(device_type, seat.placement.devices, max(1, torch.cuda.device_count()))
    device = devices[seat.local_rank]
    is_nccl = implementation.backend == "nccl"
    if is_nccl and share_a_gpu(devices) and sharing_backend() != "nccl":
        raise RuntimeError(f"ranks share a GPU over NCCL from version 2.31 on, where {SHARING_VARIABLE}=1 is set")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        implementation.backend,
        rank=seat.rank,
        world_size=seat.placement.world_size,
        timeout=timedelta(seconds=2 * timeout_s),
        device_id=device if is_nccl and device.type == "cuda" else None,
    )
    return device


class _Bench:
    """One operation on one size, on one rank."""

    def __init__(self, turn: CollectiveTurn, call: Call, dtype: torch.dtype, device: torch.device, seat: Seat) -> None:
        operation, world_size = BY_NAME[turn.operation], seat.placement.world_size
        self._call = call
        self._seat = seat
        self._store = PrefixStore(seat.job, seat.store())
        self._barriers = 0
        self._timeline = clock_of(device)
        self._pattern = Pattern(world_size, dtype, device, summed=operation.is_sum)
        self.buffers = Buffers.make(
            operation, turn.size, rank=seat.rank, world_size=world_size, dtype=dtype, device=device
        )

    def check(self) -> int:
        """Calls it once; returns the number of wrong elements."""
        if not self.buffers.operation.has_size:
            return self._check_barrier()
        self.buffers.fill(self._pattern)
        self._call(self.buffers)
        wrong = self.buffers.wrong(self._pattern)
        self.buffers.clear()
        return wrong

    def _check_barrier(self) -> int:
        """Ranks that had not arrived when the barrier let this one go; the last rank comes late on purpose."""
        if self._seat.rank == self._seat.placement.world_size - 1:
            time.sleep(_LATE_S)
        self._barriers += 1
        self._store.add(f"barrier/{self._barriers}", 1)
        self._call(self.buffers)
        return self._seat.placement.world_size - int(self._store.add(f"barrier/{self._barriers}", 0))

    def time(self, warm_up: int, calls: int) -> list[float]:
        """The seconds of each call after the warm-up."""
        for _ in range(warm_up):
            self._call(self.buffers)
        marks = [self._timeline.mark()]
        for _ in range(calls):
            self._call(self.buffers)
            marks.append(self._timeline.mark())
        self._timeline.wait(marks[-1])
        return [self._timeline.seconds(a, b) for a, b in pairwise(marks)]
