"""The tensor axis of a pipeline: the ranks with the same stages split the layers of these stages.

The layers are split on the first batch, on the whole module, before its stages are balanced::

    first batch    every rank gets the whole module -> trial of split layers -> each keeps its part of its stages
    afterwards     stage 0    ranks 2 and 3    layers 0 and 1, half of each     activations go from rank 2 to rank 0
                   stage 1    ranks 0 and 1    layers 2 and 3, half of each     and from rank 3 to rank 1
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Parameter

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.placeholder import Placeholder, exchange
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.parts import forget_split
from lightning_multigpu.engine.tensor_split.trials import TracelessStep
from lightning_multigpu.engine.training_memory import held_bytes
from lightning_multigpu.planning.split_plan import SplitPlan
from lightning_multigpu.strategies.pipeline.split_model import SplitModel
from lightning_multigpu.strategies.steps.dry_run import without_trace
from lightning_multigpu.strategies.tensor_parallel.split_layers import SplitLayers, open_tensor_group

if TYPE_CHECKING:
    from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy


class TensorAxis:
    """The ranks that split the layers of this rank's stages; to make one is a collective of the world.

    Attributes:
        peers: collectives of the group's ranks outside of layers.
        plan: the plan of the split; None before the first batch.
    """

    def __init__(self, model: SplitModel, strategy: PipelineStrategy) -> None:
        shared_memory = strategy._transport.shared_memory
        self.group, self.peers = group, peers = open_tensor_group(strategy, shared_memory=shared_memory)
        self._model = model
        model.chain.tensor_group = group
        group.shows_parts = False
        self.layers = SplitLayers(model.module, group, strategy.plan)
        self.plan: SplitPlan | None = None
        held = [*model.ownership.held(), *model.ownership.buffers()]
        peers.broadcast_tensors([tensor.detach() for tensor in held], src=peers.first_rank)

    @property
    def is_split(self) -> bool:
        """Whether the layers are split: after the first batch."""
        return self.layers.split is not None

    def split(self, step: Callable[[], Any], world: MeteredGroup) -> None:
        """Splits the module by its first training batch, and prints the split; a collective of all ranks.

        Raises:
            ValueError: no layer can be split, the plan does not fit, or an optimizer needs whole tensors.
        """
        model, module = self._model, self._model.module
        with model.meter.unrecorded(), torch.inference_mode(False):
            if model.group.num_ranks > 1:
                model.ownership.restore(model.stages)
                for holding in model.ownership.holdings:
                    holding.tensor.data = holding.tensor.data.to(model.device)
            traceless = partial(without_trace, module)
            plan = self.layers.decide(
                TracelessStep(module, self.group, step, traceless=traceless, gather=world.gather_objects),
                module.trainer.optimizers,
            )
            gc.collect()  # reference cycles hold autograd graphs, and these hold parameters
            model.ownership.drop()
            held = world.gather_objects(held_bytes(model.ownership.held(), module.trainer.optimizers))
        model.split_layers = self.layers if model.is_last else None
        self.plan = plan = replace(plan, ranks=held[: self.group.size * model.group.num_ranks])
        rank_zero_info(str(plan))

    def replicated(self) -> list[tuple[str, Tensor]]:
        """Parameters that each rank of the group holds whole, by name."""
        held = {id(parameter) for parameter in self._model.ownership.held()}
        named = self._model.module.named_parameters()
        return [(name, p) for name, p in named if id(p) in held and split_of(p) is None]

    # The end

    def make_whole(self) -> None:
        """Gives every rank the whole layers of its stages; a collective of the group."""
        if not self.is_split:
            return
        self.layers.make_whole(self._model.module.trainer.optimizers)
        self._model.split_layers = None
        for holding in self._model.ownership.holdings:
            split = split_of(holding.tensor)
            if split is not None and isinstance(holding.tensor, Placeholder):  # what only another rank has
                whole = holding.tensor.resized(split.whole_shape(holding.tensor))
                exchange(holding.tensor, Parameter(whole, requires_grad=holding.tensor.requires_grad))
                forget_split(holding.tensor)
