"""The strategy of data parallel training in one process, with a replica of the model for each device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial, partialmethod
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins import LayerSync, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.autograd import forward_ad
from typing_extensions import override

from lightning_multigpu._lightning_internals import (
    forget_loader_states,
    is_compiled,
    tell_device,
)
from lightning_multigpu.communication.checksums import checksums
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.tensors import marks_of, size_bytes
from lightning_multigpu.engine.activation_checkpointing import Choice, check_choice, recomputing, selected_layers
from lightning_multigpu.engine.batch_size import leading_size, tensors_in
from lightning_multigpu.engine.data_parallel.agreement import (
    ContinuedLoader,
    LossReduction,
    full_batch_size,
)
from lightning_multigpu.engine.data_parallel.batch_distribution import distribute_batches
from lightning_multigpu.engine.data_parallel.trained_parameters import check_embeddings
from lightning_multigpu.engine.micro_batches import (
    num_micro_batches_of,
    refuse_list_of_samples,
    split_batch,
    weights_of,
)
from lightning_multigpu.engine.one_process.gathering import gathered, on_device
from lightning_multigpu.engine.one_process.joint_loss import JointLoss
from lightning_multigpu.engine.one_process.module_replicas import ModuleReplicas
from lightning_multigpu.engine.one_process.replica_threads import ReplicaThreads
from lightning_multigpu.engine.replaced_attributes import replaced
from lightning_multigpu.engine.step_state import other_random_states
from lightning_multigpu.job.batch_feed import batches_to_skip, complete_resumed_epoch, global_batch_text
from lightning_multigpu.job.failure_watch import SIGTERM_STATUS, advise_resuming
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.pack_strategy import PackStrategy
from lightning_multigpu.strategies.steps.replica_metrics import ReplicaMetrics
from lightning_multigpu.strategies.steps.step_logs import Record, StepLogs, combined

if TYPE_CHECKING:
    import lightning.pytorch as pl


class DataParallelStrategy(PackStrategy, SingleDeviceStrategy):
    """Data parallel training in one process: each device computes a part of each batch, with a replica of the model.

    It is ``dp`` as in PyTorch Lightning 1.9. No process starts, ``world_size`` is 1, and the loader's ``batch_size`` is
    the global batch. On CPUs the replicas are threads, which share the memory of the parameters.

    Args:
        accelerator: the accelerator; usually left to the Trainer.
        parallel_devices: the devices of this machine; usually left to the Trainer.
        checkpoint_io: the plugin that reads and writes checkpoints; usually left to the Trainer.
        precision_plugin: the plugin behind the Trainer's ``precision``; usually left to the Trainer.
        loss_reduction: how ``training_step`` reduces the losses of a batch: "mean" over its samples (the parts of a
            batch are then weighted by their samples), "sum", or, for a mean over something else, a function from a part
            of the batch to its weight (its number of tokens, for example).
        activation_checkpointing: layers that backward computes again instead of keeping their activations, as in
            :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`. The step may then not draw random numbers
            from a generator that replicas share: torch's of the CPU, and those of Python and NumPy.

    Raises:
        ValueError: an option or a setting of the Trainer cannot be used with ``dp``; the message names the value, the
            limit and the fix. In a step: the batch cannot be cut into parts.
    """

    strategy_name = "dp"
    starts_ranks = False
    loss_scale = 1.0

    def __init__(
        self,
        *,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        loss_reduction: LossReduction = "mean",
        activation_checkpointing: Choice = False,
        **options: Any,
    ) -> None:
        option_checks.check_options(type(self).__name__, options, ["loss_reduction", "activation_checkpointing"])
        check_choice(activation_checkpointing)
        if not callable(loss_reduction):
            option_checks.check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self._options = {"loss_reduction": loss_reduction, "activation_checkpointing": activation_checkpointing}
        self.meter = Meter()
        # The Trainer sets these attributes if a strategy has them.
        self.parallel_devices = parallel_devices
        self.cluster_environment: ClusterEnvironment | None = None
        self.num_nodes = 1
        self._layer_sync: LayerSync | None = None
        self._loss_reduction: LossReduction = loss_reduction
        self._activation_checkpointing: Choice = activation_checkpointing
        self._recomputed: list[str] = []  # layers, by name
        self._threads: ReplicaThreads | None = None
        self._intra_op_threads: int | None = None
        self._seen: set[str] = set()  # the steps that have run

    @property
    def devices(self) -> list[torch.device]:
        """The device of each replica."""
        return self.parallel_devices or [self._root_device]

    @property
    @override
    def devices_per_rank(self) -> int:
        """Number of replicas."""
        return len(self.devices)

    @property
    @override
    def root_device(self) -> torch.device:
        return self.devices[0]

    # Starting and ending

    @override
    def on_exception(self, exception: BaseException) -> None:
        advise_resuming(None if self.lightning_module is None else self.lightning_module._trainer, exception)
        if isinstance(exception, SIGTERMException):
            exception.code = SIGTERM_STATUS  # Lightning sets none, and the process would seem to have succeeded

    @override
    def _configure_launcher(self) -> None:
        """Checks the settings of the Trainer; there is nothing to launch."""
        if self.num_nodes > 1:
            raise ValueError(
                f"num_nodes={self.num_nodes}: dp is one process, and drives the devices of one machine; pass "
                "num_nodes=1, or strategy='ring_ddp'"
            )
        environment = self.cluster_environment
        if environment is not None and environment.creates_processes_externally and environment.world_size() > 1:
            raise ValueError(
                f"{type(environment).__name__} has started {environment.world_size()} processes, and dp is one process "
                "with a replica for each device; start one process, or use strategy='ring_ddp'"
            )
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True: under dp BatchNorm keeps the statistics of the first replica's samples; pass "
                "sync_batchnorm=False, or use strategy='ring_ddp' on GPUs"
            )
        option_checks.check_devices(self.devices)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = self._module.trainer
        self.check_before_launch(trainer)
        if is_compiled(self._module):
            raise ValueError(
                "the module is compiled, for the tensors of one device; pass the module without torch.compile, or use "
                "devices=1 without strategy='dp'"
            )
        if trainer.state.fn == TrainerFn.FITTING and not self._module.automatic_optimization:
            raise ValueError(
                "automatic_optimization=False: under dp each replica runs training_step on a part of the batch, and "
                "would step the optimizers by itself; use automatic optimization, or strategy='ring_ddp'"
            )

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if len(self.devices) > 1 and trainer.state.fn == TrainerFn.FITTING:
            check_embeddings(self._module)
        super().setup(trainer)
        self._metrics = ReplicaMetrics(self.devices)
        self._replicas = ModuleReplicas(self._module, self.devices, self._metrics.substitute)
        self._threads = ReplicaThreads(self.devices)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        self._recomputed = selected_layers(self._module, self._activation_checkpointing) if is_fit else []
        if self.root_device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            self._intra_op_threads = torch.get_num_threads()
            torch.set_num_threads(max(1, self._intra_op_threads // len(self.devices)))

    @override
    def teardown(self) -> None:
        if self._threads is not None:
            self._threads.close()
            self._threads = None
        if self._intra_op_threads is not None:
            torch.set_num_threads(self._intra_op_threads)
            self._intra_op_threads = None
        super().teardown()

    # Data

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """In training, wraps the loader so that a resumed run goes on in the middle of an epoch."""
        trainer = self._module.trainer
        if not trainer.training:
            return dataloader
        forget_loader_states(trainer)
        loader, batches = distribute_batches(dataloader, num_replicas=1, rank=0, even=False)
        return ContinuedLoader(loader, batches, lambda: batches_to_skip(trainer))

    # Steps

    def _in_context(self, hook: str, context: str, *args: Any, **kwargs: Any) -> Any:
        with getattr(self.precision_plugin, context)():
            return self._step(hook, *args, **kwargs)

    training_step = partialmethod(_in_context, "training_step", "train_step_context")
    validation_step = partialmethod(_in_context, "validation_step", "val_step_context")
    test_step = partialmethod(_in_context, "test_step", "test_step_context")
    predict_step = partialmethod(_in_context, "predict_step", "predict_step_context")

    def _step(self, hook: str, batch: Any, *others: Any, **options: Any) -> Any:
        """Runs a step of the module on the parts of a batch, one for each replica; returns the output for the batch.

        ::

            batch of 7 samples -- scatter --> 4 samples     3 samples
            module          -- replicate -->  replica 0     replica 1        parameters, buffers, attributes
                                              step          step             each in its own thread
            loss           <--- gather -----  4/7 loss0  +  3/7 loss1        logs, metrics and outputs likewise
            gradients      <--- reduce -----  backward      backward         each in its own thread: see JointLoss
        """
        module = self._module
        assert self._threads is not None
        recomputed = self._recomputed if hook == "training_step" else []
        parts = self._scattered(batch)
        if len(parts) == 1:
            with recomputing(recomputed, module):
                return getattr(module, hook)(parts[0], *others, **options)
        with self._travelling("broadcast", self._replicas.size_bytes(), copies=len(parts) - 1):
            replicas = self._replicas.make(len(parts))
        for replica, device in zip(replicas[1:], self.devices[1:], strict=False):
            tell_device(replica, device)
        calls = [
            partial(_call_recorded, replica, hook, part, *others, **options)
            for replica, part in zip(replicas, parts, strict=True)
        ]
        generators, parameters = _generators(), self._noted(hook)
        with recomputing(recomputed, *replicas), replaced(forward_ad, enter_dual_level=_refuse_levels):
            outputs, records = zip(*self._threads.run(calls, hook), strict=True)
        has_drawn = _generators() != generators
        self._check_unchanged(hook, parameters)
        self._metrics.merge()
        sizes = [leading_size(part) or 1 for part in parts]
        if hook != "training_step":
            self._log(hook, records, sizes, [None] * len(parts), sizes)
            return self._gathered(outputs, sizes)
        losses = [output.get("loss") if isinstance(output, Mapping) else output for output in outputs]
        tensors = [loss for loss in losses if isinstance(loss, Tensor)]
        if len(tensors) < len(losses):
            output = _without_loss(outputs, losses)
            self._log(hook, records, sizes, [None] * len(parts), sizes)
            return output
        weights = weights_of(parts, self._loss_reduction)
        logged = [None if self._loss_reduction == "mean" else loss.detach() for loss in tensors]
        self._log(hook, records, weights if callable(self._loss_reduction) else sizes, logged, weights)
        loss = JointLoss(
            tensors,
            weights,
            [[parameter for parameter in replica.parameters() if parameter.requires_grad] for replica in replicas],
            self._threads,
            partial(self._travelling, "reduce", copies=len(parts) - 1),
            has_drawn=has_drawn,
        ).value()
        if not isinstance(outputs[0], Mapping):
            return loss
        further = [{key: value for key, value in output.items() if key != "loss"} for output in outputs]
        return {"loss": loss, **self._gathered(further, sizes)}

    def _noted(self, hook: str) -> dict[str, tuple[Any, ...]]:
        """Numbers that change with the parameters, by name; those of their values before the first call of a step."""
        named = {name: p for name, p in self._module.named_parameters() if p.layout == torch.strided}
        values = [] if hook in self._seen else [p.detach().contiguous() for p in named.values()]
        return dict(zip(named, zip_longest(marks_of(named.values()), checksums(values)), strict=True))

    def _check_unchanged(self, hook: str, before: Mapping[str, Any]) -> None:
        """Raises ValueError if the step has changed parameters, as layers do that set themselves up in it."""
        changed = [name for name, noted in self._noted(hook).items() if before.get(name, noted) != noted]
        self._seen.add(hook)
        if changed:
            raise ValueError(
                f"{hook} changes {', '.join(changed[:3])}{' and others' if changed[3:] else ''}: under dp each replica "
                "has a part of the batch, and would change the parameters by its own samples, as layers do that set "
                "themselves up from their first batch. Set them up before the fit, with a forward pass over a batch, "
                "or change parameters in on_train_batch_start"
            )

    def _scattered(self, batch: Any) -> list[Any]:
        """The parts of the batch, at most one for each device, on their devices."""
        if len(self.devices) == 1:
            return [batch]
        if leading_size(batch) is None:
            raise ValueError(
                f"the batch is a {type(batch).__name__} without a tensor: dp cannot cut it into samples for the "
                f"{len(self.devices)} devices; have collate_fn make tensors with a dimension of samples, "
                "or use devices=1"
            )
        refuse_list_of_samples(batch)
        num_bytes = sum(map(size_bytes, tensors_in(batch)))
        others = 1 - 1 / len(self.devices)
        with self._travelling("scatter", num_bytes, copies=0 if self.root_device.type == "cpu" else others):
            parts = split_batch(batch, num_micro_batches_of(batch, len(self.devices)))
            moved = [
                move_data_to_device(part, device) for part, device in zip(parts[1:], self.devices[1:], strict=False)
            ]
        return [parts[0], *moved]

    def _gathered(self, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
        num_bytes = sum(map(size_bytes, tensors_in(outputs)))
        with self._travelling("gather", num_bytes, copies=1 - 1 / len(outputs)):
            return gathered(outputs, sizes, self.root_device)

    def _log(
        self,
        hook: str,
        records: Sequence[Sequence[Record]],
        sizes: Sequence[float],
        losses: Sequence[Tensor | None],
        loss_weights: Sequence[float],
    ) -> None:
        """Logs the replicas' logs on the module, each name once."""
        here = [[replace(each, value=on_device(each.value, self.root_device)) for each in part] for part in records]
        StepLogs(self._module).replay(combined(here, sizes, losses, loss_weights), hook)

    def _travelling(self, operation: str, size_bytes: int, *, copies: float) -> AbstractContextManager[object]:
        """Meters the transfer within the block, which sends ``copies`` times its bytes between the devices."""
        sent = round(size_bytes * copies)
        on_gpus = self.root_device.type == "cuda"
        return self.meter.blocking(
            operation,
            group="devices",
            group_size=len(self.devices),
            size_bytes=size_bytes,
            sent_bytes=sent,
            memory_bytes=0 if on_gpus else sent,
            on_stream=on_gpus,
        )

    # Training

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        trainer = self._module.trainer
        complete_resumed_epoch(trainer)
        text = global_batch_text([full_batch_size(trainer.train_dataloader)], trainer)
        rank_zero_info(f"{text}; dp cuts each batch into parts for {len(self.devices)} devices")
        self.meter.discard()

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self.meter.end_step()
        return output


def _generators() -> tuple[Any, ...]:
    """The states of the generators that all replicas share, to compare."""
    return (torch.get_rng_state().numpy().tobytes(), *other_random_states())


def _refuse_levels() -> Any:
    raise RuntimeError(
        "forward-mode derivatives (torch.autograd.forward_ad, torch.func.jvp) under dp: torch has one level for all "
        "threads, and replicas are threads of one process. Use strategy='ring_ddp', or reverse mode "
        "(torch.autograd.grad, torch.func.vjp)"
    )


def _call_recorded(replica: nn.Module, hook: str, part: Any, *others: Any, **options: Any) -> tuple[Any, list[Record]]:
    step: Callable[..., Any] = getattr(replica, hook)
    with StepLogs(replica).recording(pass_on=False) as records:  # type: ignore[arg-type]  # a LightningModule
        return step(part, *others, **options), records


def _without_loss(outputs: Sequence[Any], losses: Sequence[Any]) -> Any:
    """The output of a training step if a replica returns no tensor as its loss."""
    missing = [number for number, loss in enumerate(losses) if loss is None]
    if missing and len(missing) < len(losses):
        raise ValueError(
            f"training_step returns no loss on replica {', '.join(map(str, missing))} of {len(losses)}, and a loss on "
            "the others: under dp a batch is skipped as a whole; return a loss of 0 that depends on the parameters "
            "where a part of a batch is to be left out"
        )
    return outputs[0]  # None skips the batch; Lightning refuses anything else
