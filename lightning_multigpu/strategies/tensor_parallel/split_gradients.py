"""Gradients where ranks hold parts of parameters: clipping, skipped steps, and hooks that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_multigpu._lightning_internals import HOOKS_BEFORE_STEP
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.engine.tensor_split.whole_reads import WholeReads
from lightning_multigpu.strategies.steps.plugin_methods import PluginMethods

if TYPE_CHECKING:
    import lightning.pytorch as pl

_WITH_HOOKS = ("post_backward", HOOKS_BEFORE_STEP)
"""Methods of a precision plugin that call the hooks of a module and of callbacks."""


class SplitGradients:
    """Clips by the norm of all ranks' gradients, and skips a step with inf or nan on all ranks or on none.

    ``on_after_backward`` and ``on_before_optimizer_step`` read whole gradients and parameters, and so does a module's
    ``optimizer_step`` between its closure and the optimizer's step: see :class:`.WholeReads`.

    It replaces methods of the precision plugin, of its gradient scaler and of the module until :meth:`end`.

    Args:
        plugin: the Trainer's precision plugin.
        group: the ranks that hold parts.
        module: the user's module.
    """

    def __init__(self, plugin: Precision, group: TensorGroup, module: pl.LightningModule) -> None:
        self._group = group
        self._module = module
        self._by_hand: ExitStack | None = None
        if is_overridden("optimizer_step", module):
            vars(module)["optimizer_step"] = self._stepping_by_hand(module.optimizer_step)
        self._methods = PluginMethods(
            plugin,
            dict.fromkeys(_WITH_HOOKS, partial(WholeReads, group)),
            owned=lambda held: [p for p in held if group.rank == 0 or split_of(p) is not None],
            reduce_sum=lambda number: group.all_reduce(number.to(module.device), "norm or overflow"),
        )

    def end(self) -> None:
        """Gives the plugin, its scaler and the module their own methods back."""
        vars(self._module).pop("optimizer_step", None)
        self._methods.end()

    def after_backward(self) -> None:
        """Backward has ended: what the module's ``optimizer_step`` reads from here on is whole."""
        if self._by_hand is not None:
            self._by_hand.enter_context(WholeReads(self._group))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Within the block, an optimizer's step, operations are on parts; backward may be a part of the step."""
        if self._by_hand is not None:
            self._by_hand.close()
        by_hand, self._by_hand = self._by_hand, None
        try:
            yield
        finally:
            self._by_hand = by_hand

    def _stepping_by_hand(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def stepping_by_hand(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as self._by_hand:
                try:
                    return method(*args, **kwargs)
                finally:
                    self._by_hand = None

        return stepping_by_hand
