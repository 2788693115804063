"""The waiting graph of a hang: ranks and the ranks that they wait for, found by comparing all ranks' collectives.

A pure function of the views of the ranks, so that tests can give every case as a table.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, NamedTuple

from lightning_multigpu.job.guardian.hang.flight_recorder import AWAITED, DEVICE, UNDER_WAY, Entry, parse_ranks
from lightning_multigpu.job.guardian.hang.stacks import Frame, Stacks, collective_call

_MAX_FRAMES = 40
_MAX_STACKS = 8_000  # characters
_MAX_FILE = 200
_MAX_FUNCTION = 100
_MAX_OTHERS = 16
IDLE_TICKS = 10  # a thread that uses less processor time between two looks waits

# Operations that all ranks of a group call in the same order; and groups whose ranks count messages to one rank, too.
_COLLECTIVES = ("all_gather", "all_reduce", "barrier", "broadcast", "reduce", "reduce_scatter")
_POINT_TO_POINT = ("pipeline", "checkpoint")
_OF_ALL_RANKS = "_broadcast_sigterm_tensor"  # Lightning's, at each batch


class View(NamedTuple):
    """One rank, as its host's guardian has seen it.

    Attributes:
        entries: the rows of its page; here ``since_s`` counts seconds back from now, since the clocks of hosts differ.
        gone: why it takes part in no collective any more ("it has finished"), or empty.
        cpu_ticks: processor time of the main thread so far, in clock ticks.
    """

    rank: int
    host: str
    pid: int
    step: int
    entries: tuple[Entry, ...] = ()
    stacks: Stacks = Stacks("its stacks are not known")
    main_thread: int = 0
    gone: str = ""
    cpu_ticks: int = 0

    def to_message(self) -> dict[str, Any]:
        """JSON values, cut to fit into one message."""
        frames = [
            frame._replace(file=frame.file[-_MAX_FILE:], function=frame.function[:_MAX_FUNCTION])
            for frame in self.stacks.main[:_MAX_FRAMES]
        ]
        stacks = Stacks(self.stacks.text[-_MAX_STACKS:], tuple(frames))
        return self._replace(stacks=stacks)._asdict()

    @classmethod
    def from_message(cls, values: dict[str, Any]) -> View:
        """The inverse of :meth:`to_message`."""
        text, main = values["stacks"]
        return cls(**{
            **values,
            "entries": tuple(Entry(*entry) for entry in values["entries"]),
            "stacks": Stacks(text, tuple(Frame(*frame) for frame in main)),
        })  # fmt: skip


class Call(NamedTuple):
    """A collective in which a rank waits. ``number`` is 0 if only the stack shows it, and no note."""

    rank: int
    operation: str
    group: str
    ranks: str
    number: int
    for_s: float
    place: str

    @property
    def name(self) -> str:
        """ "all_reduce #118 of group data", or "all_reduce, called in train.py:42 in training_step"."""
        if self.number:
            return f"{self.operation} #{self.number} of group {self.group}"
        return f"{self.operation}, called at {self.place}"


def calls(view: View) -> list[Call]:
    """The collectives in which a rank waits: the noted ones, and the main thread's if that has noted none.

    If the device waits, the place is the main thread's, which waits for the device or has gone on.
    """
    if view.gone:
        return []
    noted = [entry for entry in view.entries if entry.state == AWAITED]
    found = []
    for e in noted:
        place = view.stacks.place if e.thread == DEVICE or _is_main(e, view) else ""
        found.append(Call(view.rank, e.operation, e.group, e.ranks, e.number, e.since_s, place))
    seen = collective_call(view.stacks.main)
    if seen is not None and not any(_is_main(e, view) or (e.thread, e.operation) == (DEVICE, seen[0]) for e in noted):
        found.append(Call(view.rank, seen.operation, "", "", 0, 0.0, seen.place))
    return found


def _is_main(entry: Entry, view: View) -> bool:
    return not view.main_thread or entry.thread == view.main_thread


def verdict(views: Iterable[View]) -> list[str]:
    """The findings about ranks that wait in collectives, one in each line."""
    by_rank = {view.rank: view for view in sorted(views)}
    waiting: dict[tuple[str, str, int], list[Call]] = {}
    for view in by_rank.values():
        for call in calls(view):
            waiting.setdefault((call.group, call.ranks, call.number), []).append(call)
    # Calls that only stacks show come last: their group is not known, so all ranks may be in it.
    ordered = sorted(waiting.items(), key=lambda item: (not item[0][0], item[0][2]))
    return [_finding(by_rank, sorted(parse_ranks(ranks) or by_rank), found) for (_, ranks, _), found in ordered]


def _finding(by_rank: dict[int, View], members: list[int], found: list[Call]) -> str:
    """One collective: the ranks that wait in it, and what the other members of its group do."""
    by_name: dict[str, list[int]] = {}
    for call in found:
        by_name.setdefault(call.name, []).append(call.rank)
    first, there = found[0], {call.rank for call in found}
    at = f" ({first.place})" if first.number and first.place and len(by_name) == 1 else ""
    named = "; ".join(f"{_ranks(r)} wait{'s' * (len(r) == 1)} in {name}{at}" for name, r in by_name.items())
    for_s = f" for {max(call.for_s for call in found):.0f} s" if first.number else ""
    absent = [rank for rank in members if rank not in there]
    others = [_other(by_rank.get(rank), rank, first) for rank in absent[:_MAX_OTHERS]]
    if absent[_MAX_OTHERS:]:
        others.append(f"{len(absent) - _MAX_OTHERS} more ranks are not there")
    if not absent and first.number and len(by_name) == 1:
        others = ["all ranks of the group have come: their messages are slow or lost"]
    return "; ".join([named[0].upper() + named[1:] + for_s, *others])


def _other(view: View | None, rank: int, call: Call) -> str:
    """A clause about a member that does not wait in ``call``."""
    if view is None:
        return f"nothing is known of rank {rank}"
    entry = _entry(view, call)
    if not call.number or entry is None or entry.begun < call.number:
        came = "has not come"
    elif entry.number == call.number and entry.state == UNDER_WAY:
        came = "has come, and does not wait"
    else:
        came = "has come and gone on"
    return f"rank {rank} {came}: {_doing(view)}"


def _entry(view: View, call: Call) -> Entry | None:
    return next((e for e in view.entries if (e.group, e.ranks) == (call.group, call.ranks)), None)


def _doing(view: View) -> str:
    if view.gone:
        return view.gone
    own = calls(view)
    if own:
        at = f" ({own[0].place})" if own[0].number and own[0].place else ""
        return f"it is in another collective, {own[0].name}{at}"
    return f"it is at {view.stacks.place}" if view.stacks.main else view.stacks.text


def lasting(before: Iterable[View], views: Iterable[View]) -> set[int]:
    """Ranks whose main thread was idle in the same unnoted collective at both looks."""
    earlier = {view.rank: view for view in before}
    found = set()
    for view in views:
        first = earlier.get(view.rank)
        if first is None or first.cpu_ticks < 0 or (first.step, _numbers(first)) != (view.step, _numbers(view)):
            continue
        is_idle = view.cpu_ticks - first.cpu_ticks <= IDLE_TICKS
        if is_idle and any(not call.number and call in calls(first) for call in calls(view)):
            found.add(view.rank)
    return found


def _numbers(view: View) -> list[tuple[str, str, int, int]]:
    return [(e.group, e.ranks, e.begun, e.state) for e in view.entries]


def deadlock(views: Iterable[View], *, lasting: Container[int], at_least_s: float) -> str:
    """The ranks that wait for each other and can never go on, with their collectives; empty if that is not certain.

    A rank is stuck if it waits for another stuck rank::

        rank 0   all_reduce #6 of group data   <-- rank 1 has not come, and none of its threads is in that group
        rank 1   barrier #9 of group world     <-- rank 0 has not come

    All ranks begin a group's collectives in the same order, so that neither can come before the other goes on.
    ``lasting`` are the ranks of :func:`lasting`. A noted wait has to be older than the views took, ``at_least_s``.
    """
    by_rank = {view.rank: view for view in sorted(views)}
    found: dict[int, list[tuple[Call, set[int]]]] = {}
    for view in by_rank.values():
        for call in calls(view):
            noted = call.operation in _COLLECTIVES and call.for_s > at_least_s and call.group not in _POINT_TO_POINT
            if noted if call.number else call.rank in lasting:
                found.setdefault(view.rank, []).append((call, _awaited(by_rank, view, call)))
    stuck = set(found)
    while free := {rank for rank in stuck if not any(awaited & stuck for _, awaited in found[rank])}:
        stuck -= free
    in_call: dict[str, list[int]] = {}
    for rank in sorted(stuck):
        call = next(call for call, awaited in found[rank] if awaited & stuck)
        place = by_rank[rank].stacks.place if call.number else ""
        in_call.setdefault(call.name + (f" ({place})" if place else ""), []).append(rank)
    return "; ".join(f"{_ranks(ranks)} in {name}" for name, ranks in in_call.items())


def waits_for(view: View, others: Iterable[View], *, at_least_s: float) -> bool:
    """Whether a rank has waited for a message, or for one of ``others``, which will begin no collective any more."""
    by_rank = {other.rank: other for other in others}
    return any(
        call.for_s >= at_least_s and (call.operation not in _COLLECTIVES or bool(_awaited(by_rank, view, call)))
        for call in calls(view)
    )


def _awaited(by_rank: dict[int, View], view: View, call: Call) -> set[int]:
    """The ranks that certainly have not come to ``call``, or have come with another operation."""
    if not call.number:
        # Only the stack shows it, and not its group: ranks in the same operation may be all of the group.
        same = {
            other.rank
            for other in by_rank.values()
            if any(each.operation == call.operation and not each.number for each in calls(other))
        }
        of_all_ranks = any(frame.function == _OF_ALL_RANKS for frame in view.stacks.main)
        return set(by_rank) - same if same == {call.rank} or of_all_ranks else set()
    members = parse_ranks(call.ranks) or by_rank
    return {rank for rank in members if rank in by_rank and rank != call.rank and _is_elsewhere(by_rank[rank], call)}


def _is_elsewhere(view: View, call: Call) -> bool:
    entry = _entry(view, call)
    if entry is None:
        return True
    if entry.state not in (UNDER_WAY, AWAITED):
        return entry.begun < call.number
    differs = entry.operation != call.operation and entry.operation in _COLLECTIVES
    return entry.state == AWAITED and entry.number == call.number and differs


def _ranks(ranks: list[int]) -> str:
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
