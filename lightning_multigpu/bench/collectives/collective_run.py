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
    MAX_CALLS,
    CollectiveSettings,
    CollectiveTurn,
    Tried,
    serve,
)
from lightning_multigpu.bench.collectives.implementations import Implementation
from lightning_multigpu.bench.collectives.operations import BY_NAME, Operation
from lightning_multigpu.bench.jobs.host_agents import HostAgents, JobError, RankJob
from lightning_multigpu.bench.machine import without_places
from lightning_multigpu.bench.spread import Spread

OK, NOT_SUPPORTED, FAILED, CRASHED, TIMED_OUT = "ok", "not supported", "failed", "crashed", "timed out"

_JOIN_S = 60.0
_MAX_CALLS = MAX_CALLS


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

    def turns(self) -> Iterator[CollectiveTurn]:
        """The turns of all implementations, in order."""
        for operation in self.operations:
            having = [each.name for each in self.implementations if each.has(operation.name)]
            for size in self.sizes if operation.has_size else [0]:
                yield from (CollectiveTurn(name, operation.name, size, "try") for name in having)
                for repetition in range(self.repetitions):
                    order = having if repetition % 2 == 0 else having[::-1]
                    yield from (CollectiveTurn(name, operation.name, size, "time") for name in order)
                yield from (CollectiveTurn(name, operation.name, size, "check") for name in having)


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
        run.end()


@dataclass
class ImplementationRun:
    """One implementation in the course of the table.

    Attributes:
        out: operation, status and reason why it takes no further part in this operation.
    """

    hosts: HostAgents
    implementation: Implementation
    plan: CollectivePlan
    turns: Sequence[tuple[int, CollectiveTurn]]
    out: tuple[str, str, str] | None = None
    _told: bool = False
    _job: RankJob | None = None
    _tried: Tried = field(default_factory=Tried)
    _seconds: list[float] = field(default_factory=list)

    def take(self, number: int, turn: CollectiveTurn) -> CollectiveResult | None:
        """Takes a turn. The last one of a size has the row; None where an earlier row says why there are no more."""
        if turn.step == "try":
            self._tried, self._seconds = Tried(), []
            if self.out is None or self.out[0] != turn.operation:
                self.out, self._told = None, False
        answers = self._answers(number, turn)
        if answers is not None and turn.step == "try":
            tried = [Tried(**answer) for answer in answers]
            self._tried = replace(tried[0], wrong=sum(each.wrong for each in tried))
        elif answers is not None and turn.step == "time":
            self._seconds += [max(call) for call in zip(*answers, strict=True)]
        return self._result(turn, answers) if turn.step == "check" else None

    def _result(self, turn: CollectiveTurn, checked: list[int] | None) -> CollectiveResult | None:
        row = CollectiveResult(
            operation=BY_NAME[turn.operation],
            implementation=self.implementation.name,
            size_bytes=self._tried.size_bytes if checked is not None else self._tried.size_bytes or turn.size,
        )
        if checked is None:
            was_told, self._told = self._told, True
            assert self.out is not None
            return None if was_told else replace(row, status=self.out[1], reason=self.out[2])
        wrong = max(self._tried.wrong, sum(checked))
        return replace(row, numel=self._tried.numel, wrong=wrong, seconds=Spread.of(self._seconds))

    def _answers(self, number: int, turn: CollectiveTurn) -> list[Any] | None:
        if self.out is not None:
            self.hosts.skip(number)
            return None
        try:
            if self._job is None:
                self._job = self._started(number)
            return self._job.answers(number)
        except JobError as error:
            self._job = None
            status = _status(error, is_first=turn.step == "try")
            self.out = turn.operation, status, without_places(str(error))
            return None

    def _started(self, number: int) -> RankJob:
        plan = self.plan
        settings = CollectiveSettings(
            self.implementation, plan.device_type, plan.dtype, plan.timeout_s, plan.warm_up, _MAX_CALLS
        )
        left = [turn for turn in self.turns if turn[0] >= number]
        start_s = plan.timeout_s + _JOIN_S
        name = self.implementation.name
        return self.hosts.start(name, serve, settings, left, timeout_s=plan.timeout_s, start_timeout_s=start_s)

    def end(self) -> None:
        """Ends the ranks."""
        if self._job is not None:
            self._job.end()
            self._job = None


def _status(error: JobError, *, is_first: bool) -> str:
    if error.kind != "raised":
        return TIMED_OUT if error.kind == "late" else CRASHED
    # Where every rank refuses at the first try, the operation is not supported.
    return NOT_SUPPORTED if is_first and error.all_ranks else FAILED
