"""Methods of the Trainer's precision plugin that a strategy replaces during a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.placement.norms import CommonOverflow, ReduceSum, clip_by_norm


class PluginMethods:
    """Shows gradients to hooks, clips by the norm of all ranks' gradients, and skips a step on all ranks or on none.

    It replaces methods of the plugin and of its gradient scaler until :meth:`end`.

    Args:
        hooks: by the name of a method of the plugin that calls hooks, what makes the context in which it runs.
        owned: those of the parameters that this rank holds which it owns; with ``reduce_sum``.
        reduce_sum: sums over the ranks; None where each rank steps, or does not step, by itself.
        methods: functions in the place of other methods of the plugin.
    """

    def __init__(
        self,
        plugin: Precision,
        hooks: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
        *,
        owned: Callable[[Sequence[Tensor]], Iterable[Tensor]] = list,
        reduce_sum: ReduceSum | None = None,
        **methods: Callable[..., Any],
    ) -> None:
        self._plugin = plugin
        self._methods = {**methods, **{n: _within(context, getattr(plugin, n)) for n, context in (hooks or {}).items()}}
        self._overflow: CommonOverflow | None = None
        if reduce_sum is not None:
            self._methods["clip_grad_by_norm"] = partial(_clip, owned, reduce_sum)
            scaler = getattr(plugin, "scaler", None)
            self._overflow = None if scaler is None else CommonOverflow(scaler, reduce_sum)
        vars(plugin).update(self._methods)

    def end(self) -> None:
        """Gives the plugin and its gradient scaler their own methods back."""
        for name in self._methods:
            vars(self._plugin).pop(name, None)
        if self._overflow is not None:
            self._overflow.end()


def _within(context: Callable[[], AbstractContextManager[Any]], method: Callable[..., Any]) -> Callable[..., Any]:
    def within(*args: Any) -> Any:
        with context():
            return method(*args)

    return within


def _clip(owned: Callable[..., Any], reduce_sum: ReduceSum, optimizer: Optimizer, clip_val: float) -> None:
    with torch._C.DisableTorchFunction():  # it looks at parts
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held = [parameter for parameter in parameters if not isinstance(parameter, Placeholder)]
        clip_by_norm(owned(held), held, clip_val, reduce_sum)
