"""The meter: bytes and time of every transfer between ranks, and how much of that time compute hid."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_multigpu.communication.metering.clocks import StreamClock, recorded_event
from lightning_multigpu.communication.metering.records import Mark, PendingStep, StreamWatch, Transfer, Wait
from lightning_multigpu.communication.metering.traffic import (
    Interval,
    OperationTotals,
    StepTraffic,
    length,
    merged,
    overlaps,
    sent_share,
)

_MAX_STEPS = 4096
_MOST_RECORDS = 1 << 14
"""Records of steps that nobody has asked for; older steps are forgotten."""
_EPOCH_S = 60.0
_LATE_S = 0.2
"""Gloo's threads report the end of a transfer a moment after a thread that waits for it continues."""


class Meter:
    """Records every transfer of this rank, and sums up those of an optimizer step when somebody asks.

    A blocking transfer is exposed as a whole. Another transfer is exposed while the main thread waits, which is
    reported by :meth:`waited`. Any thread may record; the main thread ends steps, and asks for them.

    On GPUs CUDA events on the transfers' own stream time them, and the meter waits for the device only once a minute:
    a step appears in :attr:`steps` once its events have passed, usually one step later.

    Args:
        clock: seconds, monotonic.

    Attributes:
        now: the clock.
        listener: called with the transfers of each step, once all their times are known, and with the exposed
            intervals.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = clock
        self.listener: Callable[[list[Transfer], list[Interval]], None] | None = None
        self._notes: Any = None
        self._stream_clock = StreamClock(clock)
        self._stream_origin: tuple[torch.cuda.Event, float] | None = None
        self._stream_watch = StreamWatch()
        self._steps: deque[StepTraffic] = deque(maxlen=_MAX_STEPS)
        self._pending: deque[PendingStep] = deque()
        self._num_records = 0  # of pending steps
        self._next_index = 0
        self.discard()

    def __reduce__(self) -> tuple[Any, ...]:
        return Meter, ()  # a spawned rank starts with an empty meter

    @property
    def notes(self) -> Any:
        """Observes the begin and end of each transfer, so that other processes can see what this rank waits for.

        The guardian's ``FlightRecorder``, or None. For transfers on CUDA streams a thread reports the device's progress
        to it.
        """
        return self._notes

    @notes.setter
    def notes(self, observer: Any) -> None:
        self._stream_watch.stop()
        self._notes = observer

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
        on_stream: bool = False,
    ) -> Transfer:
        """Starts the clock of one transfer; the caller ends it with ``finish()``, or with ``broke()`` at an error.

        Args:
            operation: the collective's name as in ``torch.distributed``, ``"all_reduce"`` for example.
            group: the mesh axis or the purpose of the process group: ``"data"``, ``"world"``, ``"control"``...
            group_size: ranks in the group.
            size_bytes: S, the size of the collective's tensor (the total over ranks for gathers).
            sent_bytes: payload that this rank sends; by default :func:`sent_share` x S.
            memory_bytes: the part of ``sent_bytes`` that goes through memory shared with ranks of this host.
            blocking: the main thread waits during the whole transfer.
            ranks: the members of the group, as ``ranks_text`` writes them.
            awaited: a thread waits for it from the beginning.
            noted: :attr:`notes` observes it; not needed for a sent message that no thread waits for.
            on_stream: time it by events on the CUDA streams current at its start and end. It counts as awaited once
                the device has reached it.
        """
        note = None
        if noted and self._notes is not None:
            awaited = awaited and not on_stream
            note = self._notes.began(operation, group=group, ranks=ranks, awaited=awaited)
        if sent_bytes is None:
            sent_bytes = round(sent_share(operation, group_size) * size_bytes)
        origin = self._origin() if on_stream else None
        transfer = Transfer(
            start=recorded_event() if on_stream else self.now(), origin=origin, operation=operation, group=group,
            group_size=group_size, size_bytes=size_bytes, sent_bytes=sent_bytes, blocking=blocking, now=self.now,
            memory_bytes=memory_bytes, note=note,
        )  # fmt: skip
        self._transfers.append(transfer)
        if note is not None and on_stream:
            self._stream_watch.add(transfer)
        return transfer

    def blocking(self, operation: str, **described: Any) -> Transfer:
        """:meth:`begin` for a collective that the main thread waits for."""
        return self.begin(operation, blocking=True, **described)

    def mark(self, *, on_stream: bool) -> Mark:
        """This moment, or an event on the current CUDA stream."""
        return recorded_event() if on_stream else self.now()

    def waited(self, start: Mark, end: Mark | None = None) -> None:
        """The main thread, or the current CUDA stream, did nothing but wait for transfers between two marks.

        ``end`` is this moment by default.
        """
        on_stream = isinstance(start, torch.cuda.Event)
        end = self.mark(on_stream=on_stream) if end is None else end
        self._waits.append(Wait(start=start, end=end, origin=self._origin() if on_stream else None))

    @property
    def steps(self) -> deque[StepTraffic]:
        """The newest steps whose transfers have ended; no later step comes before an earlier one."""
        while self._pending and self._pending[0].done():
            step = self._dropped()
            traffic, exposed = _sum_up(step)
            if self.listener is not None:
                self.listener(step.transfers, exposed)
            self._steps.append(traffic)
        return self._steps

    def end_step(self) -> None:
        """Closes the current optimizer step: what is recorded from now on belongs to the next one."""
        if self._stream_origin is not None and self.now() - self._stream_origin[1] > _EPOCH_S:
            self._stream_origin = self._stream_clock.origin()
        step = PendingStep(self._next_index, self._start_s, self.now(), self._transfers, self._waits)
        self._pending.append(step)
        self._num_records += step.num_records
        self._next_index += 1
        self.discard(step.end_s)
        while self._num_records > _MOST_RECORDS and len(self._pending) > 1:
            self._dropped()
        if self.listener is not None:
            _ = self.steps

    def _dropped(self) -> PendingStep:
        step = self._pending.popleft()
        self._num_records -= step.num_records
        return step

    def discard(self, now_s: float | None = None) -> None:
        """Forgets what was recorded since the last step ended: the start of training, validation and the like."""
        self._transfers: list[Transfer] = []
        self._waits: list[Wait] = []
        self._start_s = self.now() if now_s is None else now_s

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Forgets, at the end of the block, what was recorded within it."""
        kept = self._transfers, self._waits
        self.discard(self._start_s)
        try:
            yield
        finally:
            self._transfers, self._waits = kept

    def flush(self) -> None:
        """Waits for the events of all ended steps, so that :attr:`steps` is complete.

        A transfer that no thread waits for, because training has ended, is left out.
        """
        if self._stream_origin is not None:
            torch.cuda.synchronize()
        deadline_s = time.monotonic() + _LATE_S
        while not all(step.done() for step in self._pending) and time.monotonic() < deadline_s:
            time.sleep(_LATE_S / 100)
        for step in self._pending:
            step.transfers = [transfer for transfer in step.transfers if transfer.done()]
        _ = self.steps

    def _origin(self) -> tuple[torch.cuda.Event, float]:
        """The origin of the CUDA clock, renewed once a minute: CUDA gives the time between events as a float32 in ms.

        It is renewed between two steps: within a step, a rank that waits for its device may delay the ranks that its
        device waits for.
        """
        if self._stream_origin is None:
            self._stream_origin = self._stream_clock.origin()
        return self._stream_origin


def _sum_up(step: PendingStep) -> tuple[StepTraffic, list[Interval]]:
    """The figures of a step, and the times in which the main thread waited for a transfer."""
    waits = merged(wait.interval() for wait in step.waits)
    by_operation: dict[tuple[str, str, int], list[tuple[Transfer, Interval]]] = {}
    for transfer in step.transfers:
        key = transfer.operation, transfer.group, transfer.group_size
        by_operation.setdefault(key, []).append((transfer, transfer.interval()))
    operations, spans, exposures = [], [], []
    for (operation, group, group_size), timed in by_operation.items():
        transfers = [transfer for transfer, _ in timed]
        busy = merged(interval for _, interval in timed)
        hidden_or_not = merged(interval for transfer, interval in timed if not transfer.blocking)
        blocking = [interval for transfer, interval in timed if transfer.blocking]
        exposed = merged([*blocking, *overlaps(hidden_or_not, waits)])
        operations.append(
            OperationTotals(
                operation=operation,
                group=group,
                group_size=group_size,
                count=len(transfers),
                size_bytes=sum(transfer.size_bytes for transfer in transfers),
                sent_bytes=sum(transfer.sent_bytes for transfer in transfers),
                memory_bytes=sum(transfer.memory_bytes for transfer in transfers),
                total_s=length(busy),
                exposed_s=length(exposed),
            )
        )
        spans += busy
        exposures += exposed
    exposed = merged(exposures)
    return StepTraffic(
        index=step.index,
        start_s=step.start_s,
        end_s=step.end_s,
        operations=tuple(operations),
        total_s=length(merged(spans)),
        exposed_s=length(exposed),
    ), exposed
