"""Learning rates that are multiplied by AdaScale's gain, as an option of data parallel strategies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import LBFGS
from typing_extensions import override

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.data_parallel.adascale import AdaScale
from lightning_multigpu.engine.data_parallel.agreement import Share
from lightning_multigpu.engine.data_parallel.trained_parameters import TrainedParameters, check_belong
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.base import MultiGPUStrategy
from lightning_multigpu.strategies.pack import CHECKPOINT_KEY

if TYPE_CHECKING:
    import lightning.pytorch as pl


class ScaledRateStrategy(MultiGPUStrategy):
    """Base class of strategies whose ranks average gradients, with AdaScale as an option.

    Subclasses call :meth:`_measure_gain` once the gradients of a batch are averaged.

    Args:
        adascale: True, or a mapping with ``smoothing``; see :class:`.AdaScale`.
        broadcast_buffers: give every rank the buffers of rank 0 in :meth:`_synchronise_buffers`.
        options: options of :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.

    Attributes:
        scale_invariant_steps: the sum of all gains, in steps of one rank's batch.

    Raises:
        ValueError: an option is out of its range; before any process starts, AdaScale cannot be used in the run.
    """

    def __init__(
        self, *, adascale: bool | Mapping[str, Any] = False, broadcast_buffers: bool = True, **options: Any
    ) -> None:
        if not isinstance(adascale, bool | Mapping):
            raise ValueError(
                f"adascale={adascale!r} is neither a bool nor a mapping; pass True, or {{'smoothing': 0.9}}"
            )
        given = {} if isinstance(adascale, bool) else dict(adascale)
        smoothing = given.pop("smoothing", None)
        option_checks.check_options("adascale=", given, ["smoothing"])
        if smoothing is not None and not (isinstance(smoothing, int | float) and 0 <= smoothing < 1):
            raise ValueError(f"smoothing={smoothing!r} of adascale is out of range; pass a number from 0 to below 1")
        super().__init__(**options)
        self._adascale = adascale
        self._smoothing = smoothing
        self._scaled_rate: AdaScale | None = None
        self.scale_invariant_steps = 0.0
        self._broadcast_buffers = broadcast_buffers
        self._buffers_due = True
        self._buffers: MeteredGroup | None = None

    @property
    @override
    def options(self) -> dict[str, Any]:
        return {**super().options, "adascale": self._adascale, "broadcast_buffers": self._broadcast_buffers}

    def _synchronise_buffers(self) -> None:
        if self._buffers is None or not self._broadcast_buffers or self._buffers.size == 1:
            return
        ignored = set(getattr(self._module, "_ddp_params_and_buffers_to_ignore", ()))
        buffers = [buffer for name, buffer in self._module.named_buffers() if name not in ignored]
        self._buffers.broadcast_tensors(buffers, src=self._buffers.first_rank)

    def _share_changes(self, trained: TrainedParameters) -> None:
        """Checks that hooks have frozen, unfrozen and added the same parameters on all ranks; a collective.

        All ranks get the first rank's values of parameters that are trained from now on.

        Raises:
            RuntimeError: on all ranks, if they differ.
        """
        assert self._buffers is not None
        self._compare_changes(trained.differences(), "do not train the same parameters")
        check_belong(self._module, self.optimizers)
        self._buffers.broadcast_tensors([p.detach() for p in trained.added()], src=self._buffers.first_rank)
        self._common.watch(self._in_common())

    def _counts_gradient(self, parameter: Tensor) -> bool:
        """Whether this rank adds the averaged gradient to the norm; one rank does for each parameter."""
        return self.data_parallel_rank == 0

    @override
    def check_before_launch(self, trainer: pl.Trainer) -> None:
        super().check_before_launch(trainer)
        if self._adascale is False or trainer.state.fn != TrainerFn.FITTING:
            return
        given = f"adascale={self._adascale!r}"
        module, callbacks = trainer.lightning_module, trainer.callbacks  # type: ignore[attr-defined]
        if not module.automatic_optimization:
            raise ValueError(
                f"{given}: {type(module).__name__} optimizes manually, and only its step knows which gradients belong "
                "to which update; use automatic optimization, or leave adascale out"
            )
        grows = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
        if self.data_parallel_size * trainer.accumulate_grad_batches == 1 and not grows:
            raise ValueError(
                f"{given} on one rank without accumulation: the variance of gradients needs two batches a step; pass "
                "devices=2 or accumulate_grad_batches=2, or leave adascale out"
            )

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self.scale_invariant_steps = 0.0  # before a schedule reads it; a checkpoint sets it later
        super().setup_optimizers(trainer)
        self._scaled_rate = None
        if self._adascale is False or not self.optimizers:
            return
        (optimizer,) = self.optimizers  # automatic optimization has one
        if isinstance(optimizer, LBFGS):
            raise ValueError(f"adascale={self._adascale!r}: LBFGS evaluates the loss several times a step; use SGD")
        group = self.metered(self._data_group, "adascale")
        self._scaled_rate = AdaScale(
            optimizer,
            lambda sums: group.all_reduce(sums, "sum"),
            rank=group.rank,
            num_ranks=group.size,
            counts=self._counts_gradient,
            smoothing=self._smoothing,
        )

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._scaled_rate is not None:
            self._scaled_rate.begin_backward(self.feed.shares or [Share(1.0, 1.0)] * self.data_parallel_size)

    def _measure_gain(self, *, accumulates: bool) -> None:
        """Finds the gain of the step that follows, unless further batches are accumulated first; a collective."""
        if self._scaled_rate is None:
            return
        self._scaled_rate.end_backward()
        if not accumulates:
            accumulate = self._module.trainer.accumulate_grad_batches
            self._scaled_rate.measure(accumulate=accumulate, loss_scale=self._loss_scaler_scale())

    @override
    def on_optimizer_step_end(self) -> None:
        super().on_optimizer_step_end()
        if self._scaled_rate is None:
            return
        self.scale_invariant_steps = self._scaled_rate.steps
        if not self._module.trainer.barebones:
            self._module.log("adascale/gain", self._scaled_rate.gain, batch_size=1)
            self._module.log("adascale/steps", self._scaled_rate.steps, batch_size=1)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._scaled_rate is not None and "optimizer_states" in checkpoint:
            checkpoint.setdefault(CHECKPOINT_KEY, {})["adascale"] = self._scaled_rate.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._load_gain(checkpoint)

    def _load_gain(self, checkpoint: Mapping[str, Any]) -> None:
        state = checkpoint.get(CHECKPOINT_KEY, {}).get("adascale")
        if self._scaled_rate is not None and state is not None:
            self._scaled_rate.load_state_dict(state)
            self.scale_invariant_steps = self._scaled_rate.steps

    @override
    def teardown(self) -> None:
        if self._scaled_rate is not None:
            self._scaled_rate.close()  # a checkpoint may be saved after the fit
        self._buffers, self._buffers_due = None, True
        super().teardown()
