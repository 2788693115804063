"""The run of a collectives bench: every operation on every size, the implementations in turn.

For one operation and size::

    ring    try . . . . . . time . . . . time . . . . . . time . . check       ranks that are not asked sleep
    gloo    . . try . . . . . . . . time . . . . time . . . . . . . . . check
                            round 1      round 2      ...                      every other round in reverse order

Each implementation has a job of its own. Where one fails, its row says how, its ranks are ended and started anew for
the next operation, and the others go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_multigpu.bench.collectives.collective_rank import (
    Check,
    CollectiveSettings,
    Join,
    Time,
    Tried,
    Try,
    serve,
)
from lightning_multigpu.bench.collectives.implementations import Implementation
from lightning_multigpu.bench.collectives.operations import Operation
from lightning_multigpu.bench.jobs.host_agents import HostAgents, JobError, RankJob
from lightning_multigpu.bench.machine import without_places
from lightning_multigpu.bench.spread import Spread

OK, NOT_SUPPORTED, FAILED, CRASHED, TIMED_OUT = "ok", "not supported", "failed", "crashed", "timed out"

_JOIN_S = 60.0
_TURN_S = 0.05
_MAX_CALLS = 50


@dataclass(frozen=True, kw_only=True)
class CollectivePlan:
    """The plan of a bench.

    Args:
        operations, implementations, sizes: every combination, sizes in bytes.
        device_type: "cpu" or "cuda".
        dtype: of the tensors.
        repetitions: turns of each implementation.
        warm_up: calls at the start of each turn that are not timed.
        timeout_s: for each turn.
    """

    operations: Sequence[Operation]
    implementations: Sequence[Implementation]
    sizes: Sequence[int]
    device_type: str
    dtype: torch.dtype
    repetitions: int
    warm_up: int
    timeout_s: float


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
    contenders = [ImplementationRun(hosts, implementation, plan) for implementation in plan.implementations]
    try:
        for operation in plan.operations:
            having = [contender for contender in contenders if contender.implementation.has(operation.name)]
            for contender in having:
                contender.out = None
            for size in plan.sizes if operation.has_size else [0]:
                yield from _measure(operation, size, having, plan)
    finally:
        for contender in contenders:
            contender.end()


def _measure(
    operation: Operation, size: int, contenders: Sequence[ImplementationRun], plan: CollectivePlan
) -> Iterator[CollectiveResult]:
    running = [contender for contender in contenders if contender.out is None and contender.tried(operation, size)]
    for repetition in range(plan.repetitions):
        for contender in running if repetition % 2 == 0 else running[::-1]:
            contender.turn()
    for contender in contenders:
        result = contender.result(operation, size)
        if result is not None:
            yield result


@dataclass
class ImplementationRun:
    """One implementation in the course of the table.

    Attributes:
        out: status and reason why it takes no further part in the present operation.
    """

    hosts: HostAgents
    implementation: Implementation
    plan: CollectivePlan
    out: tuple[str, str | None] | None = None
    _told: bool = False
    _job: RankJob | None = None
    _first: Tried = field(default_factory=Tried)
    _seconds: list[float] = field(default_factory=list)

    def tried(self, operation: Operation, size: int) -> bool:
        """Tries an operation on a size for the first time; False where it is not supported or fails."""
        self._seconds, self._told, self._first = [], False, Tried()
        answers = self._ask(Try(operation.name, size), trying=True)
        if answers is None:
            return False
        tried = [Tried(**answer) for answer in answers]
        slowest = max(tried, key=lambda answer: answer.seconds)
        self._first = replace(slowest, wrong=sum(answer.wrong for answer in tried))
        return True

    def turn(self) -> None:
        """Times some calls, as many as fit into a turn."""
        if self.out is None:
            calls = max(1, min(_MAX_CALLS, int(_TURN_S / max(self._first.seconds, 1e-9))))
            answers = self._ask(Time(self.plan.warm_up, calls))
            if answers is not None:
                self._seconds += [max(call) for call in zip(*answers, strict=True)]

    def result(self, operation: Operation, size: int) -> CollectiveResult | None:
        """The row; None where an earlier row has the reason why there are no more."""
        checked = self._ask(Check()) if self.out is None else None
        common: dict[str, Any] = {"operation": operation, "implementation": self.implementation.name}
        if checked is None:
            if self._told:
                return None
            self._told = True
            assert self.out is not None
            status, reason = self.out
            return CollectiveResult(**common, size_bytes=self._first.size_bytes or size, status=status, reason=reason)
        return CollectiveResult(
            **common,
            size_bytes=self._first.size_bytes,
            numel=self._first.numel,
            wrong=max(self._first.wrong, sum(checked)),
            seconds=Spread.of(self._seconds),
        )

    def end(self) -> None:
        """Ends the ranks."""
        if self._job is not None:
            self._job.end()
            self._job = None

    def _ask(self, request: Any, *, trying: bool = False) -> list[Any] | None:
        try:
            if self._job is None:
                plan = self.plan
                settings = CollectiveSettings(self.implementation, plan.device_type, plan.dtype, plan.timeout_s)
                self._job = self.hosts.start(self.implementation.name, serve, settings)
                self._job.ask(Join(), plan.timeout_s + _JOIN_S)
            return self._job.ask(request, self.plan.timeout_s)
        except JobError as error:
            self._job = None
            self.out = _status(error, trying), without_places(error.failure.reason)
            return None


def _status(error: JobError, trying: bool) -> str:
    failure = error.failure
    if failure.kind == "late":
        return TIMED_OUT
    if failure.kind == "died":
        return CRASHED
    # Where every rank refuses at the first try, the operation is not supported.
    return NOT_SUPPORTED if trying and failure.all_ranks else FAILED
