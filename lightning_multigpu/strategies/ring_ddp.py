"""The strategy of data parallel training with a ring all-reduce."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu._lightning_internals import HOOKS_BEFORE_STEP
from lightning_multigpu.communication.compression import Compressor
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.tensors import alike, apply_flat
from lightning_multigpu.engine.data_parallel.averaging import ModelAverager
from lightning_multigpu.engine.data_parallel.gradient_transport import AUTO, GradientTransport, compressor_of, pieces_of
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer
from lightning_multigpu.engine.data_parallel.trained_parameters import TrainedParameters
from lightning_multigpu.engine.gradient_check import GradientCheck, Verdict
from lightning_multigpu.engine.micro_batches import cloned
from lightning_multigpu.engine.step_state import seed_of, set_random_state
from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.base import CHECKPOINT_KEY, MultiGPUStrategy
from lightning_multigpu.strategies.steps.dry_run import gradient_rtol, unlogged_loss, without_trace

if TYPE_CHECKING:
    import lightning.pytorch as pl

_NCCL_ALGORITHM = "NCCL_ALGO"


class RingDDPStrategy(MultiGPUStrategy, DDPStrategy):
    """Data parallel training: each rank computes the gradients of its share of the batch, and a ring averages them.

    The all-reduce of the gradients runs while backward still computes. On CPU tensors the ring is this pack's own
    (:mod:`lightning_multigpu.communication.ring`); on GPUs NCCL moves the gradients. In a ring each rank sends 2(N-1)/N
    times the size of the gradients per optimizer step. Options of Lightning's ``DDPStrategy`` keep their names and
    meaning; communication hooks work on CPU tensors too.

    Args:
        bucket_cap_mb: size in MiB of the buckets in which gradients travel. Smaller buckets start earlier, larger ones
            cost less each. By default 4 between hosts and 25 on one host, more for models with many parameters, and
            DDP's own size where NCCL or a communication hook moves the gradients. "auto" measures the all-reduce at the
            start and chooses; sums over more than two ranks may then differ in their last bits from run to run.
        find_unused_parameters: in every step, find the parameters on which the loss does not depend.
        gradient_as_bucket_view: make ``.grad`` a view of the bucket, which saves a copy of the gradients. A ``.grad``
            that your code keeps from one step to the next is then overwritten.
        static_graph: promise that every step uses the same parameters in the same order.
        broadcast_buffers: give every rank the buffers of rank 0 (BatchNorm's statistics) before each synchronised
            step and before validation.
        average_every: with k > 1, ranks take k optimizer steps with their own gradients, then average weights and
            optimizer state (local SGD); they also average before validation, before a checkpoint and at the end. This
            is another algorithm than that of one device, with 1/k of the traffic. 1 averages gradients in every step.
        compression: compress the gradients between hosts: "fp16", "bf16", "int8", "topk", "powersgd", or a mapping
            with such a ``name`` and the options of that compressor. "auto" measures at the start of a fit and chooses
            no compression, "bf16" or "int8"; the others change training more and are never chosen.
        compress_inside_hosts: also compress between ranks of one host; they then do not use shared memory.
        shared_memory: let ranks of one host reduce gradients through shared memory instead of sockets. The buckets lie
            in ``/dev/shm``; where that is too small for the gradients of a host's ranks, gradients are copied instead,
            with a warning.
        nccl_algorithm: NCCL's algorithm for all-reduces on GPUs during the run: "ring" or "tree"; None lets NCCL choose
            for each size. The bytes that the meter reports are those of a ring.
        check_loss: before the first step, check that the gradients of two halves of each rank's first batch add up to
            those of the whole batch, as they do unless the loss couples the samples of a batch; see
            :class:`.GradientCheck`. Has no effect in manual optimization; excludes ``static_graph``.
        ddp_comm_state: the state that is passed to ``ddp_comm_hook``.
        ddp_comm_hook: a communication hook that replaces the ring, on CPUs as well.
        ddp_comm_wrapper: a wrapper for the hook, such as torch's ``fp16_compress_wrapper``.
        model_averaging_period: optimizer steps between two averages of the model, with the hook of post-local SGD.
        options: options of :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.

    Raises:
        ValueError: an option is out of its range; with ``check_loss``, on all ranks, the gradients do not add up.
    """

    name_with_spawn: ClassVar[str | None] = "ring_ddp_spawn"

    def __init__(
        self,
        *,
        bucket_cap_mb: float | Literal["auto"] | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        average_every: int = 1,
        compression: str | Mapping[str, Any] | Compressor | None = None,
        compress_inside_hosts: bool = False,
        shared_memory: bool = True,
        nccl_algorithm: Literal["ring", "tree"] | None = None,
        check_loss: bool = False,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        **options: Any,
    ) -> None:
        option_checks.check_options(type(self).__name__, options, type(self).option_names())
        option_checks.check_bools(
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            broadcast_buffers=broadcast_buffers,
            compress_inside_hosts=compress_inside_hosts,
            shared_memory=shared_memory,
            check_loss=check_loss,
        )
        if bucket_cap_mb not in ("auto", None):
            option_checks.check_positive("bucket_cap_mb", bucket_cap_mb)
        option_checks.check_positive("average_every", average_every, whole=True)
        if nccl_algorithm is not None:
            option_checks.check_choice("nccl_algorithm", nccl_algorithm, ("ring", "tree"))
        gradients = {"ddp_comm_hook": ddp_comm_hook, "compression": compression}
        given = [f"{name}={value!r}" for name, value in gradients.items() if value is not None]
        if average_every > 1 and given:
            raise ValueError(
                f"average_every={average_every} and {given[0]}: that works on gradients, which do not travel when "
                "models are averaged; leave one of the two out"
            )
        if model_averaging_period is not None and options.get("check_replicas_every_n_steps"):
            raise ValueError(
                f"check_replicas_every_n_steps={options['check_replicas_every_n_steps']} and "
                f"model_averaging_period={model_averaging_period}: ranks are meant to differ; leave one of the two out"
            )
        if check_loss and static_graph:
            raise ValueError(
                "check_loss=True and static_graph=True: DDP would count the check's gradients among those of the first "
                "step; leave one of the two out"
            )
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: both choose how gradients travel; leave one of the two out")
        super().__init__(
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            **options,
        )
        self._broadcast_buffers = broadcast_buffers
        self._transport = GradientTransport(
            bucket_cap_mb=bucket_cap_mb,
            compressor=compressor_of(compression),
            compress_inside_hosts=compress_inside_hosts,
            shared_memory=shared_memory,
        )
        self._ddp_options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        self._nccl_algorithm = nccl_algorithm
        self._check_loss = check_loss
        self._is_checked = False
        self._reducer: GradientReducer | None = None
        self._trained: TrainedParameters | None = None
        self._compressed: HierarchicalAllReduce | None = None
        self._average_every = average_every
        self._averager: ModelAverager | None = None

    @property
    @override
    def options(self) -> dict[str, Any]:
        return {
            **super().options,
            "bucket_cap_mb": self._transport.bucket_cap_mb,
            **self._ddp_options,
            "broadcast_buffers": self._broadcast_buffers,
            "average_every": self._average_every,
            **self._transport.options,
            "nccl_algorithm": self._nccl_algorithm,
            "check_loss": self._check_loss,
        }

    @override
    def environment_variables(self) -> dict[str, str]:
        # For all-reduces only: other collectives of NCCL may have no tree.
        return {} if self._nccl_algorithm is None else {_NCCL_ALGORITHM: f"allreduce:{self._nccl_algorithm}"}

    @override
    def _setup_model(self, model: Module) -> DistributedDataParallel:
        assert self.groups is not None
        self._buffers = self.metered(self.collectives.data.group, "data")
        self._reducer, bucket_cap_mb = self._transport.open(
            self._module,
            self.groups,
            self.meter,
            self._buffers,
            ranks_per_host=self.num_processes,
            hook=self._user_hook(),
            info=rank_zero_info,
            warn=rank_zero_warn,
        )
        self._compressed = self._reducer.all_reduce if self._reducer.compresses else None
        if self._average_every > 1:
            self._averager = ModelAverager(self._average_every, self._reducer.average)
        return self._wrap(model, bucket_cap_mb)

    def _wrap(self, model: Module, bucket_cap_mb: float | None, **options: Any) -> DistributedDataParallel:
        assert self._reducer is not None
        self._trained = TrainedParameters(self._module)
        self._pl_static_graph_delay_done = False
        wrapped = DistributedDataParallel(
            model,
            device_ids=self.determine_ddp_device_ids(),
            process_group=self.collectives.data.group,
            bucket_cap_mb=bucket_cap_mb,
            **self._ddp_options,
            **options,
        )
        # Done here, where the meter sees it, and never in the middle of validation. Set after construction, in which
        # DDP sends rank 0's buffers: torch 2.13 renamed the flag, and the old argument would leave them as they are.
        wrapped.broadcast_buffers = wrapped.forward_sync_buffers = False
        self._reducer.attach(wrapped, pieces_of(self._module))
        return wrapped

    @override
    def _register_ddp_hooks(self) -> None:
        """Does nothing: the reducer was attached when the module was wrapped."""

    def _user_hook(self) -> tuple[Any, Callable[..., Any]] | None:
        hook = self._ddp_comm_hook
        if hook is not None and self._ddp_comm_wrapper is not None:
            hook = self._ddp_comm_wrapper(hook)
        return None if hook is None else (self._ddp_comm_state, hook)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._ranks_may_differ:
            return  # ranks step with gradients of their own
        self._watch_given_gradients()
        if (given := self._given) is None:
            return
        plugin = self.precision_plugin
        post_backward, hooks_before_step = plugin.post_backward, getattr(plugin, HOOKS_BEFORE_STEP)

        def noted(*args: Any) -> Tensor:
            if isinstance(self.model, DistributedDataParallel) and self.model.require_backward_grad_sync:
                self._note_averages()
            return post_backward(*args)

        def averaged(module: Module, optimizer: Optimizer) -> None:
            hooks_before_step(module, optimizer)
            ignored = set(getattr(self._module, "_ddp_params_and_buffers_to_ignore", ()))
            left_out = {parameter for name, parameter in self._module.named_parameters() if name in ignored}
            listed = (parameter for group in optimizer.param_groups for parameter in group["params"])
            given.average(parameter for parameter in listed if parameter not in left_out)

        vars(plugin).update({"post_backward": noted, HOOKS_BEFORE_STEP: averaged})

    @override
    def _configure_launcher(self) -> None:
        if self._average_every > 1 and getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"average_every={self._average_every} with precision={self.precision_plugin.precision!r}: ranks that "
                "step alone would each scale their losses differently; use precision='bf16-mixed' or '32-true'"
            )
        super()._configure_launcher()
        self._check_nccl_algorithm()

    def _check_nccl_algorithm(self) -> None:
        if self._nccl_algorithm is None:
            return
        given = f"nccl_algorithm={self._nccl_algorithm!r}"
        run, compressor = self.run_context, self._transport.compressor
        if run.device_type != "cuda" or (run.backend or "nccl") != "nccl":
            over = run.backend or ("gloo" if run.device_type == "cpu" else "nccl")
            raise ValueError(f"{given}: gradients on {run.device_type!r} travel over {over!r} here; leave it out")
        if compressor not in (None, AUTO):
            raise ValueError(f"{given} and compression={compressor!r}: compressed gradients do not travel over NCCL")
        if _NCCL_ALGORITHM in os.environ:
            raise ValueError(
                f"{given} and {_NCCL_ALGORITHM}={os.environ[_NCCL_ALGORITHM]} in the environment: leave one of "
                "the two out"
            )

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        # Local SGD averages all weights, frozen or not.
        if self._trained is not None and self._averager is None and self._trained.has_changed(self.optimizers):
            self._wrap_again()

    def _wrap_again(self) -> None:
        """Wraps the module again, to average gradients of the parameters that are trained from now on; a collective.

        torch's wrapper averages only gradients of parameters that were trainable when it was made.
        """
        assert self._reducer is not None
        assert self._trained is not None
        assert self.model is not None
        self._share_changes(self._trained)
        model: Module = self.model
        if isinstance(model, DistributedDataParallel):
            model = model.module
            del self.model.reducer, self.model.logger  # with them go its buckets
            self._reducer.detach()
        is_trained = any(parameter.requires_grad for parameter in self._module.parameters())
        if is_trained:
            bucket_cap_mb = self._transport.bucket_cap_mb_of(
                self._module,
                self._reducer,
                self.root_device,
                rank_zero_info,
                is_hooked=self._ddp_comm_hook is not None,
            )
            self.model = self._wrap(model, bucket_cap_mb, init_sync=False)
        else:
            self.model, self._trained = model, TrainedParameters(self._module)

    def _check_averaged(self, is_complete: bool) -> None:
        """Checks that this step averages every gradient; averages those of parameters unfrozen within it."""
        if not (isinstance(self.model, DistributedDataParallel) and self.model.require_backward_grad_sync):
            return
        assert self._reducer is not None
        assert self._trained is not None
        if not is_complete:
            missing = self._trained.without_gradient()
            listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise RuntimeError(
                f"the loss of this step does not depend on {listed or 'every parameter'}, whose gradients the other "
                "ranks wait for. If that is intended, use RingDDPStrategy(find_unused_parameters=True); freeze layers "
                "before the step, in on_train_epoch_start or on_train_batch_start"
            )
        missed = self._trained.missed(self.optimizers)
        if missed:
            self._compare_changes(dict.fromkeys(missed, "trained"), "have no gradients of the same parameters")
            for gradients in alike(parameter.grad for parameter in missed.values() if parameter.grad is not None):
                apply_flat(self._reducer.average, gradients)

    @property
    @override
    def loss_scale(self) -> float:
        alone = self._averager is not None and self.feed.counts
        return 1.0 if alone else super().loss_scale

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._averager is not None:
            assert isinstance(self.model, DistributedDataParallel)
            self.model.require_backward_grad_sync = False
        if self._buffers_due:
            self._synchronise_buffers()
        self._buffers_due = isinstance(self.model, DistributedDataParallel) and self.model.require_backward_grad_sync
        if self._check_loss and not self._is_checked:
            self._is_checked = True
            self._check_gradients(*args, *kwargs.values())
        return super().training_step(*args, **kwargs)

    @property
    @override
    def replicas_differ(self) -> bool:
        return self._model_averager is not None or (self._averager is not None and self._averager.steps_alone > 0)

    @property
    @override
    def _ranks_may_differ(self) -> bool:
        return self._averager is not None or self._model_averaging_period is not None

    def _check_gradients(self, batch: Any, *others: Any) -> None:
        module, plugin, scale = self._module, self.precision_plugin, self._loss_scaler_scale()
        if not module.automatic_optimization:
            rank_zero_warn("check_loss=True has no effect in manual optimization, where only the step knows its losses")
            return

        def run(parts: Sequence[Any], weights: Sequence[float], seed: int) -> None:
            for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
                set_random_state(seed_of(seed, number, self.global_rank), self.root_device)
                step = functools.partial(module.training_step, cloned(part), *others)
                loss = unlogged_loss(plugin, module, step)
                if loss is not None:
                    (loss * (weight * scale)).backward()

        check = GradientCheck(
            module,
            dict(module.named_parameters()),
            run,
            traceless=lambda: without_trace(module),
            gather=self.gather_objects,
            loss_reduction=self.feed.loss_reduction,
            rtol=gradient_rtol(module, self.root_device),
        )
        with self.meter.unrecorded(), self.recomputing():
            finding = check.find(batch, 2)
        if finding is None or finding.verdict == Verdict.UNCLEAR:
            reason = "gradients are not finite" if finding else "a rank's first batch cannot be cut into two halves"
            rank_zero_info(
                f"check_loss=True: whether the loss couples the samples of a batch cannot be told: {reason}."
            )
        elif finding.verdict == Verdict.COUPLED:
            raise ValueError(
                f"training_step couples the samples of a batch: {finding.describe()}. Each rank has a share of the "
                "global batch, so that training follows other gradients than one device's. A contrastive loss over "
                "all ranks gathers their embeddings with self.all_gather(embeddings, sync_grads=True); mix samples in "
                "the loader's collate_fn. check_loss=False accepts the difference, and is needed after all_gather too"
            )

    @override
    def on_optimizer_step_end(self) -> None:
        super().on_optimizer_step_end()
        if self._compressed is not None:
            self._compressed.end_step(self._loss_scaler_scale())
        if self._averager is not None and self._averager.stepped():
            self._settle_values()

    @override
    def _further_state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        if self._compressed is None or "optimizer_states" not in checkpoint or self.failure_watch.failed:
            return {}
        shapes = {name: tuple(parameter.shape) for name, parameter in self._module.named_parameters()}
        return {CHECKPOINT_KEY: {"compression": self._compressed.state_dict(shapes)}}

    @override
    def _load_further_state(self, checkpoint: Mapping[str, Any]) -> None:
        state = checkpoint.get(CHECKPOINT_KEY, {}).get("compression")
        if self._compressed is not None and state is not None:
            self._compressed.load_state_dict(state)

    @override
    def on_train_end(self) -> None:
        if self._compressed is not None and self._compressed.compressed is not None:
            rank_zero_info(self._compressed.compressed.summary())
        super().on_train_end()

    @override
    def held_bytes(self) -> HeldBytes | None:
        held = super().held_bytes()
        if held is None or self._trained is None or self._ddp_options["gradient_as_bucket_view"]:
            return held
        buckets = sum(parameter.nbytes for parameter in self._trained.averaged)
        return replace(held, gradients_bytes=held.gradients_bytes + buckets)

    @override
    def _settle_values(self) -> None:
        if self._averager is None or self.failure_watch.failed:
            return  # a failed run saves this rank's own weights
        if self._averager.average(self._module.parameters(), self.optimizers):
            self._synchronise_buffers()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._reducer is not None:
            self._check_averaged(self._reducer.finish())

    @override
    def teardown(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        if self._given is not None:
            for name in ("post_backward", HOOKS_BEFORE_STEP):
                vars(self.precision_plugin).pop(name, None)
            self._given = None
        self._averager = self._compressed = self._trained = None
        super().teardown()
