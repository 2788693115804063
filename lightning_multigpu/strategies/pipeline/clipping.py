"""Clipping and overflow in a pipeline: by the gradients of all stages, which hooks around the step see, too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_multigpu._lightning_internals import HOOKS_BEFORE_STEP
from lightning_multigpu.engine.pipeline.stages.gradients import StageSums, remote_gradients
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.strategies.pipeline.split_model import SplitModel
from lightning_multigpu.strategies.steps.hook_detection import has_hook
from lightning_multigpu.strategies.steps.plugin_methods import PluginMethods


class StageClipping:
    """Clips by the norm of all stages' gradients, and skips a step with inf or nan on all stages or on none.

    It replaces methods of the precision plugin and of its gradient scaler until :meth:`end`. Until then it also
    silences Lightning's advice to log with ``sync_dist=True``: the stages of a pipeline log the same values anyway.
    """

    def __init__(self, plugin: Precision, model: SplitModel, tensor: TensorGroup | None = None) -> None:
        self._module = model.module
        self._ownership = model.ownership
        self._tensor = tensor  # the ranks that split the layers of this stage
        self.sums = StageSums(model.group, tensor)
        hooks = partial(self.gradients_for, "on_before_optimizer_step", "configure_gradient_clipping")
        self._methods = PluginMethods(plugin, {HOOKS_BEFORE_STEP: hooks}, owned=self._owned, reduce_sum=self.sums.sum)
        warnings.filterwarnings("ignore", "It is recommended to use `self.log")
        self._filter: Any = warnings.filters[0]
        self._shown = ExitStack()
        self._is_stepping = False

    def end(self) -> None:
        """Gives the plugin and its scaler their own methods back."""
        self._methods.end()
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]

    @contextmanager
    def gradients_for(self, *hooks: str) -> Iterator[None]:
        """Within the block the gradients are those of one device, if the user's code has one of the hooks.

        Parameters of other stages have gradients too, and split ones are whole: see :class:`.RemoteGradient` and
        :class:`.SplitParameter`.
        """
        if not any(has_hook(hook, self._module) for hook in hooks):
            yield
            return
        remote = remote_gradients(self._ownership, self.sums)
        with remote, nullcontext() if self._tensor is None else self._tensor.showing(parts=False):
            yield

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """The block in which an optimizer steps."""
        self.hide_gradients()
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def show_gradients_until_step(self) -> None:
        """Shows all gradients to an ``optimizer_step`` of the module that calls the closure itself, and may clip."""
        if not self._is_stepping:
            self._shown.enter_context(self.gradients_for("optimizer_step"))

    def hide_gradients(self) -> None:
        """Ends :meth:`show_gradients_until_step`, if the step or the batch has ended without :meth:`stepping`."""
        self._shown.close()

    def _owned(self, held: Sequence[Tensor]) -> list[Tensor]:
        counted = {id(parameter) for parameter in self._ownership.counted()}
        counts_whole = self._tensor is None or self._tensor.rank == 0
        return [p for p in held if id(p) in counted and (counts_whole or split_of(p) is not None)]
