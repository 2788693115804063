"""Fixtures of the callbacks' tests."""

from __future__ import annotations

from tests.callbacks.training import clock

__all__ = ["clock"]
