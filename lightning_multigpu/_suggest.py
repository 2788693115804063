"""Suggestions of known names for unknown ones."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name of ``known`` that is most like ``name``, or None where nothing is like it."""
    return next(iter(get_close_matches(name, [*known], n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that can be appended to a message: ``"Did you mean 'max_epochs'?"``, or the empty string."""
    suggestion = nearest(name, known)
    return "" if suggestion is None else f"Did you mean {suggestion!r}?"
