"""Names of strategies as the Trainer takes them."""

from __future__ import annotations

import lightning as L
import pytest


@pytest.mark.parametrize(("wrong", "right"), [("ring-ddp", "ring_ddp"), ("pipeline_1fb1", "pipeline_1f1b")])
def test_a_misspelt_name_is_answered_with_the_right_one(wrong: str, right: str) -> None:
    """Lightning's error named its own strategies alone."""
    with pytest.raises(ValueError, match=f"strategy='{wrong}': there is no such strategy. Did you mean '{right}'"):
        L.Trainer(strategy=wrong, devices=1, accelerator="cpu", logger=False)


def test_other_names_are_lightnings() -> None:
    L.Trainer(strategy="ddp", devices=1, accelerator="cpu", logger=False)
    with pytest.raises(ValueError, match="invalid strategy name"):
        L.Trainer(strategy="zzz", devices=1, accelerator="cpu", logger=False)
