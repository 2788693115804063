"""The nearest right name for one that is wrong."""

from __future__ import annotations

from lightning_multigpu._suggest import did_you_mean, nearest

SETTINGS = ["max_epochs", "min_epochs", "max_steps", "strategy", "num_sanity_val_steps", "callbacks"]


def test_nearest() -> None:
    for wrong in ("max_epoch", "max-epochs", "MAX_EPOCHS"):
        assert nearest(wrong, SETTINGS) == "max_epochs"
    assert nearest("a-b-c-d-e", ["a_b_c_d_e"]) == "a_b_c_d_e", "four of nine characters differ"
    assert nearest("sanity", SETTINGS) == "num_sanity_val_steps"
    assert [nearest(wrong, SETTINGS) for wrong in ("zzz", "", "max")] == [None] * 3, "max is a part of several"
    assert nearest("max_epochs", []) is None


def test_did_you_mean() -> None:
    assert did_you_mean("max_epoch", SETTINGS) == "Did you mean 'max_epochs'?"
    assert did_you_mean("zzz", SETTINGS) == ""
