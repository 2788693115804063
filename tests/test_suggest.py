"""The nearest right name for one that is wrong."""

from __future__ import annotations

import pytest

from lightning_multigpu._suggest import did_you_mean, nearest

SETTINGS = ["max_epochs", "min_epochs", "max_steps", "strategy", "num_sanity_val_steps", "callbacks"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("max_epoch", "max_epochs"),
        ("max-epochs", "max_epochs"),
        ("MAX_EPOCHS", "max_epochs"),
        ("startegy", "strategy"),
        ("callback", "callbacks"),
        ("sanity", "num_sanity_val_steps"),
        ("zzz", None),
        ("", None),
    ],
)
def test_nearest(wrong: str, right: str | None) -> None:
    assert nearest(wrong, SETTINGS) == right


def test_hyphens_are_underscores() -> None:
    """Four of nine characters differ, which alone would be too many."""
    assert nearest("a-b-c-d-e", ["a_b_c_d_e"]) == "a_b_c_d_e"


def test_a_part_of_several_names_is_near_to_none() -> None:
    assert nearest("max", SETTINGS) is None


def test_nothing_is_known() -> None:
    assert nearest("max_epochs", []) is None


def test_did_you_mean() -> None:
    assert did_you_mean("max_epoch", SETTINGS) == "Did you mean 'max_epochs'?"
    assert did_you_mean("zzz", SETTINGS) == ""
