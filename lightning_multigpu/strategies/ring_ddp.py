"""The strategy of data parallel training with a ring all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu._lightning_internals import HOOKS_BEFORE_STEP
from lightning_multigpu.communication.compression import make_compressor
from lightning_multigpu.engine.data_parallel.averaging import ModelAverager, average_gradients
from lightning_multigpu.engine.data_parallel.gradient_transport import GradientTransport
from lightning_multigpu.engine.data_parallel.module_buffers import ModuleBuffers
from lightning_multigpu.engine.data_parallel.outer_optimizer import OuterOptimizer, average_changes
from lightning_multigpu.engine.data_parallel.trained_parameters import TrainedParameters, not_ignored, unused_error
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.base import MultiGPUStrategy
from lightning_multigpu.strategies.steps.plugin_methods import PluginMethods

if TYPE_CHECKING:
    import lightning.pytorch as pl

_OF_LIGHTNING = ("ddp_comm_state", "ddp_comm_hook")
_OF_TORCH = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")


class RingDDPStrategy(MultiGPUStrategy, DDPStrategy):
    """Data parallel training: each rank computes the gradients of its share of the batch, and a ring averages them.

    The all-reduce of the gradients runs while backward still computes. On CPU tensors the ring is this pack's own
    (:mod:`lightning_multigpu.communication.ring`); on GPUs NCCL moves the gradients. In a ring each rank sends 2(N-1)/N
    times the size of the gradients per optimizer step. Options of Lightning's ``DDPStrategy`` keep their names and
    meaning; communication hooks work on CPU tensors too.

    Args:
        bucket_cap_mb: size in MiB of the buckets in which gradients travel. Smaller buckets start earlier, larger ones
            cost less each. By default 4 between hosts and 25 on one host, more for models with many parameters, and
            DDP's own size where NCCL or a communication hook moves the gradients.
        find_unused_parameters: in every step, find the parameters on which the loss does not depend.
        gradient_as_bucket_view: make ``.grad`` a view of the bucket, which saves a copy of the gradients. A ``.grad``
            that your code keeps from one step to the next is then overwritten.
        static_graph: promise that every step uses the same parameters in the same order.
        broadcast_buffers: give every rank the buffers of rank 0 (BatchNorm's statistics) before each synchronised
            step and before validation; with ``average_every``, average them with the weights.
        average_every: with k > 1, ranks take k optimizer steps with their own gradients, then average weights and
            optimizer state (local SGD); they also average before validation, before a checkpoint and at the end. This
            is another algorithm than that of one device, with 1/k of the traffic. 1 averages gradients in every step.
        outer_optimizer: with ``average_every``, step with the averaged change of the weights as a gradient (DiLoCo):
            "nesterov" takes SGD with Nesterov's momentum, lr 0.7 and momentum 0.9; or a mapping,
            ``{"lr": 0.7, "momentum": 0.9}``. Ranks then keep the states of their own optimizers between checkpoints.
        compression: compress the gradients, or with ``outer_optimizer`` the changes, between hosts: "bf16" or "int8".
        shared_memory: let ranks of one host reduce gradients through shared memory. The buckets lie in ``/dev/shm``;
            where that is too small for the gradients of a host's ranks, gradients are copied instead, with a warning.
            False takes sockets, between which ``compression`` compresses on one host too.
        ddp_comm_state: the state that is passed to ``ddp_comm_hook``.
        ddp_comm_hook: a communication hook that replaces the ring, on CPUs as well.
        options: options of :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.

    Raises:
        ValueError: an option is out of its range; ``verify_steps`` with ``static_graph``.
    """

    name_with_spawn: ClassVar[str | None] = "ring_ddp_spawn"

    def __init__(
        self,
        *,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        average_every: int = 1,
        outer_optimizer: str | dict[str, float] | None = None,
        compression: str | None = None,
        shared_memory: bool = True,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        self._given = given = option_checks.own_options(RingDDPStrategy, locals())
        _check(given, options)
        super().__init__(**{name: given[name] for name in _OF_LIGHTNING}, **options)
        self._options |= {name: value for name, value in given.items() if name not in _OF_LIGHTNING}
        self._transport = GradientTransport(
            bucket_cap_mb=bucket_cap_mb,
            compressor=None if compression is None else make_compressor(compression),
            shared_memory=shared_memory,
        )
        self._kept: dict[str, Any] = {}  # the further state of a fit that has ended

    @override
    def _forget_run(self) -> None:
        super()._forget_run()
        self._models: ModelAverager | None = None  # with average_every
        self._outer = None

    @property
    @override
    def loss_scale(self) -> float:
        return 1.0 if self._models is not None and self.feed.counts else super().loss_scale

    @property
    @override
    def _ranks_may_differ(self) -> bool:
        return self._models is not None

    @property
    @override
    def replicas_differ(self) -> bool:
        return self._models is not None and self._models.steps_alone > 0

    @property
    def _spare_bytes(self) -> int:  # type: ignore[override]
        if self._trained is None or self._given["gradient_as_bucket_view"]:
            return 0
        return sum(parameter.nbytes for parameter in self._trained.averaged)

    # Setting up

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        option_checks.check_scales(self.precision_plugin, self._given["average_every"])

    @override
    def _setup_model(self, model: Module) -> Any:
        is_plain = self._given["ddp_comm_hook"] is None and self._given["outer_optimizer"] is None
        if self.data_parallel_size == 1 and is_plain:
            return model  # there is nothing to average
        self._open()
        return self._wrapped(model)

    def _open(self) -> None:
        """Makes what moves gradients between the ranks of a run; a collective of the world."""
        given = self._given
        if given["broadcast_buffers"]:
            self.buffers = ModuleBuffers(self._module, self._data_axis, averages=given["average_every"] > 1)
        self.reducer = self._transport.open(
            self.groups,
            self.meter,
            ranks_per_host=self.num_processes,
            hook=None if given["ddp_comm_hook"] is None else (given["ddp_comm_state"], given["ddp_comm_hook"]),
        )
        self._kept = {}
        if (outer := given["outer_optimizer"]) is not None:
            average = partial(average_changes, self.reducer)
            self._outer = OuterOptimizer(average, **({} if isinstance(outer, str) else outer))
        if given["average_every"] > 1:
            self._models = ModelAverager(given["average_every"], self.reducer.average, self._outer)

    def _wrapped(self, model: Module, **options: Any) -> DistributedDataParallel:
        """The module in torch's wrapper, which fills buckets with gradients; the reducer moves them."""
        assert self.reducer is not None
        is_hooked = self._given["ddp_comm_hook"] is not None
        bucket_cap_mb = self._transport.bucket_cap_mb_of(self._module, self.reducer, is_hooked=is_hooked)
        self._trained = TrainedParameters(self._module)
        self._pl_static_graph_delay_done = False  # of Lightning's DDPStrategy
        with self._showing_parts():
            wrapped = DistributedDataParallel(
                model,
                device_ids=None if self.root_device.type == "cpu" else [self.root_device.index],
                process_group=self.collectives.data.group,
                bucket_cap_mb=bucket_cap_mb,
                **{name: self._given[name] for name in _OF_TORCH},
                **options,
            )
            # Done by ModuleBuffers, where the meter sees it, and never in the middle of validation. Set after
            # construction, in which DDP sends rank 0's buffers: torch 2.13 renamed the flag, and the old argument would
            # leave them as they are.
            wrapped.broadcast_buffers = wrapped.forward_sync_buffers = False
            self.reducer.attach(wrapped)
        return wrapped

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.reducer is None or self._models is not None or not self._watch_given_gradients():
            return  # nothing is averaged, ranks step with gradients of their own, or user code sets none
        plugin, module = self.precision_plugin, self._module
        post_backward, hooks_before_step = plugin.post_backward, getattr(plugin, HOOKS_BEFORE_STEP)

        def noted(*args: Any) -> Tensor:
            if self._synchronises:
                self._note_averages()
            return post_backward(*args)

        def averaged(model: Module, optimizer: Optimizer) -> None:
            assert self.given is not None
            hooks_before_step(model, optimizer)
            ignored = {*module.parameters()} - {p for _, p in not_ignored(module, module.named_parameters())}
            listed = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self.given.average(parameter for parameter in listed if parameter not in ignored)

        methods: dict[str, Any] = {"post_backward": noted, HOOKS_BEFORE_STEP: averaged}
        self._undo.callback(PluginMethods(plugin, **methods).end)

    # Training

    @property
    def _synchronises(self) -> bool:
        """Whether the present batch ends an accumulation."""
        return isinstance(self.model, DistributedDataParallel) and bool(self.model.require_backward_grad_sync)

    @override
    def _follow_changes(self) -> None:
        """Wraps the module anew: torch's wrapper averages gradients of what was trainable when it was made."""
        model = self.model
        assert model is not None
        assert self.reducer is not None
        if isinstance(model, DistributedDataParallel):
            del model.reducer, model.logger  # with them go its buckets
            model = model.module
            self.reducer.detach()
        if any(parameter.requires_grad for parameter in self._module.parameters()):
            self.model = self._wrapped(model, init_sync=False)
        else:
            self.model, self._trained = model, TrainedParameters(self._module)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._models is not None:
            assert isinstance(self.model, DistributedDataParallel)
            self.model.require_backward_grad_sync = False
            self._models.begin(self._module.parameters())
        return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Waits for the averages, of which none may lack; averages parameters unfrozen within the step here."""
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self.reducer is None:
            return loss
        is_complete = self.reducer.finish()
        if self._synchronises:
            assert self._trained is not None
            if not is_complete:
                raise unused_error(self._trained.without_gradient(), "RingDDPStrategy")
            if missed := self._trained.missed(self.optimizers, self.gather_objects):
                average_gradients(missed, self._data_axis)
        return loss

    @override
    def on_optimizer_step_end(self) -> None:
        if self._models is None:
            super().on_optimizer_step_end()
        elif self._models.stepped():
            self._settle_values()

    @override
    def _settle_values(self) -> None:
        """Averages the models of ranks that have stepped alone; a collective."""
        if self._models is None or self.failure_watch.failed:
            return  # a failed run saves this rank's own weights
        if self._models.average(self._module.parameters(), self.optimizers) and self.buffers is not None:
            self.buffers.settle()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._outer is not None and self._models is not None and not self.failure_watch.failed:
            self._models.average_states(self.optimizers)  # a checkpoint may be saved after the fit
            self._kept = self._further_state()

    # Checkpoints: their weights are those of an average, see _settle_values

    @override
    def _whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._models is not None and not self.failure_watch.failed:
            self._models.average_states(self.optimizers)
        return super()._whole_state(optimizer)

    @override
    def _further_state(self) -> dict[str, Any]:
        return self._kept if self._outer is None else super()._further_state()


def _check(options: Mapping[str, Any], of_all: Mapping[str, Any]) -> None:
    switches = (*_OF_TORCH, "broadcast_buffers", "shared_memory")
    option_checks.check_bools(**{name: options[name] for name in switches})
    if options["bucket_cap_mb"] is not None:
        option_checks.check_number("bucket_cap_mb", options["bucket_cap_mb"])
    of_gradients = {name: options[name] for name in ("ddp_comm_hook", "compression") if options[name] is not None}
    option_checks.check_averages(options["average_every"], options["outer_optimizer"], **of_gradients)
    if options["static_graph"] and (steps := of_all.get("verify_steps")):
        raise ValueError(
            f"verify_steps={steps} and static_graph=True: DDP would count the gradients of the comparison among those "
            "of the first step; leave one of the two out"
        )
    if len(of_gradients) > 1:
        given = " and ".join(f"{name}={value!r}" for name, value in of_gradients.items())
        raise ValueError(f"{given}: both choose how gradients travel; leave one of the two out")
