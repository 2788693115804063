"""The questions that callbacks ask a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_multigpu.communication.metering.meter import Meter
    from lightning_multigpu.engine.parameter_server.server_statistics import ServerStatistics
    from lightning_multigpu.planning.split_plan import SplitPlan
    from lightning_multigpu.planning.timeline import HeldBytes, StageRecord


class ObservedStrategy:
    """The part of a strategy that callbacks see, with the answers of a strategy whose ranks all do the same.

    Callbacks ask nothing else of a strategy of this pack beyond Lightning's own interface. A family overrides what it
    answers differently, and adds here what callbacks ask it alone.

    Attributes:
        meter: the meter of all bytes between ranks.
        devices_per_rank: devices that one rank drives; data travels between them too.
        starts_ranks: whether there is a rank for each device; False if one process drives all of them.
    """

    meter: Meter
    devices_per_rank = 1
    starts_ranks = True

    def check_before_launch(self, trainer: pl.Trainer) -> None:
        """Checks the run before any process is started; for subclasses, and for callbacks that have such a method.

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
        """False if this rank's present batch does not count: a copy of another rank's, or one that only fills a gap."""
        return True

    @property
    def loss_scale(self) -> float:
        """Factor of the loss of this rank's batch, with which the mean over ranks is the loss of one device."""
        return 1.0

    def holds(self, parameter: Tensor) -> bool:
        """True if this rank has the values of a parameter of the module, and of its gradient."""
        return True

    def values_of_other_ranks(self) -> dict[int, Tensor]:
        """On rank 0 the values of the module's parameters and buffers that only other ranks hold, in host memory.

        They are listed by the ``id`` of the tensor in their place. Elsewhere the dictionary is empty. A collective.
        """
        return {}

    def newest_of_ranks(self, name: str, value: Any) -> list[Any] | None:
        """The values of ranks that train without collectives, each at its own pace; None where there are collectives.

        Rank 0 gets the newest value of each rank that has passed one, in the order of ranks; another rank gets its own
        alone.

        Args:
            name: the same for all values that belong together.
            value: what JSON can express.
        """
        return None

    def gather_at_end(self, value: Callable[[], Any]) -> list[Any] | None:
        """A list that gets the values of all ranks when training ends; None where there are collectives after it.

        Rank 0 gets those of all ranks, in their order; another rank its own alone. All ranks call it alike.

        Args:
            value: makes this rank's, of what JSON can express, after the ``on_train_end`` of all callbacks.
        """
        return None

    def server_statistics(self) -> ServerStatistics | None:
        """The counts of the parameter servers on rank 0, which asks the servers; None elsewhere and without servers."""
        return None

    def held_bytes(self) -> HeldBytes | None:
        """Bytes of the parameters, gradients and optimizer states that this rank holds at present, as measured.

        Buffers in which gradients travel count as gradients; optimizer states that are offloaded to the host, or
        on servers, do not count.
        """
        return None

    def split_plan(self) -> SplitPlan | None:
        """The blocks of layers that are split over ranks, and what each of them sends; None without a tensor split."""
        return None

    def record_stages(self, *, count_activations: bool | None = True) -> None:
        """Record the passes and the memory of this rank's stages of a pipeline in every following fit.

        Args:
            count_activations: in one step, count also the tensors that autograd keeps for backward. This takes
                saved-tensor hooks, under which ``torch.func.grad`` and related functions raise an error. None leaves
                this as it was.
        """

    def stage_record(self) -> StageRecord | None:
        """The newest steps and the memory of this rank's stages of a pipeline; None without a pipeline.

        The record belongs to the running fit: callbacks can read it up to their ``on_train_end``.
        """
        return None
