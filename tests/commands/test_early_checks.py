"""Misspelt settings and strategies, found without an import of Lightning."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_multigpu.commands.early_checks import check_checkpoint, check_strategy
from lightning_multigpu.commands.usage import UsageError
from lightning_multigpu.registry import STRATEGIES


@pytest.mark.parametrize(
    "name", ["auto", "ddp", "fsdp", "my_ring_ddp", "ring_ddp2", "RING_DDP", "ddp_spawn", *(r.name for r in STRATEGIES)]
)
def test_names_that_may_be_right(name: str) -> None:
    check_strategy(name)


@pytest.mark.parametrize("name", ["rng_ddp", "ring-ddp", "ring_dpp", "ringddp", "RING_DPD", "Pipeline_1f1", "gpip"])
def test_misspelt_names(name: str) -> None:
    with pytest.raises(UsageError, match=rf"strategy='{name}': there is no such strategy\. Did you mean '\w+'\?"):
        check_strategy(name)


@pytest.mark.parametrize("path", [None, "", "best", "last", "s3://bucket/last.ckpt", "registry:model"])
def test_checkpoints_that_are_not_looked_for_here(path: object) -> None:
    check_checkpoint(path)


def test_missing_checkpoint(tmp_path: Path) -> None:
    right = tmp_path / "epoch=3.ckpt"
    right.touch()
    check_checkpoint(right)
    with pytest.raises(UsageError) as caught:
        check_checkpoint(tmp_path / "epoch=4.ckpt")
    assert str(caught.value) == (
        f"ckpt_path={str(tmp_path / 'epoch=4.ckpt')!r}: there is no such file. Did you mean {str(right)!r}?"
    )
