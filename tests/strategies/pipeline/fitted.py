"""A fit of one module, on one device or in a pipeline of ranks that already run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L

from lightning_multigpu import PipelineStrategy
from tests.strategies.tasks import Case, make_trainer, state, train_loader

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
