"""What ranks were waiting in at the moment of a failure: a line a rank, for the message about it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lightning_multigpu.guardian.hang.flight_recorder import AWAITED, BROKEN, Entry, read_entries
from lightning_multigpu.guardian.hang.stacks import Question, StackSignal
from lightning_multigpu.guardian.ranks import Ranks

MAX_LINES = 8
_ANSWER_S = 0.4
_PAUSE_S = 0.01


def last_waits(
    ranks: Ranks, memory: Any, signals: Mapping[int, StackSignal], *, failed: int | None, now_s: float
) -> list[str]:
    """What the ranks of a host wait in or, where the failure has reached them already, were waiting in.

    It is to be called before the ranks are told of the failure, and takes up to 0.4 s.

    Args:
        ranks: of the host.
        memory: their pages.
        signals: how they are asked for their stacks.
        failed: the rank that has failed: it waits for nobody.
        now_s: time on CLOCK_BOOTTIME.
    """
    found: dict[int, Entry] = {}
    questions: dict[int, Question] = {}
    for rank in ranks.at_work:
        entries = [e for e in read_entries(memory, rank.slot) if e.state in (AWAITED, BROKEN)]
        if not entries or rank.rank == failed:
            continue
        entry = found[rank.rank] = min(entries, key=lambda e: (e.state != AWAITED, e.since_s))
        if entry.state == AWAITED:
            questions[rank.rank] = Question(rank.process, signals.get(rank.rank))
    until_s = time.monotonic() + _ANSWER_S
    while not all(question.is_answered() for question in questions.values()) and time.monotonic() < until_s:
        time.sleep(_PAUSE_S)
    lines = []
    for number, entry in sorted(found.items()):
        answer = questions[number].answer() if number in questions else None
        place = entry.place if answer is None else answer.place if answer.main else ""
        waited_s = max(0.0, now_s - entry.since_s)
        lines.append(f"rank {number} waited in {entry.name} for {waited_s:.1f} s" + (f", {place}" if place else ""))
    return lines


def shortened(lines: list[str]) -> list[str]:
    """The first lines, and how many more there are."""
    more = len(lines) - MAX_LINES
    return lines if more <= 0 else [*lines[:MAX_LINES], f"{more} more ranks waited too"]
