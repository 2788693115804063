"""The strategy of data parallel training whose gradients and optimizer states are sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu.communication.owner_parts import OwnerParts
from lightning_multigpu.communication.point_to_point import PointToPointGroup
from lightning_multigpu.engine.data_parallel.gradient_transport import GradientTransport
from lightning_multigpu.engine.data_parallel.module_buffers import ModuleBuffers
from lightning_multigpu.engine.data_parallel.trained_parameters import TrainedParameters
from lightning_multigpu.engine.remote_values import RemoteValues
from lightning_multigpu.engine.sharded.sharded_gradients import ShardedGradients
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.base import MultiGPUStrategy
from lightning_multigpu.strategies.steps.plugin_methods import PluginMethods

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_multigpu.engine.sharded.shard_transport import ShardTransport


class ShardedStrategy(MultiGPUStrategy):
    """Data parallel training whose gradients and optimizer states are sharded over the ranks.

    Each rank computes the gradients of its share of the batch. Every parameter belongs to one rank, its owner: the
    gradients travel to the owner while backward still computes. The owner keeps the optimizer's state, updates the
    parameter, and sends the new value to all ranks. So a rank holds all parameters, and about 1/N of the gradients and
    of the optimizer's states. Weights are those of one device at the same global batch. Your optimizers, of any class,
    stay as they are; those that need all parameters at once (LBFGS) are refused.

    After backward ``parameter.grad`` is None on the ranks that do not own the parameter. In manual optimization, and if
    hooks of the module or of your callbacks may read gradients (``on_after_backward``, ``on_before_optimizer_step``,
    ``configure_gradient_clipping``, ``optimizer_step``), every rank gets all gradients: this takes the memory of all
    gradients, and as many bytes of traffic again.

    Args:
        bucket_cap_mb: gradients travel together that have about so many MiB for each owner, and parameters eight times
            as many; 0 sends each one alone.
        find_unused_parameters: allow losses that depend on different parameters on each rank, or on some parameters
            only. Gradients then travel after backward, not during it. By default True in manual optimization only.
        broadcast_buffers: give every rank the buffers of rank 0 (BatchNorm's statistics) before each synchronised
            step and before validation.
        options: options of :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.

    Raises:
        ModuleNotFoundError: FairScale is not installed.
        ValueError: an option is out of its range; before the first step, an optimizer cannot be sharded.
    """

    name_with_spawn: ClassVar[str | None] = "ddp_sharded_spawn"
    _maps_checkpoints = True

    def __init__(
        self,
        *,
        bucket_cap_mb: float = 1.0,
        find_unused_parameters: bool | None = None,
        broadcast_buffers: bool = True,
        **options: Any,
    ) -> None:
        if find_spec("fairscale") is None:
            raise ModuleNotFoundError(
                "ddp_sharded needs FairScale: pip install setuptools wheel && "
                "pip install --no-build-isolation fairscale==0.4.13"
            )
        option_checks.check_bools(
            find_unused_parameters=False if find_unused_parameters is None else find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
        )
        option_checks.check_number("bucket_cap_mb", bucket_cap_mb, least=0)
        super().__init__(**options)
        self._given = option_checks.own_options(ShardedStrategy, locals())
        self._options |= self._given
        self._bucket_bytes = int(bucket_cap_mb * 2**20)
        # During a run:
        self._gradients: ShardedGradients | None = None
        self._missed: list[Parameter] = []
        self._in_parts: list[Optimizer] = []  # of an earlier run that was interrupted, with this rank's states

    # Setting up

    @override
    def setup_environment(self) -> None:
        # Before the ranks join: a default argument of FairScale keeps the world's group of the time of its import.
        import_module("lightning_multigpu.engine.sharded.shard_transport")
        super().setup_environment()

    @override
    def _setup_model(self, model: Module) -> Module:
        self._group = self.metered(self.collectives.data.group, "shards")
        reducer = GradientTransport().open(self.groups, self.meter, ranks_per_host=self.num_processes, hook=None)
        self._parts = OwnerParts(self._group, reducer.all_reduce)
        self._undo.callback(self._parts.close)
        if self._given["broadcast_buffers"]:
            self.buffers = ModuleBuffers(self._module, self._data_axis)
        return self._begin_alike(model, self._data_axis)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self.stream_saves(trainer, self._undo)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        self._in_parts.clear()
        self._check_optimizers()
        self._watch_given_gradients()
        self.owned.begin(self.optimizers, self._transport, self.given)
        self._wrap()
        group, owns = self._group, [transport.owns for transport in self.owned.transports]
        self.owned.methods = PluginMethods(
            self.precision_plugin,
            {"post_backward": self._averaged},
            owned=lambda held: [parameter for parameter in held if any(each(parameter) for each in owns)],
            reduce_sum=lambda number: group.all_reduce(number, "sum"),
        )

    def _transport(self, optimizer: Optimizer) -> ShardTransport:
        from lightning_multigpu.engine.sharded.shard_transport import ShardTransport

        return ShardTransport(optimizer, self._group, self._parts, self._bucket_bytes)

    def _check_optimizers(self) -> None:
        scales = getattr(self.precision_plugin, "scaler", None) is not None
        numbers: dict[Tensor, int] = {}
        for number, optimizer in enumerate(self.optimizers):
            called = f"optimizer {number} ({type(optimizer).__name__})"
            if scales and getattr(optimizer, "_step_supports_amp_scaling", False):
                raise ValueError(
                    f"{called} looks for inf and nan within its own step, on each rank alone; pass fused=False with "
                    f"precision={self.precision_plugin.precision!r}"
                )
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if numbers.setdefault(parameter, number) != number:
                        raise ValueError(
                            f"{called} and optimizer {numbers[parameter]} both have a parameter of shape "
                            f"{tuple(parameter.shape)}, which would belong to two ranks; put each into one optimizer"
                        )

    def _wrap(self) -> None:
        """Averages the gradients of the parameters that are trained from now on."""
        module = self._module
        if self._gradients is not None:
            self._gradients.close()
        self._trained = TrainedParameters(module)
        find_unused = self._given["find_unused_parameters"]
        self._gradients = ShardedGradients(
            module,
            {p: owner for transport in self.owned.transports for p, owner in transport.shards.owners.items()},
            self._group,
            self._parts,
            bucket_bytes=self._bucket_bytes,
            shows_all=self.given is not None,
            find_unused=not module.automatic_optimization if find_unused is None else find_unused,
        )

    @override
    def teardown(self) -> None:
        with self._keeping_states(self._owned) as has_kept:
            if self._owned and not self.failure_watch.failed:
                self._in_parts = [] if has_kept or self.world_size == 1 else [*self._owned]
            self._undo.close()
            self.owned.end()
            if self._gradients is not None:
                self._gradients.close()
            self._gradients = None
            self._missed.clear()
            super().teardown()

    # Training

    @override
    def _follow_changes(self) -> None:
        for step in self.owned.steps.values():
            step.place_new()
        self._wrap()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within the block gradients are only accumulated."""
        with super().block_backward_sync(), nullcontext() if self._gradients is None else self._gradients.no_sync():
            yield

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._gradients is not None:
            self._gradients.begin()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within the block, in which hooks read gradients, they are averages."""
        if self._gradients is not None:
            self._gradients.finish()
            if not self._gradients.accumulates:
                self._average_missed()
                self._note_averages()
        yield

    def _average_missed(self) -> None:
        """Averages gradients of parameters that were unfrozen within the step, or frozen after accumulation."""
        assert self._trained is not None
        missed = self._trained.missed(self.optimizers, self.gather_objects)
        for transport in self.owned.transports:
            for parameter in filter(transport.has, missed):
                assert parameter.grad is not None
                average = self._group.all_reduce(parameter.grad, "mean")
                parameter.grad = average if transport.owns(parameter) else None
        self._missed += missed

    @override
    def on_optimizer_step_end(self) -> None:
        super().on_optimizer_step_end()
        for transport in self.owned.transports:
            transport.share_values(filter(transport.has, self._missed))
        self._missed.clear()

    # Checkpoints

    @property
    @override
    def _needs_others(self) -> bool:
        return self.world_size > 1

    @override
    def _whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if any(optimizer is each for each in self._in_parts):
            raise RuntimeError(
                "a checkpoint is saved after the run, which was interrupted, and each rank has its part of the "
                "optimizer's states: save it during the run, by ModelCheckpoint or in on_exception"
            )
        state = super()._whole_state(optimizer)
        if self.world_size == 1 or optimizer not in self.owned.steps:
            return state
        if self.remote is None:
            group = self.groups.new("data", descending=True)  # its last rank is rank 0
            device = self.root_device if dist.get_backend(group) == "nccl" else torch.device("cpu")
            messages = PointToPointGroup(group, self.meter, device, name="checkpoint")
            self.remote = RemoteValues(messages, dist.get_rank(group))
        received = self.remote.gather(state["state"], range(self.world_size - 1))
        whole = dict(sorted({**state["state"], **received}.items()))
        return {**state, "state": whole if self.streams else self.remote.fetched(whole)}
