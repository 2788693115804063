"""Detection of hooks that the user's own code overrides: strategies prepare their arguments only if there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

if TYPE_CHECKING:
    import lightning.pytorch as pl

_READ_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
_OURS = __name__.partition(".")[0]


def has_hook(hook: str, module: pl.LightningModule, *, of_lightning: bool = False) -> bool:
    """Whether the module, or a callback of its Trainer that is neither Lightning's nor ours, overrides the hook.

    Lightning's callbacks and ours use only values that all stages have, such as the loss. With ``of_lightning``
    Lightning's count as well.
    """
    if is_overridden(hook, module):
        return True
    callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    libraries = (_OURS,) if of_lightning else (_OURS, "lightning")
    theirs = [each for each in callbacks if type(each).__module__.partition(".")[0] not in libraries]
    return any(is_overridden(hook, callback, Callback) for callback in theirs)


def reads_gradients(module: pl.LightningModule) -> bool:
    """Whether the user's code overrides a hook that may read gradients before the optimizer's step."""
    return any(has_hook(hook, module) for hook in _READ_GRADIENTS)
