"""Names of strategies as the Trainer takes them."""

from __future__ import annotations

import lightning as L
import pytest


def test_a_misspelt_name_is_answered_with_the_right_one() -> None:
    """Lightning's error named its own strategies alone."""
    message = "strategy='ring-ddp': there is no such strategy. Did you mean 'ring_ddp'"
    with pytest.raises(ValueError, match=message):
        L.Trainer(strategy="ring-ddp", devices=1, accelerator="cpu", logger=False)
    with pytest.raises(ValueError, match="invalid strategy name"):
        L.Trainer(strategy="zzz", devices=1, accelerator="cpu", logger=False)
