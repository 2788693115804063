"""The run of a collectives bench: every operation on every size, the implementations in turn.

For one operation and size::

    ring    try . . . time . . . . . . time      all in the same ranks; one that is not asked does nothing
    gloo    . . try . . . time . . time
                      round 1    round 2         every other round in reverse order
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist

from lightning_multigpu.bench.collectives.implementations import Call, Implementation
from lightning_multigpu.bench.collectives.operations import BY_NAME, Buffers, Operation
from lightning_multigpu.bench.jobs.host_agents import HostAgents, JobError
from lightning_multigpu.bench.jobs.rank_process import Seat, Turns
from lightning_multigpu.communication.metering.clocks import clock_of
from lightning_multigpu.job.shared_gpus import SHARING_VARIABLE, rank_devices, share_a_gpu, sharing_backend
from lightning_multigpu.report.statistics import Spread

OK, NOT_SUPPORTED, FAILED, WRONG = "ok", "not supported", "failed", "wrong"

_TURN_S = 0.05
_MAX_CALLS = 50
_ESTIMATING_CALLS = 2
_LATE_S = 0.05


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


def measure(hosts: HostAgents, plan: CollectivePlan) -> Iterator[CollectiveResult]:
    """The rows, one after another; an operation that fails on one size is not tried on larger ones.

    It is "not supported" where every rank refuses it. Where a rank dies or does not answer, its row is the last one.
    """
    settings = plan.implementations, plan.device_type, plan.dtype, plan.warm_up, plan.timeout_s
    job = hosts.start(serve, settings, timeout_s=plan.timeout_s, start_timeout_s=plan.join_s)
    for operation in plan.operations:
        names = [each.name for each in plan.implementations if each.has(operation.name)]
        for size in plan.sizes if operation.has_size else [0]:
            rows = {name: CollectiveResult(operation=operation, implementation=name, size_bytes=size) for name in names}
            calls = dict.fromkeys(names, 0)
            seconds: dict[str, list[float]] = {name: [] for name in names}
            for number in range(1 + plan.repetitions):  # in the first round each is tried
                is_last = number == plan.repetitions
                for name in names[:] if (plan.repetitions - number) % 2 == 0 else names[::-1]:
                    try:
                        answers = job.turn((name, operation.name, size, calls[name], is_last or not number))
                    except JobError as error:
                        yield replace(rows[name], status=FAILED, reason=str(error))
                        return
                    errors = [f"rank {rank}: {each}" for rank, each in enumerate(answers) if isinstance(each, str)]
                    if errors:
                        names.remove(name)
                        status = NOT_SUPPORTED if len(errors) == len(answers) and not number else FAILED
                        yield replace(rows[name], status=status, reason=errors[0])
                        continue
                    numels, sizes, wrong, times = zip(*answers, strict=True)
                    worst = max(rows[name].wrong, sum(wrong))
                    rows[name] = replace(rows[name], numel=numels[0], size_bytes=sizes[0], wrong=worst)
                    slowest = [max(call) for call in zip(*times, strict=True)]
                    if number:
                        seconds[name] += slowest
                    else:
                        calls[name] = max(1, min(_MAX_CALLS, int(_TURN_S / max(slowest[-1], 1e-9))))
                    if is_last:
                        yield replace(rows[name], seconds=Spread.of(seconds[name]) if number else None)
    job.end()


def support(
    hosts: HostAgents, implementations: Sequence[Implementation], operations: Sequence[Operation], timeout_s: float
) -> list[dict[str, Any]]:
    """The entries of ``bench collectives --support``: each operation is tried on a few KiB of float32.

    Where ranks die or hang, new ones try the operations that are left.
    """
    cells = []
    for implementation, device in product(implementations, ("cpu", "cuda")):
        missing = None
        if not implementation.is_built:
            missing = "not built"
        elif device == "cuda" and not torch.cuda.device_count():
            missing = "no GPU"
        elif implementation.own and device != "cpu":
            missing = NOT_SUPPORTED
        rows: dict[str, CollectiveResult] = {}
        had = [] if missing else [each for each in operations if implementation.has(each.name)]
        while left := [each for each in had if each.name not in rows]:
            plan = CollectivePlan(
                operations=left, implementations=[implementation], sizes=[1 << 12], device_type=device,
                repetitions=0, timeout_s=timeout_s,
            )  # fmt: skip
            rows |= {row.operation.name: row for row in measure(hosts, plan)}
        for operation in operations:
            row = rows.get(operation.name)
            status = missing or NOT_SUPPORTED if row is None else WRONG if row.wrong else row.status
            reason = None if row is None else f"{row.wrong} wrong elements" if row.wrong else row.reason
            place = {"implementation": implementation.name, "device": device, "operation": operation.name}
            cells.append({**place, "supported": status == OK, "status": status, "reason": reason})
    return cells


def serve(settings: tuple[Any, ...], seat: Seat, turns: Turns) -> None:
    """The main function of a rank: joins the other ranks, then takes its turns.

    It answers the number of elements, the size in bytes, the number of wrong elements and the seconds of each call, or
    the text of an exception.
    """
    implementations, device_type, dtype, warm_up, timeout_s = settings
    devices = rank_devices(device_type, seat.placement.devices, max(1, torch.cuda.device_count()))
    device, timeout = devices[seat.local_rank], timedelta(seconds=2 * timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", rank=seat.rank, world_size=seat.placement.world_size, timeout=timeout)
    made: dict[str, Mapping[str, Call]] = {}
    bench: _Bench | None = None
    for name, operation, size, calls, checks in turns:
        try:
            if name not in made:
                [implementation] = (each for each in implementations if each.name == name)
                group = group_of(implementation.backend, devices, device, timeout)
                made[name] = implementation.make(group, seat.placement.devices)
            if bench is None or (bench.operation.name, bench.size) != (operation, size):
                bench = None  # gives its tensors back before new ones are made
                bench = _Bench(BY_NAME[operation], size, dtype, device, seat)
            call = partial(made[name][operation], bench.buffers)
            wrong = bench.check(call) if checks and not calls else 0
            seconds = bench.time(call, warm_up if calls else 0, calls or _ESTIMATING_CALLS)
            wrong += bench.check(call) if checks and calls else 0
            turns.answer((bench.buffers.numel, bench.buffers.size_bytes, wrong, seconds))
        except Exception as error:  # the implementation's: all ranks may refuse alike
            traceback.print_exc()
            turns.answer(f"{type(error).__name__}: {error}".partition("\n")[0])
    dist.destroy_process_group()


def group_of(
    backend: str, devices: Sequence[torch.device], device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """A group of all ranks; ``devices`` are those of the ranks of this host, ``device`` that of this rank.

    Raises:
        RuntimeError: ranks are to share a GPU over NCCL, whose own message does not say what it needs.
    """
    bound: dict[str, Any] = {"device_id": device} if backend == "nccl" and device.type == "cuda" else {}
    if backend == "nccl" and share_a_gpu(devices) and sharing_backend() != "nccl":
        raise RuntimeError(f"ranks share a GPU over NCCL from version 2.31 on, where {SHARING_VARIABLE}=1 is set")
    group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timeout, **bound)
    return group


class _Bench:
    """One operation on one size, on one rank."""

    def __init__(self, operation: Operation, size: int, dtype: torch.dtype, device: torch.device, seat: Seat) -> None:
        self.operation, self.size = operation, size
        self._store, self._barriers = seat.store(), 0
        self._timeline = clock_of(device)
        self.buffers = Buffers.make(
            operation, size, rank=seat.rank, world_size=seat.placement.world_size, dtype=dtype, device=device
        )

    def check(self, call: Callable[[], object]) -> int:
        """Calls it once; returns the number of wrong elements.

        Of a barrier: of ranks that had not arrived when it let this one go; the last one comes late on purpose.
        """
        if self.operation.has_size:
            self.buffers.fill()
            call()
            wrong = self.buffers.wrong()
            self.buffers.clear()
            return wrong
        if self.buffers.rank == self.buffers.world_size - 1:
            time.sleep(_LATE_S)
        self._barriers += 1
        self._store.add(f"barrier {self._barriers}", 1)
        call()
        return self.buffers.world_size - int(self._store.add(f"barrier {self._barriers}", 0))

    def time(self, call: Callable[[], object], warm_up: int, calls: int) -> list[float]:
        """The seconds of each call after the warm-up."""
        for _ in range(warm_up):
            call()
        marks = [self._timeline.mark()]
        for _ in range(calls):
            call()
            marks.append(self._timeline.mark())
        self._timeline.wait(marks[-1])
        return [self._timeline.seconds(a, b) for a, b in pairwise(marks)]
