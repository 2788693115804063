"""What tests of pipelines share: fits of a module, and what they give."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest

from lightning_multigpu import PipelineStrategy
from tests.strategies.tasks import Case, assert_same_weights, make_trainer, state, train_loader
from tests.world import World

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


def assert_fits_alike(world: World, make: Callable[[], L.LightningModule], **options: Any) -> None:
    """:func:`fitted` on the ranks of the world gives the weights of one device."""
    shared = {name: value for name, value in options.items() if name in ("case", "callbacks", "collate_fn")}
    reference = fitted(make, 1, **shared)
    for result in world.run(fitted, make, world.num_ranks, **options):
        assert_same_weights(result, reference)


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
