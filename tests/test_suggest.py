"""The nearest right name for one that is wrong."""

from __future__ import annotations

import pytest

from lightning_multigpu._suggest import did_you_mean


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("max_epoch", "Did you mean 'max_epochs'?"), ("max-epochs", "Did you mean 'max_epochs'?"), ("zzz", ""), ("", "")],
)
def test_did_you_mean(wrong: str, message: str) -> None:
    assert did_you_mean(wrong, ["min_epochs", "max_epochs", "strategy"]) == message
