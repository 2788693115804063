"""The strategy of data parallel training that goes on when a rank is lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_multigpu._lightning_internals import plain_optimizer
from lightning_multigpu._torchft import torchft
from lightning_multigpu.communication.compression import make_compressor
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.activation_checkpointing import Choice
from lightning_multigpu.engine.data_parallel.agreement import LossReduction
from lightning_multigpu.engine.data_parallel.batch_distribution import distribute_batches
from lightning_multigpu.engine.data_parallel.common_values import CommonValues, check_replicas
from lightning_multigpu.engine.data_parallel.gradient_transport import GradientTransport
from lightning_multigpu.engine.data_parallel.outer_optimizer import OuterOptimizer
from lightning_multigpu.engine.data_parallel.trained_parameters import not_ignored
from lightning_multigpu.engine.replaced_attributes import replaced
from lightning_multigpu.job.batch_feed import batches_to_skip, check_loaders, complete_resumed_epoch, evaluation_limit
from lightning_multigpu.job.checkpoint_files.last_checkpoint import find_last_checkpoint
from lightning_multigpu.job.common_stop import share_stops
from lightning_multigpu.job.process_groups import metered_group
from lightning_multigpu.job.run_context import RunContext
from lightning_multigpu.job.supervisor import SupervisorLauncher
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.base import CHECKED_BATCHES
from lightning_multigpu.strategies.fault_tolerant.averaging import GradientAverage
from lightning_multigpu.strategies.fault_tolerant.dealing import Batches, DealtLoader, SharedLoader
from lightning_multigpu.strategies.fault_tolerant.evaluation import repeat_after_losses
from lightning_multigpu.strategies.fault_tolerant.members import Limits, Members, MembersLostError, is_of_gloo, left
from lightning_multigpu.strategies.fault_tolerant.run_state import follow_members, given_state, take_state
from lightning_multigpu.strategies.pack_strategy import PackStrategy
from lightning_multigpu.strategies.run_view import RunView
from lightning_multigpu.strategies.steps.user_steps import UserSteps

if TYPE_CHECKING:
    import lightning.pytorch as pl

T = TypeVar("T")

_FAILURES = 20  # of the sums of one step
_OF_TRAINER = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")


class FaultTolerantDDPStrategy(PackStrategy, ParallelStrategy):
    """Data parallel training that goes on when a rank dies, hangs or loses its host; on torchft.

    Each rank trains on its share of the global batch. When one is lost the others go on after ``collective_timeout_s``
    at most, without its share; started again it comes in with the state of another rank. Without losses the weights are
    those of one device.

    Args:
        lighthouse: "host:port" of torchft's lighthouse, which knows who lives; by default that of the variable
            ``TORCHFT_LIGHTHOUSE``, or one that the job starts.
        min_replicas: with fewer ranks the others wait.
        wait_for_replicas_s: seconds that they wait before the run ends with an error.
        max_restarts: how often each lost rank is started again; one that is lost more often may have a sick device.
        collective_timeout_s: seconds that the sums of a step, and the making of their group, may wait for a rank before
            it counts as lost.
        heartbeat_timeout_s: seconds without a message after which the lighthouse takes a rank for lost.
        straggler_timeout_s: seconds that ranks wait for one which lives and is late; more than a checkpoint takes.
        join_timeout_s: seconds in which all ranks have to come in at the start; after that the others begin.
        loss_reduction: how ``training_step`` reduces the losses of a batch: "mean" over its samples, "sum", or a
            function from the batch to its weight.
        check_replicas_every_n_steps: optimizer steps between two checks that ranks hold the same parameters, beside
            those of batches 0, 1, 10, 100 and so on, and of the end; 0 checks nothing.
        average_every: optimizer steps that each rank takes alone before models are averaged, as under ``ring_ddp``.
            Ranks that are lost are missed, and others come in, at the next average.
        outer_optimizer: steps with the average change of the weights, as under ``ring_ddp``; None averages the weights.
            A checkpoint has the states of the first rank's own optimizers.
        compression: compress the gradients, or with ``outer_optimizer`` the changes, between hosts: "bf16" or "int8".
            When the members change, errors of compression that were to be sent with the next step are dropped.
        shared_memory: let ranks of one host sum through shared memory, as under ``ring_ddp``.
        activation_checkpointing: layers that backward computes again, as in
            :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.
        options: what the Trainer passes, such as ``parallel_devices`` and ``checkpoint_io``.

    Raises:
        ValueError: an option is out of its range, or the run cannot go on after a loss; the message names the fix.
    """

    strategy_name = "ft_ddp"
    starts_ranks = True
    pipeline_parallel_size = tensor_parallel_size = 1
    loss_scale = 1.0

    def __init__(
        self,
        *,
        lighthouse: str | None = None,
        min_replicas: int = 1,
        wait_for_replicas_s: float = 600.0,
        max_restarts: int = 10,
        collective_timeout_s: float = 2.0,
        heartbeat_timeout_s: float = 1.5,
        straggler_timeout_s: float = 60.0,
        join_timeout_s: float = 600.0,
        loss_reduction: LossReduction = "mean",
        check_replicas_every_n_steps: int | None = None,
        average_every: int = 1,
        outer_optimizer: str | dict[str, float] | None = None,
        compression: str | None = None,
        shared_memory: bool = True,
        activation_checkpointing: Choice = False,
        **options: Any,
    ) -> None:
        self._options = self._given = option_checks.own_options(FaultTolerantDDPStrategy, locals())
        option_checks.check_options(type(self).__name__, options, [*self._given, *_OF_TRAINER])
        for name, value in self._given.items():
            if name in ("min_replicas", "max_restarts") or name.endswith("_s"):
                least = {"min_replicas": 1, "max_restarts": 0}.get(name)
                option_checks.check_number(name, value, least=least, whole=least is not None)
        if check_replicas_every_n_steps is not None:
            option_checks.check_number(
                "check_replicas_every_n_steps", check_replicas_every_n_steps, least=0, whole=True
            )
        if not callable(loss_reduction):
            option_checks.check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
        option_checks.check_bools(shared_memory=shared_memory)
        option_checks.check_averages(average_every, outer_optimizer, compression=compression)
        super().__init__(**options)
        compressor = None if compression is None else make_compressor(compression)
        self._transport = GradientTransport(compressor=compressor, shared_memory=shared_memory)
        self.num_nodes = 1
        self.meter = Meter()
        self.evaluates = False
        self.loss_reduction: LossReduction = loss_reduction
        self.steps = UserSteps(self, activation_checkpointing)
        self._members: Members | None = None
        self._accumulates = self._averages = self._wants_stop = False
        self._handlers: dict[int, Any] = {}  # of signals, which this strategy has replaced
        self._steps_alone = 0
        self._group: tuple[dist.ProcessGroup, MeteredGroup] | None = None
        self._forget_step()

    # What callbacks ask

    @property
    def members(self) -> Members:
        """The ranks that train together, during a run."""
        assert self._members is not None
        return self._members

    @override
    def run_view(self) -> RunView:
        size = 1 if self._members is None else self._members.size
        return replace(
            super().run_view(),
            data_ranks=size,
            owns_batch=lambda: self.counts,
            is_common=lambda error: self._members is None or self._members.size == 1,
            gather=self.gather_objects,
            member_changes=lambda: [] if self._members is None else self._members.history,
        )

    # The ranks of the job

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
    def data_parallel_size(self) -> int:
        """Number of ranks of the job, lost ones included."""
        return max(1, self.num_nodes * self.num_processes)

    @property
    def data_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.global_rank

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.global_rank}

    @property
    @override
    def is_global_zero(self) -> bool:
        """Whether this rank writes checkpoints and logs: the first of those that live."""
        return self.global_rank == 0 if self._members is None else self._members.index == 0

    @property
    def run_context(self) -> RunContext:
        assert self.cluster_environment is not None
        return RunContext(
            environment=self.cluster_environment,
            devices=tuple(self.parallel_devices or ()),
            num_nodes=self.num_nodes,
            backend="gloo",
            failure_timeout_s=15.0,
            hang_report_s=None,
            join_timeout_s=self._given["join_timeout_s"],
        )

    def set_world_ranks(self) -> None:
        """Tells the cluster environment and Lightning's rank-zero helpers which rank this is."""
        if self.cluster_environment is not None:
            self.run_context.tell_ranks()

    # Starting and ending

    @override
    def _configure_launcher(self) -> None:
        option_checks.check_run(self.run_context, sync_batchnorm=self._layer_sync is not None)
        if self._layer_sync is not None:
            raise ValueError("sync_batchnorm=True: not under ft_ddp; pass sync_batchnorm=False")
        if (least := self._given["min_replicas"]) > (ranks := self.run_context.world_size):
            raise ValueError(f"min_replicas={least} of {ranks} ranks (devices x num_nodes); pass {ranks} or less")
        option_checks.check_scales(self.precision_plugin, self._given["average_every"])
        self._launcher = SupervisorLauncher(
            self.run_context,
            self._limits.start_lighthouse,
            self._given["lighthouse"],
            self.check_before_launch,
            max_restarts=self._given["max_restarts"],
        )

    @property
    def _limits(self) -> Limits:
        return Limits(**{name: self._given[name] for name in Limits.__dataclass_fields__})

    @override
    def check_before_launch(self, trainer: pl.Trainer) -> None:
        """Checks that torchft is there, and that a rank can come in between the steps of this run.

        Raises:
            ImportError: it is not.
            ValueError: steps, or the weights of losses, are of a kind that only the ranks themselves know.
        """
        torchft()
        super().check_before_launch(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if callable(self.loss_reduction) and trainer.accumulate_grad_batches > 1:
            raise ValueError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} and a function as loss_reduction: ranks "
                "learn each other's weights once a step; pass accumulate_grad_batches=1, or use strategy='ring_ddp'"
            )
        if not trainer.lightning_module.automatic_optimization:
            raise ValueError(
                "automatic_optimization=False: under ft_ddp a rank comes in between two steps, which only automatic "
                "optimization has; use that, or strategy='ring_ddp'"
            )

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None
        trainer: Any = None if self.lightning_module is None else self.lightning_module._trainer
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        reset_seed()
        self._members = Members(
            *(self.run_context, self._given["lighthouse"], self._limits),
            transport=self._transport,
            is_fit=trainer is not None and trainer.state.fn == TrainerFn.FITTING,
            give=lambda: (given_state(trainer), self._outer_state()) if self._averages else None,
            take=lambda states: self._take(trainer, states),
            step=lambda: 0 if trainer is None else trainer.global_step,
            changed=lambda: None if trainer is None else follow_members(trainer),
        )
        self._gradients = GradientAverage(self._members, self.meter)

    def _take(self, trainer: pl.Trainer, states: tuple[dict[str, Any], dict[str, Any]] | None) -> None:
        """Takes another rank's state, if both are at the same place of the program."""
        if states is None or not self._averages:
            self.members.exit_behind()
        state, outer = states
        take_state(trainer, state)
        if self._outer is not None:
            self._load_further_state(outer)
            with torch.no_grad():
                for anchor, of_other in zip(self._outer.anchors.values(), outer["anchors"], strict=True):
                    anchor.copy_(of_other)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        check_loaders(trainer)
        repeat_after_losses(trainer)
        super().setup(trainer)
        self.steps.choose_layers(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            for optimizer in map(plain_optimizer, self.optimizers):
                if isinstance(optimizer, LBFGS):
                    raise ValueError("LBFGS under ft_ddp: it computes a step in several passes; use another optimizer")
            self._steps_alone = 0
            if self._given["average_every"] > 1:
                outer = self._given["outer_optimizer"] or {"lr": 1.0, "momentum": 0.0}
                options = {} if isinstance(outer, str) else outer
                self._outer = OuterOptimizer(lambda anchors: self._average_changes([*anchors.values()]), **options)
        if (group := self._over_members()) is not None:
            group.broadcast_tensors([*self._module.parameters(), *self._module.buffers()], src=group.first_rank)
        if self.members.begins_anew and (path := self._newest_checkpoint()) is not None:
            trainer._checkpoint_connector._restore_modules_and_callbacks(path)
        if trainer.state.fn == TrainerFn.FITTING and not self.members.has_joined:
            if self.members.is_over:
                sys.stderr.write(f"ft_ddp: rank {self.global_rank} ends: the others have ended the fit without it\n")
                raise SystemExit(0)
            trainer.num_sanity_val_steps = 0

    def _newest_checkpoint(self) -> str | None:
        """The checkpoint that ranks begin from after all have been lost; a collective."""
        path = self.members.last_checkpoint
        if path is not None and not os.path.exists(path):
            path = find_last_checkpoint(os.path.dirname(path), missing_ok=True)
        path = self.broadcast(path)
        rank_zero_info(f"ft_ddp: all ranks were lost, and begin {'anew' if path is None else f'from {path}'}")
        return path

    @override
    def _has_saved(self, checkpoint: dict[str, Any], filepath: Any) -> bool:
        """Whether no member was lost meanwhile; else the first one of those that are left writes the file."""
        if self.is_global_zero and "optimizer_states" in checkpoint and "://" not in str(filepath):
            self.members.has_saved(os.path.abspath(str(filepath)))
        if not self.members.talks or self._asked(False, lambda group: group.barrier() or True):
            return True
        self.members.meet(shrinks=True)
        return False

    @override
    def model_to_device(self) -> None:
        self._module.to(self.root_device)

    @override
    def teardown(self) -> None:
        if self._members is not None:
            trainer = None if self.lightning_module is None else self.lightning_module._trainer
            state = None if trainer is None else trainer.state
            finished = state is not None and state.status == TrainerStatus.RUNNING
            self._members.end(finished=finished, is_fit=state is not None and state.fn == TrainerFn.FITTING)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._leave:
                signal.signal(number, handler)
        self._handlers = {}
        super().teardown()

    # Lightning's collectives, over the members. Where one of them is lost, a collective returns this rank's value; in a
    # validation it raises, which repeats that.

    def _over_members(self) -> MeteredGroup | None:
        world = dist.group.WORLD if self._members is not None and self._members.talks else None
        if world is None:
            return None
        if self._group is None or self._group[0] is not world:
            self._group = world, metered_group(world, self.meter, "members", torch.device("cpu"))
        return self._group[1]

    def _asked(self, alone: T, call: Any) -> T:
        """The result of a collective over the members; ``alone`` without others."""
        group = self._over_members()
        if group is None:
            if self.evaluates and self._members is not None and self._members.has_joined and not self._members.talks:
                raise MembersLostError("a rank is lost")
            return alone
        begun_s = time.monotonic()
        try:
            found: T = call(group)
        except RuntimeError as error:
            if not is_of_gloo(error):
                raise
            self.members.split(error, begun_s)
            if self.evaluates:
                raise MembersLostError("a rank is lost") from error
            return alone
        return found

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """The reduction over the members, the same on every rank; other objects than tensors are returned."""
        if not isinstance(tensor, Tensor):
            return tensor
        value = tensor
        if self.steps.weighs and self.loss_reduction == "mean":  # not a function: its other values are not known
            value = self.steps.weighted(tensor, reduce_op, group, self.members.size * self._loader.weight)
        return self._asked(tensor, lambda g: g.all_reduce(value, reduce_op, checked=f"reduce ({reduce_op})"))

    @override
    def barrier(self, name: str | None = None) -> None:
        if name == "run-stage":  # Lightning has just set its handlers of signals
            self._take_signals()
        self._asked(None, lambda group: group.barrier())

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return self._asked(obj, lambda group: group.broadcast_object(obj, group.ranks[src if src < group.size else 0]))

    def gather_objects(self, obj: T) -> list[T]:
        """A picklable object of every member, in the order of their ranks."""
        return self._asked([obj], lambda group: group.gather_objects(obj))

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return self._asked(tensor, lambda g: g.all_gather(tensor, sync_grads=sync_grads))

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        def votes(group: MeteredGroup) -> bool:
            number = int(group.all_reduce(torch.tensor(int(decision)), "sum", checked="reduce_boolean_decision"))
            return number == group.size if all else number > 0

        return decision if self.members.size == 1 else self._asked(decision, votes)

    def agree_after_batch(self, stops: bool) -> bool:
        """Whether any rank stops after this batch; a rank that has told the others so leaves here.

        Ranks that step alone ask each other when they average.
        """
        if self.members.has_left:
            raise left()
        if self.members.requeue_is_due:  # the signal reaches ranks one by one, and all save together, once
            for number in {*self._handlers} - {signal.SIGTERM}:
                self._handlers.pop(number)(number, None)
            self.members.wants_to_leave %= 2
        self._wants_stop = stops = self._wants_stop or stops
        if self._outer is not None and not self._has_averaged:
            return False
        vote = torch.tensor([float(stops)])

        def voted(_: MeteredGroup) -> bool:
            self.members.sum([vote], self._given["straggler_timeout_s"])
            return bool(vote)

        return self._asked(stops, voted)

    # Data

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Deals the batches out to the members.

        Raises:
            ValueError: in training, the loader's order is not known, so that it cannot be dealt anew after a loss.
        """
        trainer = self._module.trainer
        if trainer.predicting:
            return dataloader
        loader, batches = distribute_batches(
            dataloader,
            **self.distributed_sampler_kwargs,
            even=not trainer.training,
            limit=evaluation_limit(trainer),
        )
        if isinstance(batches, Batches):
            if not trainer.training:
                return SharedLoader(loader, batches, self.members)
            return DealtLoader(
                loader,
                batches,
                self.members,
                limit=trainer.limit_train_batches,
                skip=lambda: batches_to_skip(trainer),
                begins=lambda: follow_members(trainer),
                weight_of=self._weight_of,
            )
        if trainer.training:
            raise ValueError(
                f"{type(dataloader).__name__}: under ft_ddp samples are dealt anew when a rank is lost, which takes a "
                "DataLoader of a dataset with a length and Lightning's sampler: leave use_distributed_sampler=True, or "
                "use strategy='ring_ddp'"
            )
        return loader

    def _weight_of(self, batch: Any, samples: int, total: int) -> float:
        """The weight of a rank's loss: its share of the global batch; with a function, the function's value."""
        if callable(self.loss_reduction):
            return float(self.loss_reduction(batch)) if samples else 0.0
        return float(samples > 0) if self.loss_reduction == "sum" else samples / total

    @property
    def _loader(self) -> DealtLoader:
        loader = self._module.trainer.train_dataloader
        assert isinstance(loader, DealtLoader)
        return loader

    @property
    def counts(self) -> bool:
        """Whether the present batch counts: not one repeated for want of samples, or from before this rank came in."""
        return self.members.has_joined and not self._is_foreign and self._loader.samples > 0

    # Training

    def _forget_step(self) -> None:
        self._weight, self._batches, self._is_foreign, self._has_averaged = 0.0, 0, False, False

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        trainer = self._module.trainer
        complete_resumed_epoch(trainer)
        share_stops(trainer)
        self._forget_step()
        self._modules = [*self._module.modules()]
        self._wants_stop = False
        self._values = CommonValues(self.optimizers)
        self.meter.discard()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._settle_values()
        self._check_replicas()

    def _take_signals(self) -> None:
        """Replaces Lightning's handlers of SIGTERM and of SLURM's signal, which wait for ranks at any place."""
        if threading.current_thread() is threading.main_thread():
            environment: Any = self.cluster_environment
            requeues = getattr(environment, "auto_requeue", False) and environment.requeue_signal
            for number in filter(None, (signal.SIGTERM, requeues)):
                self._handlers[number] = signal.signal(number, self._leave)

    def _leave(self, signum: int, frame: Any) -> None:
        if self._module.trainer.state.fn != TrainerFn.FITTING:
            raise left()
        if self.members.wants_to_leave != 1:
            self.members.wants_to_leave = 1 if signum == signal.SIGTERM else 2

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_averaged:
            self._forget_step()
        if self._outer is not None and self._steps_alone == 0:
            self._outer.begin(self._module.parameters())
        with self.steps.running(self._module, self.root_device, self.global_rank):
            output = super().training_step(*args, **kwargs)
        if self._module.trainer.fit_loop.total_batch_idx in CHECKED_BATCHES:
            self._check_replicas()
        return output

    def _check_replicas(self) -> None:
        """Checks that the members hold the same parameters; a collective."""
        named = not_ignored(self._module, self._module.named_parameters())
        if self._given["check_replicas_every_n_steps"] != 0 and self._steps_alone == 0:
            with self.meter.unrecorded():
                self._asked(None, lambda group: check_replicas(named, group))

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with replaced(self, _accumulates=True):
            yield

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Computes gradients, and averages them before the user's ``on_after_backward``."""
        weight = self._loader.weight if self._outer is None else float(self._loader.samples > 0)
        self._weight, self._batches = self._weight + weight, self._batches + 1
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss * weight, self._module)
        self.precision_plugin.backward(closure_loss, self._module, optimizer, *args, **kwargs)
        if not self._accumulates and self._outer is None:
            weight = 0.0 if self.loss_reduction == "sum" else self._weight / self._batches
            with replaced(self, _averages=True):
                self._average(lambda: [p for p in self._tensors("_parameters") if p.requires_grad], weight)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self._module)
        self.post_backward(closure_loss)
        return closure_loss

    def _average(self, tensors: Callable[[], list[Tensor]], weight: float, further: Sequence[Tensor] = ()) -> None:
        """Averages ``.grad`` of tensors over the members, and over those that are left if one is lost meanwhile.

        They all get the first member's values, or the averages, of the module's buffers and of ``further`` tensors.
        """
        members, module = self.members, self._module
        has_met, failures, self._has_averaged = False, 0, True
        while True:
            begun_s = time.monotonic()
            if members.is_due() or (self._steps_alone and not has_met):
                try:
                    members.meet(shrinks=not self._averages)
                except TimeoutError:
                    trainer, self._steps_alone = module.trainer, 0
                    trainer.save_checkpoint(
                        os.path.join(trainer.default_root_dir, f"ft_ddp-step={trainer.global_step}.ckpt")
                    )
                    raise
                has_met = True
                self._modules = [*self._module.modules()]
                self._is_foreign = self._is_foreign or members.healed
            try:
                said = self._gradients.average(
                    tensors(),
                    [*self._tensors("_buffers"), *further],
                    weight,
                    common=self._values.number(),
                    loss_scale=self._loss_scaler_scale(),
                    counts=not self._is_foreign,
                    averages_buffers=self._outer is not None,
                    after_meeting=has_met,
                )
                break
            except RuntimeError as error:
                failures += 1
                if failures > _FAILURES:  # it is no loss
                    raise
                members.split(error, begun_s)
        if has_met:
            members.finish_meeting()
        self._values.check(said.common, self.gather_objects)
        members.requeue_is_due = 2 in said.wants_to_leave
        if 1 in said.wants_to_leave:
            members.leave_without([place for place, wants in enumerate(said.wants_to_leave) if wants == 1])
        elif said.wants_meeting and not has_met:
            members.asks = True

    def _tensors(self, kind: str) -> list[Tensor]:
        """As ``module.parameters()`` and ``buffers()``, which would look for new layers in each step."""
        found = (each for module in self._modules for each in getattr(module, kind).values() if each is not None)
        return [*{id(each): each for each in found}.values()]

    def _average_changes(self, anchors: list[Tensor]) -> None:
        size = self.members.size
        for anchor in anchors:
            assert anchor.grad is not None
            anchor.grad.div_(size)
        self._average(lambda: anchors, 1 / size)

    @override
    def _settle_values(self) -> None:
        """Averages the models of ranks that have stepped alone; a collective."""
        if self._steps_alone and self.members.has_joined and not self.members.has_left:
            self._step_outer()

    def _step_outer(self) -> None:
        assert self._outer is not None
        unfrozen = self._outer.step([*self._module.parameters()])
        if unfrozen:
            self._average(list, 1 / self.members.size, unfrozen)
        self._steps_alone = 0

    def _outer_state(self) -> dict[str, Any]:
        if self._outer is None:
            return {}
        return {**self._further_state(), "anchors": [anchor.detach() for anchor in self._outer.anchors.values()]}

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        if self._outer is not None:
            self._steps_alone += 1
            if self._steps_alone >= self._given["average_every"] or not self.members.has_joined:
                with replaced(self, _averages=True):
                    self._step_outer()
        every = self._given["check_replicas_every_n_steps"]
        if every and (self._module.trainer.global_step + 1) % every == 0:
            self._check_replicas()
        self.meter.end_step()
        return output
