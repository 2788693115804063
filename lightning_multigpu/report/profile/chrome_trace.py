"""The timeline of a profiled run as Chrome's trace events: a process for each rank, a track for each kind of activity.

::

    rank 0   compute                   [forward ][backward        ]
             idle: waits for transfers                            [comm.]
             all_reduce (data)                        [ bucket 1 ]
             all_reduce (data), 2                         [ bucket 0    ]    overlaps: a further track
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_multigpu.report.profile.profile_document import ProfileDocument

FILE_NAME = "profile_trace.json"
_PHASE_TRACKS = {
    "data_wait": "data loading",
    "device_transfer": "host-to-device copies",
    "forward": "compute",
    "backward": "compute",
    "optimizer": "optimizer",
    "communication": "idle: waits for transfers",
    "stage_wait": "idle: waits for other stages",
    "callbacks": "callbacks",
    "other": "Lightning's loop",
}


def trace(profile: ProfileDocument, operators: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The timeline as JSON. Events of a track are nested or apart.

    ``operators`` are those of each rank, in rank order, on its own clock: name, thread, start and end in seconds.
    """
    events: list[dict[str, Any]] = []
    for rank, of_rank in zip(profile.ranks, operators, strict=True):
        used = {phase for step in rank.steps for phase, *_ in step.parts}
        named = dict.fromkeys(track for phase, track in _PHASE_TRACKS.items() if phase in used)
        tracks = _Tracks(rank.rank, f"rank {rank.rank} on {rank.host}", named)
        behind_s = profile.origin_s + rank.clock_offset_s
        for step in rank.steps:
            for phase, start_s, end_s in step.parts:
                tracks.add(_PHASE_TRACKS[phase], phase, start_s, end_s)
        for timed in [] if rank.stages is None else rank.stages.steps:
            for i in timed.timeline:
                name, of_stage = f"{i.kind}, micro-batch {i.micro_batch}", f"pipeline stage {i.stage}"
                tracks.add(of_stage, name, i.start_s - behind_s, i.end_s - behind_s)
        for t in sorted((t for step in rank.steps for t in step.transfers), key=lambda t: t.start_s):
            name, sizes = f"{t.operation} ({t.group})", {"size_bytes": t.size_bytes, "sent_bytes": t.sent_bytes}
            tracks.add(name, name, t.start_s, t.end_s, apart=True, args=sizes)
        for thread in sorted({thread for _, thread, *_ in of_rank}):
            kind = f"operators, thread {thread}" if thread >= 0 else f"GPU stream {-1 - thread}"
            for name, _, start_s, end_s in (event for event in of_rank if event[1] == thread):
                tracks.add(kind, name, start_s - behind_s, end_s - behind_s)
        events += tracks.events
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Tracks:
    """The tracks of a rank: those that are ``named``, and others in the order in which they get an event."""

    def __init__(self, pid: int, name: str, named: Iterable[str]) -> None:
        self.events: list[dict[str, Any]] = [_name("process_name", pid, 0, name)]
        self._pid = pid
        self._ends_s: dict[str, float] = {}
        for track in named:
            self._number(track)

    def add(self, track: str, name: str, start_s: float, end_s: float, *, apart: bool = False, **more: Any) -> None:
        """Adds an event; one that is ``apart`` goes to the first track of that name which is free again."""
        lane, count = track, 1
        while apart and self._ends_s.get(lane, start_s) > start_s:
            count += 1
            lane = f"{track}, {count}"
        number = self._number(lane)
        self._ends_s[lane] = end_s
        times_us = {"ts": round(1e6 * start_s, 3), "dur": round(1e6 * (end_s - start_s), 3)}
        self.events.append({"ph": "X", "name": name, "pid": self._pid, "tid": number, **times_us, **more})

    def _number(self, track: str) -> int:
        if track not in self._ends_s:
            self._ends_s[track] = -math.inf
            self.events.append(_name("thread_name", self._pid, len(self._ends_s), track))
        return list(self._ends_s).index(track) + 1


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
