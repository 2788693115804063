"""One decision of all ranks on whether a step with inf or nan in its gradients is skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.optim import Optimizer


class CommonOverflow:
    """Makes the plugin's gradient scaler, if any, skip a step on all ranks or on none, until :meth:`end`.

    Args:
        plugin: the Trainer's precision plugin.
        any_rank: sets a flag (one number, above 0 if this rank's gradients have inf or nan) above 0 if any rank's is,
            in place; a collective.
    """

    def __init__(self, plugin: Precision, any_rank: Callable[[Tensor], object]) -> None:
        self._scaler: Any = getattr(plugin, "scaler", None)
        self._any_rank = any_rank
        if self._scaler is not None:
            self._unscale = self._scaler.unscale_
            vars(self._scaler)["unscale_"] = self._unscale_together

    def end(self) -> None:
        """Gives the scaler its own method back."""
        if self._scaler is not None:
            vars(self._scaler).pop("unscale_", None)

    def _unscale_together(self, optimizer: Optimizer) -> None:
        self._unscale(optimizer)
        found = self._scaler._found_inf_per_device(optimizer)
        if not found:  # this rank has no gradient, and the scaler needs a value, where ranks can exchange it
            device = self._scaler._scale.device
            found[device] = torch.zeros(1, device=device)
        for flag in found.values():
            self._any_rank(flag)
