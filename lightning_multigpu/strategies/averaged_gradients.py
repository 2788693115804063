"""The averages of gradients, or of models, over the data axis, for strategies that wrap the module in torch's DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_multigpu._lightning_internals import HOOKS_BEFORE_STEP
from lightning_multigpu.communication.compression import make_compressor
from lightning_multigpu.communication.tensors import alike, apply_flat
from lightning_multigpu.engine.data_parallel.averaging import ModelAverager
from lightning_multigpu.engine.data_parallel.gradient_transport import GradientTransport
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer
from lightning_multigpu.engine.data_parallel.trained_parameters import TrainedParameters, unused_error
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.steps.plugin_methods import PluginMethods

if TYPE_CHECKING:
    from lightning_multigpu.strategies.base import MultiGPUStrategy

_OF_LIGHTNING = ("ddp_comm_state", "ddp_comm_hook")
_OF_TORCH = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
_SWITCHES = (*_OF_TORCH, "broadcast_buffers", "shared_memory")


class AveragedGradients:
    """Averages the gradients of a strategy's ranks while backward computes, or with local SGD their models.

    The base calls it in Lightning's hooks. torch's wrapper fills buckets, and a :class:`.GradientReducer` moves them.
    Without options, and before :meth:`open`, it does nothing: other families move gradients otherwise.

    Args:
        options: those of :class:`RingDDPStrategy`, all or none.
        of_all: the strategy's options that every strategy of the pack has.

    Attributes:
        lightnings_options: options that Lightning's ``DDPStrategy`` takes.
        options: the other options, for reports.

    Raises:
        ValueError: an option is out of its range, or excludes another.
    """

    def __init__(
        self, strategy: MultiGPUStrategy, options: Mapping[str, Any] | None = None, of_all: Mapping[str, Any] = {}
    ) -> None:
        self._strategy, self._given = strategy, options or {}
        self.lightnings_options: dict[str, Any] = {name: self._given.get(name) for name in _OF_LIGHTNING}
        self.options = {name: value for name, value in self._given.items() if name not in _OF_LIGHTNING}
        self.transport = GradientTransport()
        if options:
            _check(options, of_all)
            self.transport = GradientTransport(
                bucket_cap_mb=options["bucket_cap_mb"],
                compressor=None if (asked := options["compression"]) is None else make_compressor(asked),
                shared_memory=options["shared_memory"],
            )
            self.options.update(self.transport.options)
        # During a run:
        self.reducer: GradientReducer | None = None
        self.compressing: GradientReducer | None = None  # of a pipeline's data axis, too
        self._trained: TrainedParameters | None = None
        self._averager: ModelAverager | None = None
        self._methods: PluginMethods | None = None

    @property
    def ranks_may_differ(self) -> bool:
        """Whether ranks hold different values of the same parameters at some time."""
        return self._averager is not None

    @property
    def steps_alone(self) -> bool:
        """Whether ranks step with their own gradients, and average models from time to time."""
        return self._averager is not None

    @property
    def replicas_differ(self) -> bool:
        """Whether ranks hold different values of the same parameters now."""
        return self._averager is not None and self._averager.steps_alone > 0

    @property
    def bucket_bytes(self) -> int:
        """Bytes of buckets beside the gradients."""
        if self._trained is None or self._given["gradient_as_bucket_view"]:
            return 0
        return sum(parameter.nbytes for parameter in self._trained.averaged)

    @property
    def _synchronises(self) -> bool:
        """Whether the present batch ends an accumulation."""
        model = self._strategy.model
        return isinstance(model, DistributedDataParallel) and bool(model.require_backward_grad_sync)

    # Before the launch

    def check_precision(self) -> None:
        """Raises ValueError for options that do not fit the run's precision."""
        plugin, average_every = self._strategy.precision_plugin, self._given.get("average_every", 1)
        if average_every > 1 and getattr(plugin, "scaler", None) is not None:
            raise ValueError(
                f"average_every={average_every} with precision={plugin.precision!r}: ranks that "
                "step alone would each scale their losses differently; use precision='bf16-mixed' or '32-true'"
            )

    # Setting up

    def open(self) -> None:
        """Makes what moves gradients between the ranks of a run; a collective of the world."""
        strategy, hook = self._strategy, self._given["ddp_comm_hook"]
        assert strategy.groups is not None
        strategy.common.broadcasts_buffers = self._given["broadcast_buffers"]
        strategy.common.buffers = strategy.metered(strategy.collectives.data.group, "data")
        self.reducer = self.compressing = self.transport.open(
            strategy.groups,
            strategy.meter,
            ranks_per_host=strategy.num_processes,
            hook=None if hook is None else (self._given["ddp_comm_state"], hook),
            warn=rank_zero_warn,
        )
        if self._given["average_every"] > 1:
            self._averager = ModelAverager(self._given["average_every"], self.reducer.average)

    def wrap(self, model: Module, **options: Any) -> DistributedDataParallel:
        """The module in torch's wrapper, whose buckets this object's reducer moves."""
        strategy, is_hooked = self._strategy, self._given["ddp_comm_hook"] is not None
        assert self.reducer is not None
        bucket_cap_mb = self.transport.bucket_cap_mb_of(strategy._module, self.reducer, is_hooked=is_hooked)
        self._trained = TrainedParameters(strategy._module)
        strategy._pl_static_graph_delay_done = False  # type: ignore[attr-defined]  # of Lightning's DDPStrategy
        with strategy._showing_parts():
            wrapped = DistributedDataParallel(
                model,
                device_ids=None if strategy.root_device.type == "cpu" else [strategy.root_device.index],
                process_group=strategy.collectives.data.group,
                bucket_cap_mb=bucket_cap_mb,
                **{name: self._given[name] for name in _OF_TORCH},
                **options,
            )
            # Done here, where the meter sees it, and never in the middle of validation. Set after construction, in
            # which DDP sends rank 0's buffers: torch 2.13 renamed the flag, and the old argument would leave them as
            # they are.
            wrapped.broadcast_buffers = wrapped.forward_sync_buffers = False
            self.reducer.attach(wrapped)
        return wrapped

    def watch_given_gradients(self) -> None:
        """Has gradients averaged that the user's code puts in place between backward and the step."""
        strategy = self._strategy
        if self.reducer is None or self.ranks_may_differ:
            return  # nothing is averaged, or ranks step with gradients of their own
        strategy.common.watch_given_gradients()
        if (given := strategy.common.given) is None:
            return
        plugin, module = strategy.precision_plugin, strategy._module
        post_backward, hooks_before_step = plugin.post_backward, getattr(plugin, HOOKS_BEFORE_STEP)

        def noted(*args: Any) -> Tensor:
            if self._synchronises:
                strategy.common.note_averages()
            return post_backward(*args)

        def averaged(model: Module, optimizer: Optimizer) -> None:
            hooks_before_step(model, optimizer)
            left_out = {*module.parameters()} - {p for _, p in strategy.common.not_ignored(module.named_parameters())}
            listed = (parameter for group in optimizer.param_groups for parameter in group["params"])
            given.average(parameter for parameter in listed if parameter not in left_out)

        methods: dict[str, Any] = {"post_backward": noted, HOOKS_BEFORE_STEP: averaged}
        self._methods = PluginMethods(plugin, **methods)

    def close(self) -> None:
        """Ends the transfers of a run, and forgets it."""
        if self.reducer is not None:
            self.reducer.close()
        if self._methods is not None:
            self._methods.end()
        self.reducer = self.compressing = self._averager = self._trained = self._methods = None

    # Training

    def follow_changes(self) -> None:
        """Averages gradients of the parameters that are trained from now on; a collective if hooks have changed them.

        torch's wrapper averages only gradients of parameters that were trainable when it was made.
        """
        strategy, trained, reducer = self._strategy, self._trained, self.reducer
        # Local SGD averages all weights, frozen or not.
        if trained is None or self._averager is not None or not trained.has_changed(strategy.optimizers):
            return
        model = strategy.model
        assert reducer is not None
        assert model is not None
        strategy.common.share_changes(trained)
        if isinstance(model, DistributedDataParallel):
            del model.reducer, model.logger  # with them go its buckets
            model = model.module
            reducer.detach()
        if any(parameter.requires_grad for parameter in strategy._module.parameters()):
            strategy.model = self.wrap(model, init_sync=False)
        else:
            strategy.model, self._trained = model, TrainedParameters(strategy._module)

    def begin_step(self) -> None:
        """Called before ``training_step``."""
        if not self._given:
            return
        strategy = self._strategy
        if self._averager is not None:
            assert isinstance(strategy.model, DistributedDataParallel)
            strategy.model.require_backward_grad_sync = False
        if strategy.common.buffers_due:
            strategy.common.share_buffers()
        strategy.common.buffers_due = self._synchronises

    def end_backward(self) -> None:
        """Waits for the averages, of which none may lack; averages parameters unfrozen within the step here."""
        if self.reducer is None:
            return
        is_complete = self.reducer.finish()
        if not self._synchronises:
            return
        assert self._trained is not None
        if not is_complete:
            raise unused_error(self._trained.without_gradient(), "RingDDPStrategy")
        missed = self._trained.missed(self._strategy.optimizers)
        if missed:
            self._strategy.common.compare_changes(dict.fromkeys(missed, "trained"))
            for gradients in alike(parameter.grad for parameter in missed.values() if parameter.grad is not None):
                apply_flat(self.reducer.average, gradients)

    def end_step(self) -> None:
        """Keeps error feedback, and averages models when it is their turn, after an optimizer step."""
        if self.compressing is not None and self.compressing.compressed is not None:
            self.compressing.end_step(self._strategy._loss_scaler_scale())
        if self._averager is not None and self._averager.stepped():
            self.average_model()

    def average_model(self) -> None:
        """Averages the models of ranks that have stepped alone; a collective."""
        strategy = self._strategy
        if self._averager is None or strategy.failure_watch.failed:
            return  # a failed run saves this rank's own weights
        if self._averager.average(strategy._module.parameters(), strategy.optimizers):
            strategy.common.share_buffers()

    def tell_compression(self) -> None:
        """Prints what compression has saved, at the end of training."""
        if self.compressing is not None and self.compressing.compressed is not None:
            rank_zero_info(self.compressing.compressed.summary())


def _check(options: Mapping[str, Any], of_all: Mapping[str, Any]) -> None:
    option_checks.check_bools(**{name: options[name] for name in _SWITCHES})
    if options["bucket_cap_mb"] is not None:
        option_checks.check_number("bucket_cap_mb", options["bucket_cap_mb"])
    average_every = options["average_every"]
    option_checks.check_number("average_every", average_every, whole=True)
    given = [f"{name}={options[name]!r}" for name in ("ddp_comm_hook", "compression") if options[name] is not None]
    if average_every > 1 and given:
        raise ValueError(
            f"average_every={average_every} and {given[0]}: that works on gradients, which do not travel when "
            "models are averaged; leave one of the two out"
        )
    if options["static_graph"] and (steps := of_all.get("verify_steps")):
        raise ValueError(
            f"verify_steps={steps} and static_graph=True: DDP would count the gradients of the comparison among those "
            "of the first step; leave one of the two out"
        )
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: both choose how gradients travel; leave one of the two out")
