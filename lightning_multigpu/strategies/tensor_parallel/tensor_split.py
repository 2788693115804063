"""The strategy of tensor parallel training: ranks split the weights and the work of layers."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, partialmethod
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from lightning_multigpu._lightning_internals import plain_optimizer
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.micro_batches import cloned
from lightning_multigpu.engine.optimizer_state import release, watch
from lightning_multigpu.engine.step_state import other_random_states, torch_random_states
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.parts import own_state, whole
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.engine.tensor_split.trials import TracelessStep
from lightning_multigpu.planning.split_plan import SplitPlan
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.ring_ddp import RingDDPStrategy
from lightning_multigpu.strategies.run_view import RunView
from lightning_multigpu.strategies.steps.dry_run import rounding, traceless, unlogged_loss
from lightning_multigpu.strategies.steps.plugin_methods import PluginMethods
from lightning_multigpu.strategies.steps.same_batches import (
    are_equal,
    builds_layers_later,
    gather_metrics_by,
    same_batch,
    share_random_states,
    write_no_predictions,
)
from lightning_multigpu.strategies.tensor_parallel.split_layers import (
    Plan,
    SplitLayers,
    check_patterns,
    check_plan,
    check_uncompiled,
    open_tensor_group,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl


class TensorSplitStrategy(RingDDPStrategy):
    """Tensor parallel training: each rank holds and computes a part of each large layer, of the same batch.

    The layers are split on the first training batch, where ``training_step`` computes on parts of tensors; see
    :class:`.Trials`. Its gradients are compared with those of whole layers before anything is trained; see
    :func:`.proved_split`. At the end of the fit your module's layers are whole again; checkpoints always are.

    With fewer tensor ranks than ranks, several tensor groups train on their parts of every global batch. The ranks at
    the same place of each group average their gradients as under ``ring_ddp``, and have its options.

    Args:
        tensor_parallel_size: ranks that split each layer; by default all ranks.
        plan: the layers to split. "auto" finds pairs of linear layers, attention, and embeddings with their heads. Or a
            mapping from patterns of names ("encoder.*.up") to "column" (outputs are split), "row" (inputs are split),
            "vocab" (rows of an embedding) and "head" (a column layer whose outputs are logits). A plan that changes
            results raises an error.
        verify_steps: 1 to compare, before the first batch trains, its gradients on whole layers with those on split
            ones; 0 not to.
        options: options of :class:`RingDDPStrategy` and of
            :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.

    Raises:
        ValueError: an option is out of its range; before the first step, no layer can be split, the plan does not fit,
            an optimizer needs whole tensors, or split layers have other gradients than whole ones.
    """

    name_with_spawn = None

    def __init__(
        self,
        *,
        tensor_parallel_size: int | None = None,
        plan: Plan = "auto",
        verify_steps: int = 1,
        **options: Any,
    ) -> None:
        if verify_steps not in (0, 1):
            raise ValueError(f"verify_steps={verify_steps!r}: pass 1 to compare a step with one on whole layers, or 0")
        if tensor_parallel_size is not None:
            option_checks.check_number("tensor_parallel_size", tensor_parallel_size, whole=True)
        check_plan(plan)
        super().__init__(**options)
        if (compressor := self._transport.compressor) is not None:
            raise ValueError(
                f"compression={compressor!r}: parameters that the ranks of a tensor group hold alike would drift "
                "apart, compressed with other parts on each rank; leave it out, or use "
                "HybridStrategy(pipeline_parallel_size=1, compression=...)"
            )
        if (outer := self._given["outer_optimizer"]) is not None:
            raise ValueError(f"outer_optimizer={outer!r}: its weights and momentum are not split; leave it out")
        self._options |= option_checks.own_options(TensorSplitStrategy, locals())
        del self._options["compression"]  # it has none
        self._asked_size = tensor_parallel_size
        self._plan: Plan = plan
        self._verify_steps = verify_steps
        # During a run:
        self._tensor: TensorGroup | None = None
        self._peers: MeteredGroup | None = None
        self._layers: SplitLayers | None = None
        self._split_plan: SplitPlan | None = None

    @property
    def tensor_parallel_size(self) -> int:  # type: ignore[override]
        """Ranks that split each layer."""
        return self._asked_size or self.num_nodes * self.num_processes

    @property
    def _split_layers(self) -> SplitLayers | None:
        """The layers, once they are split."""
        return None if self._layers is None or self._layers.split is None else self._layers

    # Setting up

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        world, size = self.num_nodes * self.num_processes, self.tensor_parallel_size
        if size < 2:
            raise ValueError(
                f"tensor_parallel_size={size}: layers are split over 2 ranks or more; pass devices=2, or "
                "strategy='ring_ddp' to train on whole layers"
            )
        if world % size:
            raise ValueError(f"tensor_parallel_size={size} does not divide the {world} ranks; pass a divisor of them")

    @override
    def check_before_launch(self, trainer: pl.Trainer) -> None:
        super().check_before_launch(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        module = trainer.lightning_module
        if not builds_layers_later(module):
            check_patterns(self._plan, module)
            check_uncompiled(module)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        data_group = self.collectives.data.group
        gather_metrics_by(lambda tensor, group: gather_all_tensors(tensor, data_group), self._module, self._undo)

    @override
    def model_to_device(self) -> None:
        super().model_to_device()
        module = self._module
        self._share_values(self.collectives.world)
        first = self.global_rank - self.tensor_parallel_rank
        hosts = {rank // self.num_processes for rank in (first, first + self.tensor_parallel_size - 1)}
        shared_memory = self._transport.shared_memory and len(hosts) == 1  # emulated hosts have one /dev/shm
        self._tensor, self._peers = open_tensor_group(self, shared_memory=shared_memory)
        self._tensor.shows_parts = False
        self._layers = SplitLayers(module, self._tensor, self._plan)
        tensor, device = self._tensor, self.root_device
        methods = PluginMethods(  # a rank owns its parts, the first one whole gradients
            self.precision_plugin,
            owned=lambda held: [p for p in held if tensor.rank == 0 or split_of(p) is not None],
            reduce_sum=lambda number: tensor.all_reduce(number.to(device), "norm or overflow"),
        )
        self._undo.callback(methods.end)
        self._undo.callback(self._layers.follow_updates(self.precision_plugin, self._watch_states).end)
        self._agree_on_random_states()

    @override
    def _setup_model(self, model: Module) -> Any:
        if self.data_parallel_size > 1:
            self._open()
        return model  # DDP's buckets are made of the parts, once layers are split

    @override
    def _showing_parts(self) -> AbstractContextManager[None]:
        return nullcontext() if self._tensor is None else self._tensor.showing(parts=True)

    def _agree_on_random_states(self) -> None:
        """Gives every rank of a tensor group the random states of its first one, where a hook has made them differ.

        A step may decide by a random number what it runs, and ranks that run other layers wait for each other forever.
        """
        peers = self._peers
        if peers is None or self.failure_watch.failed:
            return
        if not are_equal(_checksum_of_random_states(self.root_device), peers):
            share_random_states(self.root_device, lambda mine: peers.broadcast_object(mine, peers.first_rank))

    @override
    def teardown(self) -> None:
        release(map(plain_optimizer, self.optimizers))
        if self._tensor is not None:
            self._tensor.shows_parts = True
        module = self.lightning_module
        layers = self._split_layers
        if layers is not None and module is not None and module.trainer.state.status == TrainerStatus.RUNNING:
            layers.make_whole(self.optimizers)
        self._undo.close()
        self._tensor = self._peers = self._layers = None
        super().teardown()

    # The split

    def _decide(self, *args: Any) -> None:
        """Splits the module, on the first training batch; a collective of the world."""
        module = self._module
        assert self._layers is not None
        assert self._tensor is not None
        batch, *others = args

        def step() -> Any:
            return unlogged_loss(self.precision_plugin, module, lambda: module.training_step(cloned(batch), *others))

        with self.meter.unrecorded(), self.steps.recomputing():
            plan = self._layers.decide(
                TracelessStep(
                    module,
                    self._tensor,
                    step,
                    traceless=partial(traceless, module),
                    gather=self.gather_objects,
                    optimizes_manually=not module.automatic_optimization,
                ),
                self.optimizers,
                rtol=rounding(module, self.root_device) if self._verify_steps else None,
            )
        self._split_plan = plan
        rank_zero_info(str(plan))
        if self.reducer is not None:
            self.model = self._wrapped(module)

    @override
    def run_view(self) -> RunView:
        return replace(super().run_view(), split_plan=lambda: self._split_plan)

    # Training

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._agree_on_random_states()
        if self._split_layers is None:
            self._decide(*args, *kwargs.values())
        return tree_map(whole, super().training_step(*args, **kwargs))

    @override
    def _updating(self) -> AbstractContextManager[None]:
        assert self._layers is not None
        return self._layers.stepping()

    @override
    def _watch_states(self) -> None:
        if (layers := self._layers) is not None:
            for optimizer in map(plain_optimizer, self.optimizers):
                watch(optimizer, lambda parameter: parameter, layers.shown_state, own_state)

    @override
    def _check_new(self, optimizers: Sequence[Optimizer]) -> None:
        super()._check_new(optimizers)
        if (layers := self._split_layers) is not None:
            layers.check_optimizers(optimizers)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves the batch to the device; if it differs in a tensor group, all ranks get the first one's."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._peers is None or self.failure_watch.failed:
            return batch
        return same_batch(batch, self._peers, device or self.root_device)

    @override
    def _held_in_common(self) -> list[tuple[MeteredGroup, Iterable[tuple[str, Tensor]]]]:
        assert self._peers is not None
        whole = [(name, p) for name, p in self._module.named_parameters() if split_of(p) is None]
        return [*super()._held_in_common(), (self._peers, whole)]

    # Evaluation

    def _evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        self._agree_on_random_states()
        return tree_map(whole, getattr(super(), step)(*args, **kwargs))

    validation_step = partialmethod(_evaluate, "validation_step")
    test_step = partialmethod(_evaluate, "test_step")
    predict_step = partialmethod(_evaluate, "predict_step")

    def whole(self, tensor: Tensor) -> Tensor:
        """The gathered, plain tensor of a parameter, a hidden activation, a gradient or a state that is split.

        Code gets the same values without it; it names the place where ranks communicate. A collective of the tensor
        group: all of its ranks have to call it. Gradients flow back to each rank's part. A tensor that is not split is
        returned as it is.
        """
        return whole(tensor)  # type: ignore[no-any-return]

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        if self.tensor_parallel_rank > 0:  # each prediction is written once
            write_no_predictions(self._module.trainer, self._undo)

    # Checkpoints

    @property
    @override
    def _needs_others(self) -> bool:
        return self._split_layers is not None

    @override
    def _whole_weights(self, state: dict[str, Any]) -> dict[str, Any]:
        layers = self._split_layers
        return state if layers is None else layers.whole_state_dict(state)

    @override
    def _whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._watch_states()
        found, layers = super()._whole_state(optimizer), self._split_layers
        return found if layers is None else layers.whole_optimizer_state(optimizer, found)


def _checksum_of_random_states(device: torch.device) -> int:
    checksum = zlib.crc32(repr(other_random_states()).encode())
    for state in torch_random_states(device):
        checksum = zlib.crc32(state.numpy().data, checksum)
    return checksum
