"""Suggestions of known names for unknown ones."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that can be appended to a message: ``"Did you mean 'max_epochs'?"``, or the empty string."""
    suggestions = get_close_matches(name, [*known], n=1)
    return f"Did you mean {suggestions[0]!r}?" if suggestions else ""
