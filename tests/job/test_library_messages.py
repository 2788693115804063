"""Tips and deprecations that each rank repeated, and what stays."""

from __future__ import annotations

import logging
import warnings

import pytest
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from lightning_multigpu.job.library_messages import silence_deprecations, silence_tips
from tests.job.test_failure_watch import RUN

LEAF_SPEC = "`isinstance(treespec, LeafSpec)` is deprecated, use `isinstance(treespec, TreeSpec) and ...` instead."
ONE_CYCLE = "Warning: Profiler clears events at the end of each cycle.Only events from the current cycle ..."
DIRPATH = "The dirpath has changed from 'runs/version_0' to 'runs/version_1', therefore ... won't be reloaded."


def shown(rank: int) -> list[str]:
    """The warnings that reach the terminal of ``rank``, out of one of each kind."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        silence_deprecations(rank)
        for text, category, module in (
            (LEAF_SPEC, FutureWarning, "lightning.pytorch.utilities._pytree"),
            (ONE_CYCLE, UserWarning, "torch.profiler.profiler"),
            ("a library's", FutureWarning, "torch.nn"),
            ("of a loss", UserWarning, "torch.nn.modules.loss"),
            (DIRPATH, UserWarning, "lightning.pytorch.callbacks.model_checkpoint"),
            ("the user's", FutureWarning, "torchlike"),
        ):
            warnings.warn_explicit(text, category, "file.py", 1, module)
    return [str(each.message) for each in caught]


def test_ranks_do_not_repeat_what_libraries_deprecate() -> None:
    """Only a pipeline's last rank computes the loss: what torch says of it must not be lost."""
    assert shown(rank=0) == ["a library's", "of a loss", DIRPATH, "the user's"]
    assert shown(rank=1) == ["of a loss", "the user's"]


def test_tips_for_other_products_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before = list(logger.filters)
    try:
        with caplog.at_level(logging.INFO, logger.name):
            for _ in range(2):
                silence_tips()
            assert len(logger.filters) <= len(before) + 1
            rank_zero_info("💡 Tip: For seamless cloud logging, try installing [litlogger]")
            rank_zero_info("GPU available: False, used: False; Tip: none")
    finally:
        logger.filters[:] = before
    assert [record.getMessage() for record in caplog.records] == ["GPU available: False, used: False; Tip: none"]


def test_a_rank_that_has_made_no_strategy_drops_them_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spawned rank gets a copy of the strategy, and printed the tips."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    with caplog.at_level(logging.INFO, logger.name), warnings.catch_warnings():
        RUN.tell_ranks()
        rank_zero_info("💡 Tip: For seamless cloud uploads and versioning, try installing [litmodels]")
    assert caplog.records == []
