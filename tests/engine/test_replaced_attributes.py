"""Attributes are what they were behind the block, those of the object itself and those that it had not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightning_multigpu.engine.replaced_attributes import replaced


def fail_within(owner: SimpleNamespace) -> None:
    with replaced(owner, own=3, new=4), replaced(owner, own=5):
        assert vars(owner) == {"own": 5, "other": 2, "new": 4}
        owner.other = 6
        raise KeyError


def test_attributes_are_restored_also_behind_an_error() -> None:
    owner = SimpleNamespace(own=1, other=2)
    with pytest.raises(KeyError):
        fail_within(owner)
    assert vars(owner) == {"own": 1, "other": 6}
