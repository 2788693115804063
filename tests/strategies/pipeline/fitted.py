"""What tests of pipelines share: fits of a module, what they give, and training by hand in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.micro_batches import num_micro_batches_of, split_batch
from lightning_multigpu.engine.step_state import seed_of, set_random_state
from tests.strategies.tasks import Case, assert_same_weights, make_trainer, state, train_loader

ONE_EPOCH = Case(max_epochs=1)


def fitted(
    make: Callable[[], L.LightningModule],
    ranks: int = 2,
    *,
    case: Case = ONE_EPOCH,
    callbacks: list[Any] | None = None,
    collate_fn: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """The weights, the steps, and what the module has noted in ``noted``; ``options`` are the pipeline's."""
    module = make()
    strategy = PipelineStrategy(**options) if ranks > 1 else "auto"
    trainer = make_trainer(case, strategy, ranks, callbacks=callbacks)
    trainer.fit(module, train_loader(case, trainer, collate_fn=collate_fn))
    return {"weights": state(module), "steps": trainer.global_step, "noted": getattr(module, "noted", None)}


def outcome(module: Any, trainer: L.Trainer) -> dict[str, Any]:
    """The weights, the ``losses`` that a module has noted, and the logged values."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": state(module), "losses": module.losses, "metrics": metrics}


def assert_same_outcomes(results: list[Any], reference: Any, *, draws_in_validation: bool = False) -> None:
    """With ``draws_in_validation``, whose numbers are not those of one device, its values are the same on all ranks."""
    for result in results:
        assert_same_weights(result, reference)
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-9)
        assert result["metrics"].keys() == reference["metrics"].keys()
        for name, value in reference["metrics"].items():
            drawn = draws_in_validation and name.startswith("val")
            expected = results[0]["metrics"][name] if drawn else pytest.approx(value, rel=1e-6)
            assert result["metrics"][name] == expected, name


def loss_by_hand(module: Any, batch: dict[str, Tensor], batch_idx: int, layers: Iterable[nn.Module], seed: int) -> Any:
    """The loss of a batch on one device, in four micro-batches with the random numbers that they have in a pipeline."""
    loss = torch.zeros(())
    for micro_batch, part in enumerate(split_batch(batch, num_micro_batches_of(batch, 4))):
        place = (seed_of(seed, 0), 0, module.current_epoch, batch_idx, micro_batch)
        handles = [
            layer.register_forward_pre_hook(lambda *_, i=i, p=place: set_random_state(seed_of(*p, i), module.device))
            for i, layer in enumerate(layers, start=1)
        ]
        set_random_state(seed_of(*place, 0), module.device)
        loss = loss + module.loss(part) * len(part["tokens"]) / len(batch["tokens"])
        for handle in handles:
            handle.remove()
    return loss
