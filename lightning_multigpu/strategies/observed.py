"""The questions that callbacks ask a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_multigpu.communication.metering.meter import Meter
    from lightning_multigpu.engine.parameter_server.server_statistics import ServerStatistics
    from lightning_multigpu.planning.pipelines.timeline import HeldBytes, StageRecord
    from lightning_multigpu.planning.split_plan import SplitPlan


class ObservedStrategy:
    """The interface of strategies for callbacks, with defaults for strategies whose ranks all do the same.

    Callbacks use nothing else of a strategy of this pack beyond Lightning's own interface. A family overrides the
    defaults that do not fit it. A question for one family only has its default here too.

    Attributes:
        meter: the meter of all bytes between ranks.
        devices_per_rank: the devices that one rank drives; data travels between them too.
        starts_ranks: whether there is a rank for each device; False if one process drives all of them.
    """

    meter: Meter
    devices_per_rank = 1
    starts_ranks = True

    def check_before_launch(self, trainer: pl.Trainer) -> None:
        """Checks the run before any process is started, and calls this method of the callbacks that have it.

        Raises:
            ValueError: the strategy cannot run the module, or a callback refuses the run.
        """
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            check = getattr(callback, "check_before_launch", None)
            if check is not None:
                check(trainer)

    @property
    def options(self) -> dict[str, Any]:
        """The options that this strategy runs with, for reports."""
        return {}

    @property
    def owns_batch(self) -> bool:
        """False if this rank's batch does not count: a copy of another rank's, or a repeated one of weight 0."""
        return True

    @property
    def loss_scale(self) -> float:
        """The factor of this rank's loss that makes the mean over ranks the loss of one device."""
        return 1.0

    def holds(self, parameter: Tensor) -> bool:
        """True if this rank has the values of a parameter of the module, and of its gradient."""
        return True

    def values_of_other_ranks(self) -> dict[int, Tensor]:
        """On rank 0, values of parameters and buffers that only other ranks hold, in host memory; elsewhere none.

        The key is the ``id`` of the placeholder. A collective.
        """
        return {}

    def newest_of_ranks(self, name: str, value: Any) -> list[Any] | None:
        """The values of ranks that train without collectives, each at its own pace; None if there are collectives.

        Rank 0 gets the newest value of each rank that has passed one, in the order of ranks; another rank gets its own
        alone.

        Args:
            name: the same for all values that belong together.
            value: of types that JSON has.
        """
        return None

    def gather_at_end(self, value: Callable[[], Any]) -> list[Any] | None:
        """A list that gets the values of all ranks when training ends; None if collectives still work then.

        Rank 0 gets the values of all ranks, in their order; another rank only its own. All ranks make the same calls.

        Args:
            value: returns this rank's value, of types that JSON has; called after all callbacks' ``on_train_end``.
        """
        return None

    def is_common(self, error: BaseException) -> bool:
        """True if all ranks have raised ``error`` at the same batch, so that collectives still work."""
        return True

    def server_statistics(self) -> ServerStatistics | None:
        """The counts of the parameter servers on rank 0, which asks the servers; None elsewhere and without servers."""
        return None

    def held_bytes(self) -> HeldBytes | None:
        """Bytes of the parameters, gradients and optimizer states that this rank holds at present, as measured.

        Buffers in which gradients travel count as gradients. Optimizer states in the host's memory, or on servers, do
        not count. Of several devices that one rank drives only the first holds bytes between two steps.
        """
        return None

    def split_plan(self) -> SplitPlan | None:
        """The blocks of layers that are split over ranks, and what each sends; None without a tensor split."""
        return None

    def record_stages(self, *, count_activations: bool | None = True) -> None:
        """Records the passes and the memory of this rank's stages of a pipeline in every following fit.

        Args:
            count_activations: in one step, count also the tensors that autograd keeps for backward. This takes
                saved-tensor hooks, under which ``torch.func.grad`` and related functions raise an error. None keeps
                the present setting.
        """

    def stage_record(self) -> StageRecord | None:
        """The newest steps and the memory of this rank's stages of a pipeline; None without a pipeline.

        The record belongs to the running fit: callbacks can read it up to their ``on_train_end``.
        """
        return None
