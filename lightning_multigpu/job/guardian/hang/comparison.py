"""The comparison of all ranks' collectives, and the report that it makes: pure functions of what was seen of each rank.

::

    rank 0   all_reduce #6 of group data     rank 1 never came to it
    rank 1   barrier #9 of group world       rank 0 never came to it: neither can come before the other goes on
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from lightning_multigpu.job.guardian.hang.flight_recorder import AWAITED, UNDER_WAY, Entry, parse_ranks

# Operations that all ranks of a group call in the same order; and groups whose ranks count messages to one rank, too.
_COLLECTIVES = ("all_gather", "all_reduce", "barrier", "broadcast", "reduce", "reduce_scatter")
_POINT_TO_POINT = ("pipeline", "checkpoint")

Mismatch = list[tuple[int, str]]  # two ranks, and the collective in which each waits


class View(NamedTuple):
    """One rank, as its host's guardian has seen it.

    Attributes:
        place: the most useful line of its main thread; empty if it has not answered.
        own: the collective of torch in which the main thread's stack ends, or empty.
        gone: why it takes part in no collective any more ("has finished"), or empty.
        entries: the rows of its page; here ``since_s`` counts seconds back from now, since the clocks of hosts differ.
    """

    rank: int
    host: str
    pid: int
    step: int
    place: str = ""
    own: str = ""
    gone: str = ""
    entries: tuple[Entry, ...] = ()

    @classmethod
    def from_message(cls, values: Sequence[Any]) -> View:
        """The view that another host has sent as a list of JSON values."""
        return cls(*values)._replace(entries=tuple(Entry(*entry) for entry in values[-1]))


class Waiting(NamedTuple):
    """A collective, the ranks that wait in it, and those that certainly have not come to it."""

    call: Entry
    there: list[View]
    absent: list[int]


def calls(view: View) -> list[Entry]:
    """The collectives in which a rank waits: those that it has noted, else the one that its stack shows, number 0."""
    if view.gone:
        return []
    noted = [entry for entry in view.entries if entry.state == AWAITED]
    return noted or [Entry(AWAITED, 0, 0, 0.0, view.own, "", "")] * bool(view.own)


def _absent(call: Entry, there: Collection[int], views: Mapping[int, View]) -> list[int]:
    """The ranks that certainly have not come to ``call``, or have come with another operation."""
    if not call.operation.startswith(_COLLECTIVES) or call.group in _POINT_TO_POINT:
        return []
    if not call.number:
        # Only the stack shows it, and not its group: several ranks may be all of the group.
        return [rank for rank in views if rank not in there] if len(there) == 1 else []
    members = parse_ranks(call.ranks) or views
    return [rank for rank in members if rank in views and rank not in there and _is_elsewhere(views[rank], call)]


def _is_elsewhere(view: View, call: Entry) -> bool:
    entry = next((e for e in view.entries if (e.group, e.ranks) == (call.group, call.ranks)), None)
    if entry is None or entry.state not in (UNDER_WAY, AWAITED):
        return entry is None or entry.begun < call.number
    # A thread at an earlier collective of the group may still come; an operation is sure if the group has no other.
    is_only = entry.begun == entry.number == call.begun == call.number
    return entry.state == AWAITED and is_only and entry.operation != call.operation


def compare(views: Mapping[int, View]) -> list[Waiting]:
    """The collectives in which ranks wait."""
    found: dict[Entry, list[View]] = {}
    for _, view in sorted(views.items()):
        for call in calls(view):
            found.setdefault(call._replace(since_s=0.0), []).append(view)
    return [Waiting(call, there, _absent(call, {view.rank for view in there}, views)) for call, there in found.items()]


def mismatch(views: Mapping[int, View]) -> Mismatch:
    """Two ranks that wait for each other, and their different collectives; empty if there are none."""
    for pair in combinations(compare(views), 2):
        ranks = [
            [(view.rank, one.call.name) for view in one.there if view.rank in other.absent]
            for one, other in (pair, pair[::-1])
        ]
        if all(ranks):
            return [each[0] for each in ranks]
    return []


def mismatch_text(found: Mismatch, views: Mapping[int, View]) -> str:
    """The verdict about two such ranks."""
    named = ", ".join(f"rank {rank} {name} ({views[rank].place})" for rank, name in found)
    return f"ranks have called different collectives, and cannot go on: {named}"


def hang_report(views: Mapping[int, View], *, waited_s: float, limit_s: float) -> str:
    """The text of a report: the verdict, and a table of the ranks, first those that wait in no collective."""
    if found := mismatch(views):
        outcome, verdict = "The run ends", [mismatch_text(found, views)]
    else:
        outcome = "The run goes on; this is only a report"
        verdict = [f"{_ranks(each.absent)} never came to {each.call.name}" for each in compare(views) if each.absent]
    lines = [f"{line[0].upper()}{line[1:]}." for line in verdict]
    rows = [("rank", "host", "pid", "step", "waits in", "main thread")]
    for view in sorted(views.values(), key=lambda view: (bool(calls(view)), view.rank)):
        waits = "; ".join(c.name + f" for {c.since_s:.0f} s" * bool(c.number) for c in calls(view)) or view.gone or "-"
        place = view.place or "does not answer: it is stopped, or in C code that holds Python's lock"
        rows.append((str(view.rank), view.host, str(view.pid), str(view.step), waits, place))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    heading = f"No progress for {waited_s:.0f} s (hang_report_s={limit_s:g}). {outcome}."
    return "".join(f"{line}\n" for line in [heading, *(f"  {line}" for line in lines)])


def _ranks(ranks: list[int]) -> str:
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
