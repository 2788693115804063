"""The optimizers of a fit whose steps their parameters' owners make: other ranks, the host, or servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_multigpu._lightning_internals import plain_optimizer
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.data_parallel.averaging import GivenGradients, average_gradients
from lightning_multigpu.placement.owned_step import OwnedStep, Transport, check_apart
from lightning_multigpu.strategies.steps.hook_detection import reads_gradients
from lightning_multigpu.strategies.steps.plugin_methods import PluginMethods

if TYPE_CHECKING:
    import lightning.pytorch as pl


class OwnedOptimizers:
    """The optimizers of a fit with owners, and their steps; none in families whose ranks all step the same."""

    def __init__(self) -> None:
        self.steps: dict[Optimizer, OwnedStep[Any]] = {}
        self.methods: PluginMethods | None = None  # of the precision plugin, that are replaced until the end
        self._accumulates = False
        self._note_averages: Callable[[], object] | None = None

    @property
    def transports(self) -> list[Any]:
        """Those of the steps."""
        return [step.transport for step in self.steps.values()]

    # Beginning and ending

    def begin(
        self,
        optimizers: Sequence[Optimizer],
        transport: Callable[[Optimizer], Transport],
        given: GivenGradients | None,
    ) -> None:
        """Replaces the steps of optimizers; a collective. ``given`` averages gradients that user code has set."""
        check_apart(p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        for optimizer in optimizers:
            step = self.steps[optimizer] = OwnedStep(optimizer, transport(optimizer))
            step.average_given = None if given is None else given.average
            step.place_new()

    def clip_in_steps(
        self,
        module: pl.LightningModule,
        plugin: Precision,
        data: MeteredGroup,
        note_averages: Callable[[], object],
        *,
        is_asynchronous: bool = False,
    ) -> None:
        """Has owners clip, and gradients pushed early, unless code reads gradients: that code gets averages.

        Args:
            data: the ranks over which gradients are averaged.
            note_averages: called when all gradients are averages, in a step whose hooks read them.
            is_asynchronous: a worker's gradients are its own, and complete.
        """
        self._note_averages = note_averages
        for step in () if is_asynchronous else self.steps.values():
            step.average = partial(average_gradients, group=data)
        is_read = reads_gradients(module) or not module.automatic_optimization
        is_changed = is_read or getattr(plugin, "scaler", None) is not None
        if is_asynchronous:
            self._push_early(not is_changed and not module.trainer.gradient_clip_val)
        elif is_changed:
            # The hooks of the step need averages on every device, which costs a transfer.
            self.methods = PluginMethods(plugin, {"post_backward": self._averaged})
        else:
            self.methods = PluginMethods(
                plugin, clip_grad_by_norm=self._clip_by_norm, clip_grad_by_value=self._clip_by_value
            )
            self._push_early(True)

    def watch(self) -> None:
        """Follows from now on what user code does to the states; Lightning has moved what constructors have made."""
        for step in self.steps.values():
            step.watch_state()

    def end(self) -> None:
        """Gives the optimizers and the precision plugin their own methods back."""
        if self.methods is not None:
            self.methods.end()
        for step in self.steps.values():
            step.close()
        self.steps, self.methods, self._note_averages = {}, None, None

    # Training

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within the block gradients are accumulated, and not pushed."""
        self._accumulates = True
        pushes_early = any(transport.pushes_early for transport in self.transports)
        self._push_early(False)
        try:
            yield
        finally:
            self._accumulates = False
            self._push_early(pushes_early)

    def _push_early(self, pushes_early: bool) -> None:
        for transport in self.transports:
            transport.pushes_early = pushes_early

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within the block, in which hooks read gradients, they are averages."""
        if not self._accumulates:
            for step in self.steps.values():
                step.average_gradients()
            if self._note_averages is not None:
                self._note_averages()
        yield

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.steps[plain_optimizer(optimizer)].clip_norm = float(clip_val)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self.steps[plain_optimizer(optimizer)].clip_value = float(clip_val)
