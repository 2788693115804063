"""The members of a group as text."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_text(ranks: Sequence[int]) -> str:
    """The members of a group in a few characters: "0-3", with a stride "0-6:2", otherwise "0,3,4"."""
    if len(ranks) < 2:
        return ",".join(map(str, ranks))
    stride = ranks[1] - ranks[0]
    if stride > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, stride)):
        return f"{ranks[0]}-{ranks[-1]}" + (f":{stride}" if stride > 1 else "")
    return ",".join(map(str, ranks))
