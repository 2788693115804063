"""Deprecations that each rank repeated, and what stays."""

from __future__ import annotations

import warnings

from lightning_multigpu.job.run_context import silence_deprecations

LEAF_SPEC = "`isinstance(treespec, LeafSpec)` is deprecated, use `isinstance(treespec, TreeSpec) and ...` instead."
ONE_CYCLE = "Warning: Profiler clears events at the end of each cycle.Only events from the current cycle ..."
REPEATS = "Using `DistributedSampler` with the dataloaders. During `trainer.test()`, it is recommended to ..."
DIRPATH = "The dirpath has changed from 'runs/version_0' to 'runs/version_1', therefore ... won't be reloaded."


def shown(rank: int) -> list[str]:
    """The warnings that reach the terminal of ``rank`` out of one of each kind."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        silence_deprecations(rank)
        for text, category, module in (
            (LEAF_SPEC, FutureWarning, "lightning.pytorch.utilities._pytree"),
            (ONE_CYCLE, UserWarning, "torch.profiler.profiler"),
            (REPEATS, UserWarning, "lightning.pytorch.trainer.connectors.data_connector"),
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
