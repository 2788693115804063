"""What moved between ranks: how many bytes, when, for how long, and how much of that time hid behind compute."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_multigpu.communication.metering.collective_observer import CollectiveObserver
from lightning_multigpu.communication.metering.records import (
    CudaRecord,
    CudaWait,
    HostRecord,
    HostWait,
    PendingStep,
    Transfer,
    recorded_event,
)
from lightning_multigpu.communication.metering.traffic import (
    Interval,
    OperationTotals,
    StepTraffic,
    length,
    merged,
    overlaps,
    sent_share,
)

_EPOCH_S = 60.0


class Meter:
    """Records every transfer of this rank and sums them up per optimizer step.

    Blocking transfers are exposed as a whole. Of the others, the exposed part is what overlaps the intervals in which
    the main thread was reported to wait (:meth:`waited`). Any thread may record; steps are ended by the main thread.

    On GPUs transfers are timed by CUDA events on their own stream, and the device is waited for once a minute only: a
    step appears in :attr:`steps` once its events have passed, usually one step later.

    Args:
        history: how many steps :attr:`steps` keeps.
        clock: seconds, monotonic.

    Attributes:
        notes: told of each transfer on the host's clock as it begins and ends, so that others can see what this rank
            waits for; None for nobody. Transfers on CUDA streams are not noted: the host does not wait in them.
    """

    def __init__(self, *, history: int = 4096, clock: Callable[[], float] = time.perf_counter) -> None:
        if history < 1:
            raise ValueError(f"history={history}: the meter must keep at least 1 step")
        self.steps: deque[StepTraffic] = deque(maxlen=history)
        self.notes: CollectiveObserver | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: deque[PendingStep] = deque()
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
        memory_bytes: int = 0,
        blocking: bool = False,
        ranks: str = "",
        awaited: bool = True,
        noted: bool = True,
    ) -> Transfer:
        """Starts the clock of one transfer; the caller ends it with ``finish()``, or with ``broke()`` at an error.

        Args:
            operation: the collective's name as in ``torch.distributed``, ``"all_reduce"`` for example.
            group: the mesh axis or the purpose of the process group: ``"data"``, ``"world"``, ``"control"``...
            group_size: ranks in the group.
            size_bytes: S, the size of the tensor that the collective is about (the total over ranks for gathers).
            sent_bytes: payload that this rank sends; by default :func:`sent_share` x S.
            memory_bytes: how much of that goes through memory shared with ranks of this host, and not over a network.
            blocking: the main thread waits for all of it.
            ranks: the members of the group, as ``collective_observer.ranks_text`` writes them.
            awaited: some thread waits for it from the beginning; where not, call ``awaited()`` of the result later.
            noted: :attr:`notes` is told; nobody needs to know of a message that is handed over and not waited for.
        """
        note = None
        if noted and self.notes is not None:
            note = self.notes.began(
                operation, group=group, ranks=ranks, group_size=group_size, size_bytes=size_bytes, awaited=awaited
            )
        record = HostRecord(
            operation, group, group_size, size_bytes, _payload(operation, group_size, size_bytes, sent_bytes),
            blocking, self._clock(), memory_bytes=memory_bytes, clock=self._clock, note=note,
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
        record = CudaRecord(
            operation, group, group_size, size_bytes, _payload(operation, group_size, size_bytes, sent_bytes),
            blocking, self._epoch(), recorded_event(), torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        )  # fmt: skip
        self._add(record)
        return record

    @contextmanager
    def blocking(
        self,
        operation: str,
        *,
        group: str,
        group_size: int,
        size_bytes: int,
        sent_bytes: int | None = None,
        ranks: str = "",
    ) -> Iterator[None]:
        """Meters a collective that the main thread waits for."""
        transfer = self.begin(
            operation, group=group, group_size=group_size, size_bytes=size_bytes, sent_bytes=sent_bytes, blocking=True,
            ranks=ranks,
        )  # fmt: skip
        try:
            yield
        except BaseException:
            transfer.broke()
            raise
        transfer.finish()

    def waited(self, start_s: float, end_s: float) -> None:
        """The main thread waited for transfers from ``start_s`` to ``end_s`` on the meter's clock."""
        if end_s > start_s:
            with self._lock:
                self._waits.append(HostWait(start_s, end_s))

    def waited_on_stream(self, start: torch.cuda.Event) -> None:
        """The current CUDA stream had nothing but transfers to wait for from the event ``start`` to this moment."""
        wait = CudaWait(self._epoch(), start, recorded_event())
        with self._lock:
            self._waits.append(wait)

    def end_step(self) -> None:
        """Closes the current optimizer step: what is recorded from now on belongs to the next one."""
        with self._lock:
            step = PendingStep(self._next_index, self._start_s, self._clock(), self._records, self._waits)
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
        self._records: list[HostRecord | CudaRecord] = []
        self._waits: list[HostWait | CudaWait] = []
        self._start_s = self._clock() if start_s is None else start_s

    def _add(self, record: HostRecord | CudaRecord) -> None:
        with self._lock:
            self._records.append(record)

    def _epoch(self) -> tuple[torch.cuda.Event, float]:
        """An event whose time is known on the host's clock too, so that others can be placed on that clock.

        It is renewed once a minute: CUDA gives the time between two events as a float32 in ms.
        """
        if self._cuda_epoch is None or self._clock() - self._cuda_epoch[1] > _EPOCH_S:
            torch.cuda.synchronize()
            event = recorded_event()
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


def _sum_up(step: PendingStep) -> StepTraffic:
    waits = merged(wait.interval() for wait in step.waits)
    by_operation: dict[tuple[str, str, int], list[HostRecord | CudaRecord]] = {}
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
            memory_bytes=sum(r.memory_bytes for r in records),
            total_s=length(_busy(records)),
            exposed_s=length(_exposed(records, waits)),
        )
        for (operation, group, group_size), records in by_operation.items()
    )
    return StepTraffic(
        index=step.index,
        start_s=step.start_s,
        end_s=step.end_s,
        operations=operations,
        total_s=length(_busy(step.records)),
        exposed_s=length(_exposed(step.records, waits)),
    )


def _busy(records: Sequence[HostRecord | CudaRecord]) -> list[Interval]:
    return merged(record.interval() for record in records)


def _exposed(records: Sequence[HostRecord | CudaRecord], waits: list[Interval]) -> list[Interval]:
    blocking = [record.interval() for record in records if record.blocking]
    others = merged(record.interval() for record in records if not record.blocking)
    return merged([*blocking, *overlaps(others, waits)])
