"""Every name of Lightning that is not public and that we cannot do without, with the reason."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy


def writes_logs_after_this_batch(trainer: Trainer) -> bool:
    """Whether Lightning writes the step's metrics to the loggers after the training batch that just ended.

    No public property says so. ``trainer.should_stop``, at which Lightning writes as well, is left out on purpose: a
    user may set it on one rank only, and a collective must not depend on that.
    """
    if trainer.fit_loop._should_accumulate() and trainer.lightning_module.automatic_optimization:
        return False
    if trainer.fast_dev_run:
        return True
    interval = trainer.log_every_n_steps
    return interval > 0 and (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % interval == 0


def logger_step(trainer: Trainer) -> int:
    """The step under which Lightning itself logs at this moment, so that all curves share one axis.

    ``trainer.global_step`` is another axis: it is one ahead, and counts each optimizer of a module with several.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def argument_of(strategy: Strategy, name: str) -> Any:
    """The value of a constructor's argument of one of Lightning's strategies, to say in a report what it ran with.

    Lightning's strategies keep their arguments under private names, DDP's further options in a dictionary.

    Raises:
        AttributeError: the strategy does not keep it.
    """
    for place in (name, f"_{name}"):
        if hasattr(strategy, place):
            return getattr(strategy, place)
    kwargs = getattr(strategy, "_ddp_kwargs", {})
    if name in kwargs:
        return kwargs[name]
    raise AttributeError(f"{type(strategy).__name__} does not keep its argument {name!r}")
