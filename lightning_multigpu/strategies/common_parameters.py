"""Values that all ranks have in common: shares and compares parameters, buffers, and gradients that user code sets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_multigpu.communication.digest import compared
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.data_parallel.replicas import CommonValues, GivenGradients, check_replicas
from lightning_multigpu.engine.data_parallel.trained_parameters import TrainedParameters, check_belong
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.strategies.steps.hook_detection import reads_gradients

if TYPE_CHECKING:
    from lightning_multigpu.strategies.base import MultiGPUStrategy


class CommonParameters:
    """What the ranks of a strategy have in common during a run. Methods are collectives unless they say otherwise.

    Attributes:
        broadcasts_buffers: the option ``broadcast_buffers`` of families that have it; true for pipelines side by side.
        averages_buffers: whether ranks have buffers of their own, which are averaged before validation and at the end.
        buffers: the ranks that share buffers; None if they do not.
        buffers_due: whether buffers are shared before the next step.
        given: averages gradients that the user's code puts in place; None if it can put none.
        values: values that ranks compare at each batch.
    """

    def __init__(self, strategy: MultiGPUStrategy, check_every: int | None) -> None:
        self._strategy, self.check_every = strategy, check_every
        self._steps_unchecked = 0
        self.broadcasts_buffers = self.averages_buffers = False
        self.reset()

    def reset(self) -> None:
        """Forgets a run; no collective."""
        self.buffers: MeteredGroup | None = None
        self.buffers_due = True
        self.given: GivenGradients | None = None
        self.values = CommonValues()

    def begin(self) -> None:
        """Begins to compare values; no collective."""
        averages = any(step.average is not None for step in self._strategy.owned.steps.values())
        self.values.begin(self._strategy.optimizers, self._parameters(), counts_hooks=averages)

    def _parameters(self) -> dict[str, Tensor]:
        """The parameters of which all ranks hold the same values at all times, by name."""
        strategy = self._strategy
        if strategy.data_parallel_size == 1 or strategy._model_parallel_size > 1 or strategy._ranks_may_differ:
            return {}
        return dict(self.not_ignored(strategy._module.named_parameters()))

    def not_ignored(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Those that the module does not exclude from DDP; no collective."""
        ignored = set(getattr(self._strategy._module, "_ddp_params_and_buffers_to_ignore", ()))
        return [(name, value) for name, value in named if name not in ignored]

    def share_buffers(self) -> None:
        """Gives every rank the buffers of the first one, where ``broadcast_buffers`` says so."""
        if self.buffers is not None and self.broadcasts_buffers and self.buffers.size > 1:
            named = self.not_ignored(self._strategy._module.named_buffers())
            buffers = [buffer for _, buffer in named if not isinstance(buffer, Placeholder)]  # those of other stages
            self.buffers.broadcast_tensors(buffers, src=self.buffers.first_rank)

    def share_values(self, ranks: MeteredGroup) -> None:
        """Gives all ranks the first one's values of parameters and buffers."""
        module = self._strategy._module
        ranks.broadcast_tensors([*module.parameters(), *module.buffers()], src=ranks.first_rank)

    def average_buffers(self) -> None:
        """Averages floating-point buffers (BatchNorm's statistics), where ``averages_buffers`` says so.

        The other buffers become the first rank's.
        """
        strategy, data = self._strategy, self._strategy.collectives.data if self._strategy.groups else None
        if not self.averages_buffers or strategy.failure_watch.failed or data is None or data.size == 1:
            return
        buffers = [buffer.detach() for buffer in strategy._module.buffers()]
        data.broadcast_tensors([b for b in buffers if not b.is_floating_point()], src=data.first_rank)
        for buffer in filter(Tensor.is_floating_point, buffers):
            buffer.copy_(data.all_reduce(buffer, "mean"))

    # Given gradients

    def watch_given_gradients(self) -> None:
        """Makes ``given`` if the user's code can set gradients between backward and the step; no collective."""
        strategy, module, self.given = self._strategy, self._strategy._module, None
        if strategy.data_parallel_size > 1 and (not module.automatic_optimization or reads_gradients(module)):
            data = strategy.metered(strategy.collectives.data.group, "data")
            self.given = GivenGradients(data, lambda: strategy.loss_scale)

    def note_averages(self) -> None:
        """Notes the gradients, which are averages now; no collective."""
        if self.given is not None:
            self.given.note(self._strategy._module.parameters())

    # Checks

    def check_differences(self, numbers: Iterable[float]) -> None:
        """Compares values if their numbers differ between ranks; raises RuntimeError on all ranks if they do too."""
        self.values.check(numbers, self._strategy.gather_objects, self._causes)

    def _causes(self) -> str:
        configs = self._strategy._module.trainer.lr_scheduler_configs
        followed = [f"{type(c.scheduler).__name__} follows {c.monitor!r}; " for c in configs if c.reduce_on_plateau]
        return (
            f"{''.join(followed)}log such a value with sync_dist=True; set learning rates, and register hooks of "
            "optimizers, alike on all ranks. A parameter that the code changes outside of the optimizer, by samples of "
            "its rank: make it a buffer, or compute the change from self.all_gather(...)"
        )

    def stepped(self) -> None:
        """Accepts what an optimizer's step has changed, and checks replicas when it is their turn."""
        self.values.accept()
        self._steps_unchecked += 1
        if self.check_every and self._steps_unchecked >= self.check_every:
            self.check_replicas()

    def check_replicas(self) -> None:
        """Checks that ranks which train the same parameters hold the same values."""
        strategy = self._strategy
        if strategy.replicas_differ or strategy.failure_watch.failed:
            return
        self._steps_unchecked = 0
        with strategy._showing_parts():
            for group, parameters in strategy._held_in_common():
                check_replicas(parameters, strategy.metered(group.group, "replicas"))

    def share_changes(self, trained: TrainedParameters) -> None:
        """Checks that hooks have frozen, unfrozen and added the same parameters on all ranks.

        All ranks get the first rank's values of parameters that are trained from now on.

        Raises:
            RuntimeError: on all ranks, if they differ.
        """
        assert self.buffers is not None
        self.compare_changes(trained.differences(), "do not train the same parameters")
        check_belong(self._strategy._module, self._strategy.optimizers)
        self.buffers.broadcast_tensors([p.detach() for p in trained.added()], src=self.buffers.first_rank)
        self.values.watch(self._parameters())

    def compare_changes(self, changes: dict[str, str], what: str = "have no gradients of the same parameters") -> None:
        """Checks that all ranks have frozen and unfrozen the same parameters.

        Args:
            changes: this rank's changes: the name of a parameter, and "trained" or "frozen".
            what: the difference between ranks, for the message; by default that of gradients nobody averages.

        Raises:
            RuntimeError: on all ranks, if they differ.
        """
        found = compared(changes, self._strategy.gather_objects, what)
        if found is not None:
            raise RuntimeError(f"{found}\nUnfreeze, freeze and add layers on all ranks before the same batch")
