"""Deprecations that each rank repeated, and what stays."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import lightning as L

from lightning_multigpu.job.library_messages import silence_deprecations, without_repeats
from tests.strategies.tasks import Classifier, fit_module, make_strategy
from tests.world import World

LEAF_SPEC = "`isinstance(treespec, LeafSpec)` is deprecated, use `isinstance(treespec, TreeSpec) and ...` instead."
ONE_CYCLE = "Warning: Profiler clears events at the end of each cycle.Only events from the current cycle ..."
REPEATS = "Using `DistributedSampler` with the dataloaders. During `trainer.test()`, it is recommended to ..."
DIRPATH = "The dirpath has changed from 'runs/version_0' to 'runs/version_1', therefore ... won't be reloaded."


def shown(rank: int, *, after_run: bool = False) -> list[str]:
    """The warnings that reach the terminal of ``rank`` in a run or after it, out of one of each kind."""
    with warnings.catch_warnings(record=True) as caught, ExitStack() as run:
        warnings.resetwarnings()
        silence_deprecations(rank)
        run.enter_context(without_repeats())
        if after_run:
            run.close()
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


def test_samples_that_other_strategies_of_the_process_repeat_are_warned_of() -> None:
    assert shown(rank=1, after_run=True) == [REPEATS, "of a loss", "the user's"]


def test_a_run_ignores_repeats_until_it_has_ended(world2: World) -> None:
    def ignored() -> bool:
        return any(getattr(each[1], "pattern", "").startswith("Using `Dist") for each in warnings.filters)  # type: ignore[index]

    class Looks(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            found.append(ignored())

    found: list[bool] = []

    def fit() -> list[bool]:
        found.clear()
        fit_module(Classifier(), make_strategy("ring_ddp"), 2, callbacks=[Looks()], max_epochs=1)
        return [*found, ignored()]

    assert world2.run(fit) == [[True, False]] * 2
