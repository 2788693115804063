"""What moved between ranks: how many bytes, when, for how long, and how much of that time hid behind compute."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

Interval = tuple[float, float]

# Share of the size S that each rank of a group of n sends, for algorithms that are optimal in bandwidth. The factors
# are those by which nccl-tests turns "algbw" into "busbw" (S is the total over the ranks where ranks hold parts of it).
_SENT_SHARE: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "gather": lambda n: Fraction(n - 1, n),
    "scatter": lambda n: Fraction(n - 1, n),
    "broadcast": lambda n: Fraction(1 if n > 1 else 0),
    "reduce": lambda n: Fraction(1 if n > 1 else 0),
    "send": lambda n: Fraction(1),
    "recv": lambda n: Fraction(0),
    "barrier": lambda n: Fraction(0),
}


def sent_share(operation: str, group_size: int) -> float:
    """Bytes that one rank sends for each byte of the collective's size: 2(n-1)/n for an all-reduce, for example.

    This is also nccl-tests' factor between the algorithm's bandwidth (``algbw``) and the bus's (``busbw``).

    Raises:
        ValueError: ``operation`` is none of the collectives above, or ``group_size`` is below 1.
    """
    if group_size < 1:
        raise ValueError(f"group_size={group_size}: a group has at least 1 rank")
    if operation not in _SENT_SHARE:
        raise ValueError(f"operation={operation!r} is unknown; known: {', '.join(sorted(_SENT_SHARE))}")
    return float(_SENT_SHARE[operation](group_size))


@dataclass(frozen=True)
class OperationTotals:
    """All transfers of one operation over one group within one optimizer step, as this rank saw them.

    ``total_s`` is the time during which at least one of them was under way, ``exposed_s`` the part of it in which the
    main thread waited (on a GPU: the compute stream).
    """

    operation: str
    group: str
    group_size: int
    count: int
    size_bytes: int
    sent_bytes: int
    total_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        return self.total_s - self.exposed_s

    @property
    def algbw_bytes_per_s(self) -> float | None:
        """Size over time; None where no time was measured."""
        return self.size_bytes / self.total_s if self.total_s > 0 else None

    @property
    def busbw_bytes_per_s(self) -> float | None:
        """``algbw`` times the operation's factor: comparable with the speed of the wire whatever the group's size."""
        algbw = self.algbw_bytes_per_s
        return None if algbw is None else algbw * sent_share(self.operation, self.group_size)


@dataclass(frozen=True)
class StepTraffic:
    """The traffic of one optimizer step of this rank; steps are counted from 0."""

    index: int
    start_s: float
    end_s: float
    operations: tuple[OperationTotals, ...]
    total_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        return self.total_s - self.exposed_s

    @property
    def sent_bytes(self) -> int:
        return sum(totals.sent_bytes for totals in self.operations)

    def of(self, operation: str, group: str | None = None) -> list[OperationTotals]:
        """The totals of ``operation``, one a group; of ``group`` only, if given."""
        return [t for t in self.operations if t.operation == operation and group in (None, t.group)]


class Transfer(Protocol):
    """One transfer under way. :meth:`finish` is called once, by whichever thread sees it end."""

    def finish(self) -> None: ...


@dataclass
class _Record:
    operation: str
    group: str
    group_size: int
    size_bytes: int
    sent_bytes: int
    blocking: bool
    start_s: float
    end_s: float | None = None
    clock: Callable[[], float] = field(default=time.perf_counter, repr=False)

    def finish(self) -> None:
        self.end_s = self.clock()

    def done(self) -> bool:
        return self.end_s is not None

    def interval(self) -> Interval:
        assert self.end_s is not None
        return self.start_s, self.end_s


@dataclass
class _CudaRecord:
    """A transfer timed on its stream: the host neither waits for it nor looks at a clock."""

    operation: str
    group: str
    group_size: int
    size_bytes: int
    sent_bytes: int
    blocking: bool
    epoch: tuple[torch.cuda.Event, float]
    start: torch.cuda.Event
    end: torch.cuda.Event
    recorded: bool = False

    def finish(self) -> None:
        self.end.record()
        self.recorded = True

    def done(self) -> bool:
        return self.recorded and bool(self.end.query())  # type: ignore[no-untyped-call]

    def interval(self) -> Interval:
        return _on_host_clock(self.epoch, self.start), _on_host_clock(self.epoch, self.end)


@dataclass
class _CudaWait:
    epoch: tuple[torch.cuda.Event, float]
    start: torch.cuda.Event
    end: torch.cuda.Event

    def done(self) -> bool:
        return bool(self.end.query())  # type: ignore[no-untyped-call]

    def interval(self) -> Interval:
        return _on_host_clock(self.epoch, self.start), _on_host_clock(self.epoch, self.end)


@dataclass
class _HostWait:
    start_s: float
    end_s: float

    def done(self) -> bool:
        return True

    def interval(self) -> Interval:
        return self.start_s, self.end_s


@dataclass
class _PendingStep:
    index: int
    start_s: float
    end_s: float
    records: list[_Record | _CudaRecord]
    waits: list[_HostWait | _CudaWait]

    def done(self) -> bool:
        return all(r.done() for r in self.records) and all(w.done() for w in self.waits)


class Meter:
    """Records every transfer of this rank and sums them up per optimizer step.

    Blocking transfers are exposed as a whole. Of the others, the exposed part is what overlaps the intervals in which
    the main thread was reported to wait (:meth:`waited`). Any thread may record; steps are ended by the main thread.

    On GPUs transfers are timed by CUDA events on their own stream, so that measuring never synchronises the device: a
    step appears in :attr:`steps` once its events have passed, usually one step later.

    Args:
        history: how many steps :attr:`steps` keeps.
        clock: seconds, monotonic.
    """

    def __init__(self, *, history: int = 4096, clock: Callable[[], float] = time.perf_counter) -> None:
        if history < 1:
            raise ValueError(f"history={history}: the meter must keep at least 1 step")
        self.steps: deque[StepTraffic] = deque(maxlen=history)
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: deque[_PendingStep] = deque()
        self._cuda_epoch: tuple[torch.cuda.Event, float] | None = None
        self._next_index = 0
        self._open_step()

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty_meter, (self.steps.maxlen,)  # what a spawned rank starts from

    @property
    def steps_ended(self) -> int:
        """How many steps have ended since the meter was made; the newest may not be in :attr:`steps` yet."""
        return self._next_index

    def begin(
        self,
        operation: str,
        *,
        group: str,
        group_size: int,
        size_bytes: int,
        sent_bytes: int | None = None,
        blocking: bool = False,
    ) -> Transfer:
        """Starts the clock of one transfer; the caller ends it with ``finish()``.

        Args:
            operation: the collective's name as in ``torch.distributed``, ``"all_reduce"`` for example.
            group: the mesh axis or the purpose of the process group: ``"data"``, ``"world"``, ``"control"``...
            group_size: ranks in the group.
            size_bytes: S, the size of the tensor that the collective is about (the total over ranks for gathers).
            sent_bytes: payload that this rank sends; by default :func:`sent_share` x S.
            blocking: the main thread waits for all of it.
        """
        record = _Record(
            operation, group, group_size, size_bytes, _payload(operation, group_size, size_bytes, sent_bytes),
            blocking, self._clock(), clock=self._clock,
        )  # fmt: skip
        self._add(record)
        return record

    def begin_on_stream(
        self,
        operation: str,
        *,
        group: str,
        group_size: int,
        size_bytes: int,
        sent_bytes: int | None = None,
        blocking: bool = False,
    ) -> Transfer:
        """As :meth:`begin`, timed by events: start and end are recorded on the CUDA streams current at each call."""
        record = _CudaRecord(
            operation, group, group_size, size_bytes, _payload(operation, group_size, size_bytes, sent_bytes),
            blocking, self._epoch(), _recorded_event(), torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        )  # fmt: skip
        self._add(record)
        return record

    @contextmanager
    def blocking(
        self, operation: str, *, group: str, group_size: int, size_bytes: int, sent_bytes: int | None = None
    ) -> Iterator[None]:
        """Meters a collective that the main thread waits for."""
        transfer = self.begin(
            operation, group=group, group_size=group_size, size_bytes=size_bytes, sent_bytes=sent_bytes, blocking=True
        )
        try:
            yield
        finally:
            transfer.finish()

    def waited(self, start_s: float, end_s: float) -> None:
        """The main thread waited for transfers from ``start_s`` to ``end_s`` on the meter's clock."""
        if end_s > start_s:
            with self._lock:
                self._waits.append(_HostWait(start_s, end_s))

    @contextmanager
    def waiting_on_stream(self) -> Iterator[None]:
        """The current CUDA stream waits for transfers within this block."""
        start = _recorded_event()
        try:
            yield
        finally:
            with self._lock:
                self._waits.append(_CudaWait(self._epoch(), start, _recorded_event()))

    def end_step(self) -> None:
        """Closes the current optimizer step: what is recorded from now on belongs to the next one."""
        with self._lock:
            step = _PendingStep(self._next_index, self._start_s, self._clock(), self._records, self._waits)
            self._pending.append(step)
            self._next_index += 1
            self._open_step(step.end_s)
        self._resolve()

    def discard(self) -> None:
        """Forgets what was recorded since the last step ended: the start of training, validation and the like."""
        with self._lock:
            self._open_step()

    def flush(self) -> None:
        """Waits for the events of all ended steps, so that :attr:`steps` is complete.

        A transfer that nobody waits for any more, because training was ended, is left out.
        """
        if self._cuda_epoch is not None:
            torch.cuda.synchronize()
        with self._lock:
            for step in self._pending:
                step.records = [record for record in step.records if record.done()]
        self._resolve()

    def now(self) -> float:
        """The meter's clock, in seconds."""
        return self._clock()

    def _open_step(self, start_s: float | None = None) -> None:
        self._records: list[_Record | _CudaRecord] = []
        self._waits: list[_HostWait | _CudaWait] = []
        self._start_s = self._clock() if start_s is None else start_s

    def _add(self, record: _Record | _CudaRecord) -> None:
        with self._lock:
            self._records.append(record)

    def _epoch(self) -> tuple[torch.cuda.Event, float]:
        """One event whose time is known on the host's clock too, so that events can be placed on that clock."""
        if self._cuda_epoch is None:
            torch.cuda.synchronize()
            event = _recorded_event()
            event.synchronize()
            self._cuda_epoch = (event, self._clock())
        return self._cuda_epoch

    def _resolve(self) -> None:
        while self._pending and self._pending[0].done():
            self.steps.append(_sum_up(self._pending.popleft()))


def _empty_meter(history: int) -> Meter:
    return Meter(history=history)


def _payload(operation: str, group_size: int, size_bytes: int, sent_bytes: int | None) -> int:
    return round(sent_share(operation, group_size) * size_bytes) if sent_bytes is None else sent_bytes


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _on_host_clock(epoch: tuple[torch.cuda.Event, float], event: torch.cuda.Event) -> float:
    origin, origin_s = epoch
    return origin_s + float(origin.elapsed_time(event)) / 1e3


def _sum_up(step: _PendingStep) -> StepTraffic:
    waits = merged(wait.interval() for wait in step.waits)
    by_operation: dict[tuple[str, str, int], list[_Record | _CudaRecord]] = {}
    for record in step.records:
        by_operation.setdefault((record.operation, record.group, record.group_size), []).append(record)
    operations = tuple(
        OperationTotals(
            operation=operation,
            group=group,
            group_size=group_size,
            count=len(records),
            size_bytes=sum(r.size_bytes for r in records),
            sent_bytes=sum(r.sent_bytes for r in records),
            total_s=_length(_busy(records)),
            exposed_s=_length(_exposed(records, waits)),
        )
        for (operation, group, group_size), records in by_operation.items()
    )
    return StepTraffic(
        index=step.index,
        start_s=step.start_s,
        end_s=step.end_s,
        operations=operations,
        total_s=_length(_busy(step.records)),
        exposed_s=_length(_exposed(step.records, waits)),
    )


def _busy(records: Sequence[_Record | _CudaRecord]) -> list[Interval]:
    return merged(record.interval() for record in records)


def _exposed(records: Sequence[_Record | _CudaRecord], waits: list[Interval]) -> list[Interval]:
    blocking = [record.interval() for record in records if record.blocking]
    others = merged(record.interval() for record in records if not record.blocking)
    return merged([*blocking, *_overlaps(others, waits)])


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint intervals in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def _overlaps(left: list[Interval], right: list[Interval]) -> list[Interval]:
    return [
        (max(a, c), min(b, d))
        for a, b in left
        for c, d in right
        if min(b, d) > max(a, c)
    ]  # fmt: skip


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
