"""The base of strategies in which servers step the optimizers, and not the ranks that compute gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu._lightning_internals import plain_optimizer
from lightning_multigpu.engine.parameter_server.host_optimizer import HostOptimizer
from lightning_multigpu.engine.parameter_server.remote_optimizer import RemoteOptimizer
from lightning_multigpu.placement.optimizer_split import Split
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.base import MultiGPUStrategy
from lightning_multigpu.strategies.steps.hook_detection import reads_gradients
from lightning_multigpu.strategies.steps.plugin_methods import PluginMethods

if TYPE_CHECKING:
    import lightning.pytorch as pl

_NOTICED_IMBALANCE = 1.05

Served = HostOptimizer | RemoteOptimizer


class OptimizerServerStrategy(MultiGPUStrategy):
    """Base of the strategies in which servers, not the ranks that compute gradients, step the optimizers.

    Subclasses make the object that steps an optimizer (:meth:`_serve`), and start and end the servers
    (:meth:`_connect`, :meth:`_disconnect`).

    Args:
        optimizer_split: what the servers may divide of the optimizer's work: "elements" of tensors, whole "tensors", or
            "nothing", where one server makes the whole update. By default "elements" for torch's optimizers that work
            element by element, "tensors" for its others, and "nothing" for other classes.
        options: options of :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.
    """

    _is_asynchronous = False
    _state_is_elsewhere = False
    """True if other processes have the optimizers' states even with one rank."""

    def __init__(self, *, optimizer_split: Split | None = None, **options: Any) -> None:
        option_checks.check_options(type(self).__name__, options, type(self).option_names())
        if optimizer_split is not None:
            option_checks.check_choice("optimizer_split", optimizer_split, ("elements", "tensors", "nothing"))
        super().__init__(**options)
        self._split = optimizer_split
        self._served: dict[Optimizer, Served] = {}
        self._methods: PluginMethods | None = None
        self._accumulating = False

    @property
    @override
    def options(self) -> dict[str, Any]:
        return {**super().options, "optimizer_split": self._split}

    @property
    @override
    def _ranks_may_differ(self) -> bool:
        return self._is_asynchronous

    @abstractmethod
    def _connect(self) -> None:
        """Starts the servers and connects to them; a collective."""

    @abstractmethod
    def _serve(self, optimizer: Optimizer) -> Served:
        """Makes the servers step the optimizer; a collective."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Disconnects from the servers and ends them, also after a failure."""

    # Starting and ending

    @property
    @override
    def _owned(self) -> Collection[Optimizer]:
        return self._served

    @override
    def _setup_model(self, model: Module) -> Module:
        return self._begin_alike(model, self.collectives.data)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        if not self._served:  # else the other optimizers are refused
            self._connect()  # not for evaluation; before schedules ask for the loader, which is one for their mode
        super().setup_optimizers(trainer)
        if not self._is_asynchronous:  # else a worker's gradients are its own
            self.common.watch_given_gradients()
        for number, optimizer in enumerate(self.optimizers):
            served = self._served[optimizer] = self._serve(optimizer)
            served.given = self.common.given
            if served.imbalance > _NOTICED_IMBALANCE:
                rank_zero_info(
                    f"optimizer {number} ({type(optimizer).__name__}): one server has {served.imbalance:.2f} times "
                    "its share of the bytes"
                )
        module = self._module
        scaler = getattr(self.precision_plugin, "scaler", None)
        is_read = reads_gradients(module)
        is_changed = is_read or scaler is not None or not module.automatic_optimization
        if self._is_asynchronous:  # a worker's gradients are its own, and complete
            self._set_pushes_early(not is_changed and not trainer.gradient_clip_val)
        elif is_changed:
            # The hooks of the step need averages on every device, which costs a transfer.
            self._methods = PluginMethods(self.precision_plugin, {"post_backward": self._averaged})
        else:
            self._methods = PluginMethods(
                self.precision_plugin, clip_grad_by_norm=self._clip_by_norm, clip_grad_by_value=self._clip_by_value
            )
            self._set_pushes_early(True)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        for served in self._served.values():  # Lightning has moved what the constructors have made
            served.watch_state()

    @override
    def teardown(self) -> None:
        if self._methods is not None:
            self._methods.end()
        with self._keeping_states(self._served):
            for served in self._served.values():
                served.close()
            self._served, self._methods = {}, None
            self._disconnect()
            super().teardown()

    # Training

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within the block gradients are accumulated, and not pushed."""
        self._accumulating = True
        pushes_early = any(served.pushes_early for served in self._served.values())
        self._set_pushes_early(False)
        try:
            yield
        finally:
            self._accumulating = False
            self._set_pushes_early(pushes_early)

    def _set_pushes_early(self, pushes_early: bool) -> None:
        for served in self._served.values():
            served.pushes_early = pushes_early

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._average_buffers()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._average_buffers()

    def _average_buffers(self) -> None:
        """Averages BatchNorm's statistics and other floating-point buffers; the other buffers become rank 0's."""
        if self.groups is None or self.failure_watch.failed or (data := self.collectives.data).size == 1:
            return
        buffers = [buffer.detach() for buffer in self._module.buffers()]
        averaged = [buffer for buffer in buffers if buffer.is_floating_point()]
        data.broadcast_tensors([b for b in buffers if not b.is_floating_point()], src=data.first_rank)
        for buffer in averaged:
            buffer.copy_(data.all_reduce(buffer, "mean"))

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within the block, in which hooks read gradients, they are averages."""
        if not self._accumulating:
            for served in self._served.values():
                served.average_gradients()
            self.common.note_averages()
        yield

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self._served[plain_optimizer(optimizer)].clip_norm = float(clip_val)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self._served[plain_optimizer(optimizer)].clip_value = float(clip_val)

    # Checkpoints

    @property
    @override
    def _needs_others(self) -> bool:
        return self.world_size > 1 or self._state_is_elsewhere

    @override
    def _whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        served = self._served.get(optimizer)
        return super()._whole_state(optimizer) if served is None else served.state_dict()

    @override
    def _own_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._served[optimizer].load_state_dict(state)
