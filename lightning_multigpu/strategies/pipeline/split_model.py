"""A model whose layers are spread over the ranks of a pipeline: who holds what, and how it is put together again."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.pipeline.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.splitting.placeholder import Placeholder
from lightning_multigpu.engine.pipeline.splitting.traced_chain import TracedChain
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup
from lightning_multigpu.runtime.process_groups import metered_group
from lightning_multigpu.strategies.pipeline.stage_construction import share_values

if TYPE_CHECKING:
    import lightning.pytorch as pl


class SplitModel:
    """A module as one rank of a pipeline has it. Except for :meth:`own_optimizer_state`, methods are collectives.

    A checkpoint is put together on the last stage, which is the rank that writes, in the host's memory: keys keep their
    order, and parameters are numbered as on one device.

    Args:
        module: the whole module.
        chain: its layers.
        bounds: the layers ``[start, stop)`` of each stage.
        group: the ranks of the pipeline, in the order of their positions.
        meter: told of what travels.
        device: where this rank computes.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        chain: Chain,
        bounds: list[tuple[int, int]],
        group: dist.ProcessGroup,
        meter: Meter,
        device: torch.device,
    ) -> None:
        self.module = module
        self.chain = chain
        self.bounds = bounds
        self.meter = meter
        self.device = device
        self.stages = metered_group(group, meter, "pipeline", device)
        self.line = PipelineGroup(group, meter, device if dist.get_backend(group) == "nccl" else torch.device("cpu"))
        self.ownership = Ownership(module, chain, bounds, self.stages.rank, self.line.num_ranks)
        self._was_whole = True

    def share(self, world: MeteredGroup, peers: MeteredGroup) -> None:
        """Gives all ranks the same values, and leaves each those of its own stages, on its device.

        Args:
            world: all ranks, of all pipelines.
            peers: those that hold the same layers, one of each pipeline.

        Raises:
            ValueError: on all ranks, if nobody has values that one of them needs.
        """
        self._was_whole = share_values(self.ownership, world, peers)
        self.ownership.drop()
        self.ownership.move(self.device)

    @property
    def is_untraced(self) -> bool:
        """Whether a traced chain still has to find out which stage uses which parameters."""
        return isinstance(self.chain, TracedChain) and not self.chain.is_arranged

    def arrange(self, step: Callable[[], Any], optimizers: Sequence[Optimizer], *, will_train: bool) -> None:
        """Finds that out from a step, and leaves each rank what its stages use.

        Args:
            step: the user's, run as far as to what is split.
            optimizers: those of the run.
            will_train: what training uses is found out too, where the step is one of evaluation.

        Raises:
            PipelineError: it cannot be traced.
        """
        assert isinstance(self.chain, TracedChain)
        self.chain.arrange(step, will_train=will_train)
        self.split_again(self.bounds, optimizers)

    def make_whole(self, optimizers: Sequence[Optimizer], *, is_first: bool) -> None:
        """Gives every rank all values, or rank 0 alone if no other had them; and rank 0 the optimizers' states.

        Args:
            optimizers: those of the run.
            is_first: this pipeline is the first of those side by side, so that its last stage is rank 0.
        """
        states = [self.whole_optimizer_state(optimizer) for optimizer in optimizers] if is_first else []
        if self._was_whole:
            self.ownership.restore(self.stages, self.line.ranks)
        elif is_first:
            self.ownership.gather(self.line)
        if is_first and self.ownership.position == self.line.num_ranks - 1:
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)

    def split_again(self, bounds: list[tuple[int, int]], optimizers: Sequence[Optimizer]) -> None:
        """Gives each rank the parameters, buffers and optimizer states of its new stages."""
        states: list[dict[str, Any]] = []
        if any(self.stages.gather_objects(any(bool(optimizer.state) for optimizer in optimizers))):  # it was resumed
            states = [self.whole_optimizer_state(optimizer) for optimizer in optimizers]
            states = self.stages.broadcast_object(states, self.line.ranks[-1])
        self.ownership.split_again(bounds, self.stages, self.line.ranks, self.device)
        self.bounds = bounds
        for optimizer, state in zip(optimizers, states, strict=False):
            optimizer.load_state_dict(self.own_optimizer_state(state, optimizer))

    def whole_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """``module.state_dict()`` with all values, on the last stage; elsewhere the stage's own part.

        Args:
            state: with stand-ins for what other stages hold.
        """
        position, last = self.ownership.position, self.line.num_ranks - 1
        holders_of = self.ownership.holders_by_name()
        whole = dict(state)
        for key, value in state.items():
            holders = holders_of.get(key, (last,))
            if last in holders or not isinstance(value, Tensor):
                continue
            if position == holders[0]:
                self.line.send(value, last)
            elif position == last:
                whole[key] = self.line.receive(torch.empty(value.shape, dtype=value.dtype), holders[0])
        self.line.finish()
        return whole

    def whole_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state of one device, on the last stage; elsewhere the stage's own part.

        Raises:
            PipelineError: on all stages, if their optimizers do not have the same parameters.
        """
        self._check_groups(optimizer)
        state: dict[str, Any] = optimizer.state_dict()
        position, last = self.ownership.position, self.line.num_ranks - 1
        merged: dict[int, Any] = {}
        for index, holders in enumerate(self._holders(optimizer)):
            own = state["state"].get(index)
            if last not in holders:
                if position == holders[0]:
                    self.line.send_object(_on_host(own), last)
                elif position == last:
                    own = self.line.receive_object(holders[0])
            if own is not None:
                merged[index] = own
        self.line.finish()
        return {**state, "state": merged}

    def own_optimizer_state(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Of one device's optimizer state, what belongs to parameters that this rank holds; copies."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        held = {
            number
            for number, holders in zip(numbers, self._holders(optimizer), strict=False)
            if self.ownership.position in holders
        }
        own = {number: value for number, value in state["state"].items() if number in held}
        # An optimizer keeps what it is given, and with it the file that the values may be mapped from.
        return {**state, "state": tree_map_only(Tensor, torch.clone, own)}

    def _check_groups(self, optimizer: Optimizer) -> None:
        """Stages number parameters alike, also after a callback has added some in the middle of the run."""
        names = {id(holding.tensor): holding.name for holding in self.ownership.holdings}
        own = [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
        if self.line.same_everywhere(zlib.crc32(repr(own).encode())):
            return
        first, *others = self.stages.gather_objects(own)
        other = next(groups for groups in others if groups != first)
        known = [{name for group in groups for name in group} for groups in (first, other)]
        raise PipelineError(
            f"stages have optimizers with different parameters: only one of two has {sorted(known[0] ^ known[1])}. "
            "Lightning's callbacks for fine-tuning leave out what has the same values as a parameter that is there "
            "already; add param groups by name, or give such parameters different values before the first step"
        )

    def _holders(self, optimizer: Optimizer) -> list[tuple[int, ...]]:
        """The positions that hold each parameter of the optimizer, in its order; all, for what is not the module's."""
        holders_of = {id(holding.tensor): holding.holders for holding in self.ownership.holdings}
        everywhere = tuple(range(self.line.num_ranks))
        return [holders_of.get(id(p), everywhere) for group in optimizer.param_groups for p in group["params"]]


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        assert not isinstance(value, Placeholder)
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _on_host(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(entry) for entry in value)
    return value
