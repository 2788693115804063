"""The base of strategies that start ranks: options, start and end of a run, data, checkpoints and failures."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu._lightning_internals import IS_INTERACTIVE
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.activation_checkpointing import Choice
from lightning_multigpu.engine.data_parallel.agreement import LossReduction, UnevenInputs, full_batch_size
from lightning_multigpu.engine.data_parallel.averaging import GivenGradients
from lightning_multigpu.engine.data_parallel.common_values import CommonValues, check_replicas
from lightning_multigpu.engine.data_parallel.module_buffers import ModuleBuffers
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer
from lightning_multigpu.engine.data_parallel.trained_parameters import (
    TrainedParameters,
    check_embeddings,
    check_has_shapes,
    not_ignored,
)
from lightning_multigpu.engine.replaced_attributes import replaced
from lightning_multigpu.job.batch_feed import BatchFeed, check_loaders, complete_resumed_epoch, global_batch_text
from lightning_multigpu.job.common_stop import share_stops
from lightning_multigpu.job.failure_watch import FailureWatch, advise_resuming
from lightning_multigpu.job.joining import Joining, check_model, table_of
from lightning_multigpu.job.launchers.script_launcher import ScriptLauncher
from lightning_multigpu.job.launchers.spawn_launcher import SpawnLauncher
from lightning_multigpu.job.process_groups import ProcessGroups, metered_group
from lightning_multigpu.job.run_context import RunContext
from lightning_multigpu.job.run_signals import RunSignals
from lightning_multigpu.placement.owned_step import OwnedStep
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.collectives import Collectives
from lightning_multigpu.strategies.owned_optimizers import OwnedOptimizers
from lightning_multigpu.strategies.pack_strategy import PackStrategy
from lightning_multigpu.strategies.run_view import RunView
from lightning_multigpu.strategies.steps.dry_run import check_share, check_takes_batch
from lightning_multigpu.strategies.steps.hook_detection import reads_gradients
from lightning_multigpu.strategies.steps.user_steps import UserSteps

if TYPE_CHECKING:
    import lightning.pytorch as pl

T = TypeVar("T")
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

DEFAULT_TIMEOUT = timedelta(minutes=30)
CHECKED_BATCHES = {0, *(10**power for power in range(12))}  # batches of a fit in which ranks compare their parameters


class MultiGPUStrategy(PackStrategy, ParallelStrategy):
    """Base class of the strategies that start ranks.

    It starts and ends a run, distributes the batches, saves and loads checkpoints, and ends all ranks when one fails.
    Subclasses decide how gradients and layers travel.

    The ranks are a mesh with the axes data, pipeline and tensor; neighbouring ranks differ in the last axis, as in the
    picture of :class:`HybridStrategy`. By default all ranks are on the data axis.

    Args:
        accelerator: the accelerator; usually left to the Trainer.
        parallel_devices: the devices of this machine's ranks; usually left to the Trainer.
        cluster_environment: the environment that started the processes, and where they meet; usually left to the
            Trainer.
        checkpoint_io: the plugin that reads and writes checkpoints; usually left to the Trainer.
        precision_plugin: the plugin behind the Trainer's ``precision``; usually left to the Trainer.
        process_group_backend: "nccl", "gloo" or another back end of torch; by default NCCL on GPUs and Gloo on CPUs.
        timeout: the longest time that a collective may wait, by default 30 minutes.
        start_method: how this host's processes start: "popen" runs the script again; "spawn", "fork" and
            "forkserver" start them from the running interpreter.
        uneven_inputs: what happens when one data rank runs out of batches: "stop" ends the epoch for all ranks;
            "join" lets the other ranks go on, and the rank without data counts with weight 0.
        loss_reduction: how ``training_step`` reduces the losses of a batch: "mean" over its samples (ranks are then
            weighted by their samples, so that uneven batches average as on one device), "sum", or, for a mean over
            something else, a function from the batch to its weight (its number of tokens, for example).
        failure_timeout_s: seconds in which all other ranks have to end after one has failed, 1 or more, on several
            hosts 5 or more; after that they are killed. A rank that is stopped for half of this time while others wait
            for it counts as failed, and so does a host that sends nothing for half of this time.
        hang_report_s: seconds that a rank may wait in a collective before a report names the ranks that have entered
            it, the ranks that have not, and where those are; 1 or more. Two ranks in different collectives end the run.
            None or 0: no report.
        join_timeout_s: seconds after its start in which a rank has to join the others, 1 or more. It is longer than
            ``failure_timeout_s`` because the hosts of a job start, and import their libraries, at different times.
        verify_steps: so many batches of a fit are compared before they train: on each rank the gradients of two halves
            have to add up to those of the batch, as they do unless the loss couples the samples of a batch; see
            :func:`.coupling`. 0 compares nothing. Has no effect in manual optimization.
        check_replicas_every_n_steps: optimizer steps between two checks that ranks which train the same parameters hold
            the same values; a difference raises an error that names the parameters and the ranks. Data parallel ranks
            also check batches 0, 1, 10, 100 and so on, and all ranks check at the end of a fit; 0 checks nothing. A
            check reads all parameters once.
        activation_checkpointing: layers that backward computes again instead of keeping their activations: True for
            the layers of each ``nn.Sequential`` and ``nn.ModuleList`` that is in no other one (in a pipeline, for its
            layers); or a list of classes, names of classes, and names of modules. Random numbers are drawn again.

    Raises:
        ValueError: an option is out of its range; the message names the value, the limit and the fix. With
            ``verify_steps``, in training and on all ranks, the gradients do not add up.
    """

    starts_ranks = True
    pipeline_parallel_size = 1
    tensor_parallel_size = 1
    name_with_spawn: ClassVar[str | None] = None
    """The registered name, if there is one, under which this strategy spawns its ranks."""

    def __init__(
        self,
        *,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
        uneven_inputs: UnevenInputs = "stop",
        loss_reduction: LossReduction = "mean",
        failure_timeout_s: float = 15.0,
        hang_report_s: float | None = 60.0,
        join_timeout_s: float = 600.0,
        verify_steps: int = 0,
        check_replicas_every_n_steps: int | None = None,
        activation_checkpointing: Choice = False,
        **options: Any,
    ) -> None:
        option_checks.check_options(type(self).__name__, options, type(self).option_names())
        option_checks.check_options_of_all(locals())
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            # dict() keeps jsonargparse from following the options into torch's DDP, whose arguments are not ours.
            **dict(options),
        )
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout: timedelta | None = timeout if timeout is not None else DEFAULT_TIMEOUT
        self.meter = Meter()
        self.failure_timeout_s = failure_timeout_s
        self.hang_report_s = hang_report_s or None
        self.join_timeout_s = join_timeout_s
        self.signals = RunSignals()
        self.failure_watch = FailureWatch(self.signals)
        self.collectives = Collectives(self.metered, self.failure_watch)
        self.joining = Joining(self.failure_watch)
        self.feed = BatchFeed(uneven_inputs, loss_reduction, self.signals)
        self._start_method: StartMethod = start_method
        self.check_replicas_every = check_replicas_every_n_steps
        self.steps = UserSteps(self.feed, activation_checkpointing)
        self.verify_steps = verify_steps
        self._left_to_verify = 0
        self.owned = OwnedOptimizers()
        self._options = {
            "start_method": start_method,
            "uneven_inputs": uneven_inputs,
            "loss_reduction": loss_reduction,
            "verify_steps": verify_steps,
            "check_replicas_every_n_steps": check_replicas_every_n_steps,
            "activation_checkpointing": activation_checkpointing,
        }
        self._undo = ExitStack()  # of a run
        self._accumulates = False
        self._forget_run()

    def _forget_run(self) -> None:
        """Forgets what ranks have in common during a run.

        Sets:
            values: the settings that ranks compare at each batch.
            buffers: keeps the module's buffers equal; None where a family does not.
            reducer: averages gradients over the data axis; None where a family moves them otherwise.
            given: averages gradients that the user's code puts in place; None if it can put none.
            _trained: the parameters whose gradients are averaged in backward; None if none are.
        """
        self.values = CommonValues()
        self.buffers: ModuleBuffers | None = None
        self.reducer: GradientReducer | None = None
        self.given: GivenGradients | None = None
        self._trained: TrainedParameters | None = None
        self._steps_unchecked = self._batches = 0

    @classmethod
    def option_names(cls) -> list[str]:
        """The options of the strategy: its own, and those that every strategy of the pack has."""
        strategies = [each for each in cls.__mro__ if issubclass(each, MultiGPUStrategy) and "__init__" in vars(each)]
        names = (name for each in strategies for name in option_checks.options_of(each, eval_str=False))
        return list(dict.fromkeys(names))  # a subclass may repeat an option of its base

    # What callbacks ask

    @override
    def run_view(self) -> RunView:
        return replace(
            super().run_view(),
            data_ranks=self.data_parallel_size,
            owns_batch=lambda: self.feed.counts and self.global_rank % self._model_parallel_size == 0,
            is_common=self.signals.agreed_on,
            gather=self.gather_objects,
        )

    @property
    def loss_scale(self) -> float:
        """The factor of this rank's loss that makes the mean over ranks the loss of one device."""
        return self.feed.loss_scale

    # The mesh

    @property
    def is_distributed(self) -> bool:
        """True: Lightning then injects a distributed sampler, and reduces logs with ``sync_dist=True``."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def groups(self) -> ProcessGroups:
        """The process groups, during a run."""
        assert self.collectives.groups is not None
        return self.collectives.groups

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    @property
    def data_parallel_size(self) -> int:
        """Number of data ranks: of different batches in one step."""
        return max(1, self.num_nodes * self.num_processes // self._model_parallel_size)

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank's batch among them."""
        return self.global_rank // self._model_parallel_size

    @property
    def tensor_parallel_rank(self) -> int:
        """The index of this rank's part of each split layer."""
        return self.global_rank % self.tensor_parallel_size

    @property
    def _model_parallel_size(self) -> int:
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def set_world_ranks(self) -> None:
        """Tells the cluster environment and Lightning's rank-zero helpers which rank this is."""
        if self.cluster_environment is not None:
            self.run_context.tell_ranks()

    @property
    def _data_axis(self) -> MeteredGroup:
        """The ranks that average gradients, filed by the meter as "data"."""
        return self.metered(self.collectives.data.group, "data")

    def metered(self, group: dist.ProcessGroup, name: str) -> MeteredGroup:
        """The collectives of ``group``, filed by the meter under ``name``."""
        return metered_group(group, self.meter, name, self.root_device)

    # Lightning's collectives. After a failure they do not communicate: each returns this rank's value, so that saving
    # and teardown do not wait for ranks that have ended.

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """The reduction of ``tensor`` over the data axis (or ``group``), the same on every rank.

        Other objects than tensors are returned. The input is not changed. The mean of integers is a floating-point
        number.
        """
        value = self.steps.weighted(tensor, reduce_op, group, self.loss_scale)
        metered = self.collectives.over(group) if isinstance(tensor, Tensor) else None
        return value if metered is None else metered.all_reduce(value, reduce_op, checked=f"reduce ({reduce_op})")

    @override
    def barrier(self, name: str | None = None) -> None:
        if (world := self.collectives.over(dist.group.WORLD)) is not None:
            world.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of rank ``src``; within a step, of the rank in ``src``'s pipeline with this rank's stages."""
        world = self.collectives.over(dist.group.WORLD)
        if world is None:
            return obj
        size = dist.get_world_size() // world.size  # above 1 within a step, where the data axis is the world
        found: T = world.broadcast_object(obj, src // size * size + dist.get_rank() % size)
        return found

    def gather_objects(self, obj: T) -> list[T]:
        """A picklable object of every rank, in rank order, on every rank. A collective of the whole world."""
        world = self.collectives.over(dist.group.WORLD)
        return [obj] if world is None else world.gather_objects(obj)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Tensors of every data rank (or of ``group``), stacked: shape (ranks, *tensor.shape).

        With ``sync_grads`` the gradient of a rank's tensor is the sum of the gradients of all ranks' results.
        """
        if group is dist.group.WORLD and self._model_parallel_size > 1:
            group = None  # ranks train on the same batch; the world is Lightning's default
        metered = self.collectives.over(group)
        return tensor if metered is None else metered.all_gather(tensor, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if all ranks of the world, or with ``all=False`` any of them, decide so; the same on every rank."""
        # A host that asked its GPU for the votes after each batch would wait for the batch to end, and could not launch
        # the next one meanwhile.
        world = self.collectives.over(dist.group.WORLD, on_hosts=True)
        if world is None or world.size == 1:
            return decision
        votes = int(world.all_reduce(torch.tensor(int(decision)), "sum", checked="reduce_boolean_decision"))
        return votes == world.size if all else votes > 0

    def agree_after_batch(self, stops: bool) -> bool:
        """Whether any rank stops after this batch; ranks tell each other of their next batches by the way."""
        announcer = self.feed.announcer
        if announcer is None or not announcer.is_due or self.collectives.over(dist.group.WORLD) is None:
            return self.reduce_boolean_decision(stops, all=False)
        return announcer.agree(stops)

    # Starting and ending

    @override
    def model_to_device(self) -> None:
        self._module.to(self.root_device)

    @property
    def run_context(self) -> RunContext:
        """The ranks, devices and limits of the run, as they are set now."""
        assert self.cluster_environment is not None
        return RunContext(
            environment=self.cluster_environment,
            devices=tuple(self.parallel_devices or ()),
            num_nodes=self.num_nodes,
            backend=self.process_group_backend,
            failure_timeout_s=self.failure_timeout_s,
            hang_report_s=self.hang_report_s,
            join_timeout_s=self.join_timeout_s,
        )

    @override
    def _configure_launcher(self) -> None:
        """Makes the launcher of the ranks.

        Raises:
            ValueError: a setting of the Trainer does not fit, or there is no script that further ranks could run.
        """
        run, start_method = self.run_context, self._start_method
        option_checks.check_run(run, sync_batchnorm=self._layer_sync is not None)
        if start_method == "spawn" and IS_INTERACTIVE:
            start_method = "fork"  # a spawned process cannot import the code of a notebook
        if start_method == "popen" and IS_INTERACTIVE and not run.environment.creates_processes_externally:
            name = self.name_with_spawn
            spawning = f"{type(self).__name__}(start_method='spawn')" if name is None else repr(name)
            raise ValueError(
                f"in a notebook or a REPL there is no script that further ranks could run: use strategy={spawning}"
            )
        if start_method == "popen":
            self._launcher = ScriptLauncher(run, self.joining, self.check_before_launch)
        else:
            self._launcher = SpawnLauncher(self, run, self.joining, self.check_before_launch, start_method)

    def check_before_launch(self, trainer: pl.Trainer) -> None:
        """Checks the run before any process is started, and calls this method of the callbacks that have it.

        Raises:
            ValueError: the strategy cannot run the module, or a callback refuses the run.
        """
        super().check_before_launch(trainer)
        module, is_fit = trainer.lightning_module, trainer.state.fn == TrainerFn.FITTING
        if self.data_parallel_size > 1 and is_fit:
            check_embeddings(module)
        if is_fit and (self.tensor_parallel_size > 1 or self.verify_steps):
            check_takes_batch(module)
        if not is_overridden("configure_model", module):  # it makes the layers later
            if is_fit:
                check_has_shapes(module)
            self.steps.choose_layers(trainer)

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        self._join()

    def _join(self) -> None:
        """Connects this rank to the others, whose settings have to be alike; signals are deferred from then on."""
        run, watch = self.run_context, self.failure_watch
        reset_seed()
        trainer: Any = None if self.lightning_module is None else self.lightning_module._trainer
        callbacks = [] if trainer is None else trainer.callbacks
        settings = {
            "strategy": type(self),
            **{f"option {name}": value for name, value in self.options.items()},
            "precision": self.precision_plugin.precision,
            "accumulate_grad_batches": getattr(trainer, "accumulate_grad_batches", 1),
            **{
                type(c).__name__: dict(sorted(c.scheduling.items()))
                for c in callbacks
                if isinstance(c, GradientAccumulationScheduler)
            },
        }
        with self.joining.limited(run):
            groups = ProcessGroups(
                run.environment,
                self.root_device,
                (self.data_parallel_size, self.pipeline_parallel_size, self.tensor_parallel_size),
                backend=run.backend,
                timeout=self._timeout,
                store=self.joining.meet(run, table_of(run, settings)),
            )
            self._process_group_backend = groups.backend
            self.collectives.join(groups)
        watch.joined(groups.cut, run.world_size)
        self.meter.notes, client = watch.flight_recorder, watch.client
        assert client is not None
        self.signals.begin(run.environment, client.signalled)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._check_module(trainer)
        super().setup(trainer)
        self._watch_states()  # Lightning has moved what the optimizers' constructors have made
        self.steps.choose_layers(trainer)

    def _check_module(self, trainer: pl.Trainer) -> None:
        """Checks that ranks have the same model, in which layers have shapes, and loaders that can be shared out."""
        module, is_fit = self._module, trainer.state.fn == TrainerFn.FITTING
        if is_fit:
            check_has_shapes(module)
        check_loaders(trainer)
        if self.collectives.groups is not None:
            check_model(module, self.collectives.world)
        if self.data_parallel_size > 1 and is_fit:
            check_embeddings(module)  # those of configure_model too

    @override
    def teardown(self) -> None:
        with self._keeping_states(self._owned):
            self.owned.end()
            self._undo.close()
            self.failure_watch.leave()
            self.meter.notes = None
            self.feed.announcer = None
            self.signals.end(None if self.lightning_module is None else self.lightning_module._trainer)
            if self.reducer is not None:
                self.reducer.close()
            self._forget_run()
            self.remote = None
            super().teardown()
            self.collectives.leave()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        advise_resuming(None if self.lightning_module is None else self.lightning_module._trainer, exception)

    def _begin_alike(self, model: Module, ranks: MeteredGroup) -> Module:
        """Applies SyncBatchNorm, and gives all ranks the values of the first one; for families without torch's DDP."""
        self._share_values(ranks)
        return model if self._layer_sync is None else self._layer_sync.apply(model)

    def _share_values(self, ranks: MeteredGroup) -> None:
        """Gives all ranks the first one's values of parameters and buffers; a collective."""
        ranks.broadcast_tensors([*self._module.parameters(), *self._module.buffers()], src=ranks.first_rank)

    def _register_ddp_hooks(self) -> None:
        """Does nothing: where Lightning's ``DDPStrategy`` calls it, what averages is attached to the wrapper."""

    # Data

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Distributes the loader's batches over the data ranks; in training, ranks also agree on each next batch.

        In training a resumed run goes on in the middle of an epoch; elsewhere no sample is repeated.
        """
        return self.feed.distribute(
            dataloader,
            self._module.trainer,
            rank=self.data_parallel_rank,
            num_replicas=self.data_parallel_size,
            group=self.metered(self.collectives.hosts, "control"),
            ranks_a_batch=self._model_parallel_size,
            common=lambda: self.values.number(),
            on_agreed=lambda found: self.values.check(found.common, self.gather_objects),
        )

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._watch_states()
        self.feed.start_batch(self._module.trainer, self.data_parallel_rank)
        if self._trained is None or self._ranks_may_differ or not self._trained.has_changed(self.optimizers):
            return
        self._trained.share_changes(self.optimizers, self.collectives.data, self.gather_objects)
        self._settle_buffers()
        self._follow_changes()

    def _follow_changes(self) -> None:
        """Averages gradients of the parameters that are trained from now on, since hooks have changed them."""

    # Training

    # Checkpoints

    @property
    def _owned(self) -> Mapping[Optimizer, OwnedStep[Any]]:  # type: ignore[override]
        return self.owned.steps

    @override
    def _watch_states(self) -> None:
        self.owned.watch()

    @property
    def _needs_others(self) -> bool:
        """Whether other processes have a part of what a checkpoint contains."""
        return False

    @property
    @override
    def _are_lost(self) -> bool:
        watch = self.failure_watch
        return watch.ranks_have_ended or (watch.failed and self._needs_others)

    @property
    @override
    def _gathers(self) -> bool:
        return not self._are_lost and (self._model_parallel_size == 1 or self.data_parallel_rank == 0)

    @contextmanager
    def _keeping_states(self, optimizers: Collection[Optimizer]) -> Iterator[bool]:
        """Keeps whole states of the optimizers on rank 0 over a teardown within the block, if the fit has ended well.

        A checkpoint may be saved after the fit. Yields whether any states are kept.
        """
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        state = None if trainer is None or self.failure_watch.failed else trainer.state
        ends_well = state is not None and (state.fn, state.status) == (TrainerFn.FITTING, TrainerStatus.RUNNING)
        states = [(optimizer, self.optimizer_state(optimizer)) for optimizer in optimizers if ends_well]
        yield bool(states)
        for optimizer, whole in states if self.is_global_zero else ():
            optimizer.load_state_dict(whole)

    # Training

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        trainer = self._module.trainer
        complete_resumed_epoch(trainer)
        share_stops(trainer)
        self.signals.stage_starts(trainer, training=True)
        self._left_to_verify = self.verify_steps
        if self.verify_steps and not self._module.automatic_optimization:
            self._left_to_verify = 0
            rank_zero_warn(
                f"verify_steps={self.verify_steps} has no effect in manual optimization, where only the step knows its "
                "losses"
            )
        self._tell_global_batch()
        counts_hooks = any(step.average is not None for step in self.owned.steps.values())
        self.values = CommonValues(self.optimizers, counts_hooks=counts_hooks)
        self._batches = 0
        self.meter.discard()

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.signals.stage_starts(self._module.trainer)
        self._settle_values()
        self._settle_buffers()

    def _settle_buffers(self) -> None:
        """Gives all ranks the same buffers, where the family keeps them equal; a collective."""
        if self.buffers is not None and self.collectives.groups is not None and not self.failure_watch.failed:
            self.buffers.settle()

    @override
    def on_test_start(self) -> None:
        self.signals.stage_starts(self._module.trainer)

    @override
    def on_predict_start(self) -> None:
        self.signals.stage_starts(self._module.trainer)

    def _tell_global_batch(self) -> None:
        trainer = self._module.trainer
        sizes = self.gather_objects(full_batch_size(trainer.train_dataloader))
        if len({*sizes}) > 1:
            rank_zero_warn(f"the ranks' loaders have different batch sizes: {sizes}")
        rank_zero_info(global_batch_text(sizes[:: self._model_parallel_size], trainer))

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._settle_values()
        self._check_replicas()
        self.signals.training_ends(self.gather_objects)
        self._settle_buffers()

    def on_optimizer_step_end(self) -> None:
        """For communication after an optimizer step, as a part of that step."""
        if self.reducer is not None and self.reducer.compressed is not None:
            self.reducer.end_step(self._loss_scaler_scale())

    # What ranks have in common

    @property
    def replicas_differ(self) -> bool:
        """True while ranks may hold different values of the same parameters."""
        return False

    def _held_in_common(self) -> list[tuple[MeteredGroup, Iterable[tuple[str, Tensor]]]]:
        """Groups of ranks, each with the parameters that its ranks share, by name."""
        named = not_ignored(self._module, self._module.named_parameters())
        return [(self.collectives.data, [(name, value) for name, value in named if self.holds(value)])]

    @property
    def _ranks_may_differ(self) -> bool:
        """Whether ranks may hold different values of the same parameters at some time."""
        return False

    def _check_replicas(self) -> None:
        """Checks that ranks which train the same parameters hold the same values; a collective."""
        if self.check_replicas_every == 0 or self.replicas_differ or self.failure_watch.failed:
            return
        self._steps_unchecked = 0
        with self._showing_parts(), self.meter.unrecorded():
            for group, parameters in self._held_in_common():
                check_replicas(parameters, self.metered(group.group, "replicas"))

    def _watch_given_gradients(self) -> bool:
        """Makes :attr:`given` if the user's code can set gradients between backward and the step."""
        module = self._module
        if self.data_parallel_size > 1 and (not module.automatic_optimization or reads_gradients(module)):
            self.given = GivenGradients(self._data_axis, lambda: self.loss_scale)
        return self.given is not None

    def _note_averages(self) -> None:
        """Notes the gradients, which are averages now."""
        if self.given is not None:
            self.given.note(self._module.parameters())

    # Steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._left_to_verify:
            self._left_to_verify -= 1
            with self.block_backward_sync(), self.meter.unrecorded(), self.steps.recomputing():
                check_share(
                    self._module,
                    *(*args, *kwargs.values()),
                    reduction=self.feed.loss_reduction,
                    gather=self.gather_objects,
                    rank=self.global_rank,
                    loss_scale=self._loss_scaler_scale(),
                )
        if self.buffers is not None:
            self.buffers.before_step(accumulates=self._accumulates)
        data_rank = None if self._model_parallel_size > 1 else self.data_parallel_rank
        with self.steps.running(self._module, self.root_device, data_rank):
            output = super().training_step(*args, **kwargs)
        if self._batches in CHECKED_BATCHES and self._model_parallel_size == 1:
            self._check_replicas()  # before the owners' new values hide what a step has changed on one rank
        self._batches += 1
        return output

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within the block gradients are accumulated, and stay on their ranks."""
        with super().block_backward_sync(), replaced(self, _accumulates=True), self.owned.accumulating():
            yield

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.loss_scale != 1.0:
            closure_loss = closure_loss * self.loss_scale
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _updating(self) -> AbstractContextManager[None]:
        """The block in which an optimizer steps, its closure included."""
        return nullcontext()

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._updating():
            self._watch_states()
            output = super().optimizer_step(*args, **kwargs)
            self.on_optimizer_step_end()
            if self._trained is not None:
                self._trained.stepped()
            self._steps_unchecked += 1
            if self.check_replicas_every and self._steps_unchecked >= self.check_replicas_every:
                self._check_replicas()
            self.meter.end_step()
            if (recorder := self.failure_watch.flight_recorder) is not None:
                recorder.completed(self._module.trainer.global_step + 1)  # Lightning counts the step later
        return output
