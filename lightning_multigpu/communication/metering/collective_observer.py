"""The interface of an observer of collectives that are under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class CollectiveNote(Protocol):
    """One collective under way; exactly one of :meth:`ended` and :meth:`broke` is called."""

    def awaited(self, *, by_device: bool = False) -> None:
        """The calling thread, or this rank's device, begins to wait for it."""

    def ended(self) -> None:
        """It has ended."""

    def broke(self) -> None:
        """It has raised an error."""


class CollectiveObserver(Protocol):
    """An observer of each collective that begins; the guardian's ``FlightRecorder`` is one."""

    def began(self, operation: str, *, group: str, ranks: str, awaited: bool = True) -> CollectiveNote | None: ...


def ranks_text(ranks: Sequence[int]) -> str:
    """The members of a group in a few characters: "0-3", with a stride "0-6:2", otherwise "0,3,4"."""
    if len(ranks) < 2:
        return ",".join(map(str, ranks))
    stride = ranks[1] - ranks[0]
    if stride > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, stride)):
        return f"{ranks[0]}-{ranks[-1]}" + (f":{stride}" if stride > 1 else "")
    return ",".join(map(str, ranks))
