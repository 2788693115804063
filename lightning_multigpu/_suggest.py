"""Suggestions of known names for unknown ones."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_CUTOFF = 0.6


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name of ``known`` that is most like ``name``, or None where nothing is like it.

    Case does not count, and a hyphen is an underscore.
    """
    by_plain_name = {_plain(candidate): candidate for candidate in known}
    plain_name = _plain(name)
    matches = get_close_matches(plain_name, by_plain_name, n=1, cutoff=_CUTOFF)
    if not matches and len(plain_name) > 2:
        # "epochs" for "num_sanity_val_epochs": too short to be close, yet a part of one name only.
        matches = [candidate for candidate in by_plain_name if plain_name in candidate.split("_")]
        matches = matches if len(matches) == 1 else []
    return by_plain_name[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that can be appended to a message: ``"Did you mean 'max_epochs'?"``, or the empty string."""
    suggestion = nearest(name, known)
    return "" if suggestion is None else f"Did you mean {suggestion!r}?"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
