"""A model whose layers are spread over the ranks of a pipeline: its construction, checkpoints and reassembly."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_multigpu._lightning_internals import plain_optimizer
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.optimizer_state import held_states, plain_state
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.splitting.construction import Construction
from lightning_multigpu.engine.pipeline.splitting.ownership import Holding, Ownership
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.remote_values import RemoteValues
from lightning_multigpu.engine.step_state import preserved_random_state, preserved_state
from lightning_multigpu.engine.tensor_split.parts import local
from lightning_multigpu.planning.numbers import size
from lightning_multigpu.planning.pipelines.balance import Bounds
from lightning_multigpu.strategies.pipeline.last_stage_outputs import packed, unpacked

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy
    from lightning_multigpu.strategies.tensor_parallel.split_layers import SplitLayers

_CPU = torch.device("cpu")


class SplitModel:
    """A module on one rank of a pipeline, which holds some of its stages.

    Methods are collectives of the pipeline unless they say otherwise; :meth:`own_optimizer_state` and the descriptions
    are not. The last stage's rank gathers and writes a checkpoint: keys keep their order, and
    parameters are numbered as on one device.

    To make one is a collective of the world: it makes the values of all ranks equal, and leaves each rank only those of
    its own stages, on its device.

    Attributes:
        on_hosts: messages of the pipeline between the hosts' memories.
        stages: collectives of the pipeline.
        split_layers: on the last stage, what gathers whole layers over the tensor group for checkpoints, which are
            then collectives of that group, too; None without split layers.

    Raises:
        ValueError: on all ranks, if no rank has values that one of them needs.
    """

    split_layers: SplitLayers | None = None

    def __init__(self, strategy: PipelineStrategy, chain: Chain, bounds: Bounds) -> None:
        ranks = strategy.groups.new("pipeline", descending=True)
        self.module, self.chain, self.meter, self.device = strategy._module, chain, strategy.meter, strategy.root_device
        self.stages = stages = strategy.metered(ranks, "pipeline")
        is_nccl = dist.get_backend(ranks) == "nccl"
        self.group = PipelineGroup(ranks, self.meter, self.device if is_nccl else _CPU)
        self.on_hosts = self.group
        if is_nccl:  # what hosts agree on need not wait for the devices
            on_hosts = strategy.groups.new("pipeline", backend="gloo", descending=True)
            self.on_hosts = PipelineGroup(on_hosts, self.meter, _CPU)
        self.ownership = Ownership(self.module, chain, bounds, stages.rank, stages.size, self.group, self.device)
        self.is_last = self.ownership.position == self.group.num_ranks - 1
        self.remote = RemoteValues(self.group, self.ownership.position)
        self._was_whole = self.ownership.share(strategy.collectives.world, strategy.collectives.data)
        self.ownership.drop()
        self.ownership.move()

    def split_again(self, bounds: Bounds) -> bool:
        """Gives each rank the parameters, buffers and optimizer states of its stages; returns whether any moved."""
        with torch.inference_mode(False), torch.no_grad():
            return self.ownership.split_again(bounds, self._move_states)

    def _move_states(self, holding: Holding, sender: int, receivers: Sequence[int]) -> None:
        """Sends the optimizers' states of a parameter to its new holders."""
        position = self.ownership.position
        for optimizer in self.module.trainer.optimizers:
            states = held_states(plain_optimizer(optimizer))
            if position == sender:
                state = packed(states[holding.tensor], holding.name) if holding.tensor in states else None
                for receiver in receivers:
                    self.group.send_object(state, receiver)
            elif position in receivers:
                state = self.group.receive_object(sender)
                if state is not None:
                    states[holding.tensor] = unpacked(state, self.device)
            if position not in holding.holders:
                states.pop(holding.tensor, None)

    def make_whole(self, *, is_first: bool) -> None:
        """Gives every rank all values, or only rank 0 if no other rank had them; and rank 0 the optimizers' states."""
        optimizers = self.module.trainer.optimizers
        states = [self.whole_optimizer_state(optimizer) for optimizer in optimizers] if is_first else []
        if self._was_whole:
            self.ownership.restore(self.stages)
        elif is_first:
            self.ownership.gather()
        if is_first and self.is_last:
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)

    def leave_in_parts(self) -> None:
        """Makes errors about values of other ranks name the reason after the run; no collective."""
        for holding in self.ownership.holdings:
            if isinstance(holding.tensor, Placeholder):
                kind = "parameter" if holding.is_parameter else "buffer"
                why = "gather_at_end=False left it on another rank; load a checkpoint to have all values"
                holding.tensor.sources = (f"{kind} {holding.name} ({why})",)

    def whole_state_dict(self, state: dict[str, Any], *, streams: bool) -> dict[str, Any]:
        """``module.state_dict()`` with all values, on the last stage; elsewhere ``state`` unchanged.

        With ``streams`` other stages keep their values until the checkpoint is written.
        """
        last, position = self.group.num_ranks - 1, self.ownership.position
        holders_of = self.ownership.holders_by_name()
        whole = dict(state)
        for key, value in state.items():
            holders = holders_of.get(key, (last,))
            if last in holders or not isinstance(value, Tensor):
                continue
            if position == holders[0]:
                self.remote.offer(value, key)
            elif self.is_last:
                whole[key] = self.remote.remote(value, key, holders[0], key)
        whole = whole if streams else self.remote.fetched(whole)
        return whole if self.split_layers is None else self.split_layers.whole_state_dict(whole)

    def whole_optimizer_state(self, optimizer: Optimizer, *, streams: bool = False) -> dict[str, Any]:
        """The optimizer's state of one device, on the last stage; elsewhere this rank's part of it.

        Raises:
            PipelineError: on all stages, if their optimizers do not have the same parameters.
        """
        self._check_groups(optimizer)
        with plain_state(optimizer):
            state: dict[str, Any] = optimizer.state_dict()
        last, position = self.group.num_ranks - 1, self.ownership.position
        own: dict[int, Any] = state["state"]
        holders = self._holders(optimizer)
        senders = {index: positions[0] for index, positions in enumerate(holders) if last not in positions}
        sent = {index: own[index] for index, sender in senders.items() if sender == position and index in own}
        received = self.remote.gather(sent, sorted(set(senders.values())))
        sources = [received if self.is_last and index in senders else own for index in range(len(holders))]
        merged = {index: source[index] for index, source in enumerate(sources) if index in source}
        state = {**state, "state": merged if streams else self.remote.fetched(merged)}
        return state if self.split_layers is None else self.split_layers.whole_optimizer_state(optimizer, state)

    def own_optimizer_state(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Copies, from one device's optimizer state, the entries of parameters that this rank holds."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        held = {
            number
            for number, holders in zip(numbers, self._holders(optimizer), strict=False)
            if self.ownership.position in holders
        }
        own = {number: value for number, value in state["state"].items() if number in held}
        # An optimizer keeps the given tensors, and so the file that they may be mapped from.
        return {**state, "state": tree_map_only(Tensor, torch.clone, own)}

    def describe(self) -> str:
        """The stages, and the parameters of their ranks, as a few lines of text."""
        sizes, ranks = self.chain.parameter_bytes(), self.group.ranks
        lines = [f"Pipeline over {self.chain.describe()} in {len(self.ownership.bounds)} stages:"]
        for stage, (start, stop) in enumerate(self.ownership.bounds):
            layers, held = self.chain.describe_layers(start, stop), size(sum(sizes[start:stop]))
            lines.append(f"  stage {stage} on rank {ranks[stage % len(ranks)]}: {layers}, {held} of parameters")
        return "\n".join([*lines, self.describe_ranks()])

    def describe_ranks(self) -> str:
        """The bytes of the parameters that each rank holds, as text."""
        found = [0] * self.group.num_ranks
        for holding in self.ownership.holdings:
            for position in holding.holders if holding.is_parameter else ():
                found[position] += local(holding.tensor).nbytes
        held = [f"{size(own)} on rank {rank}" for rank, own in zip(self.group.ranks, found, strict=True)]
        return f"  parameters in all: {', '.join(held)}"

    def _check_groups(self, optimizer: Optimizer) -> None:
        """Checks that stages number parameters alike: a callback may have added some during the run."""
        names = {id(holding.tensor): holding.name for holding in self.ownership.holdings}
        own = [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
        if self.group.same_everywhere(zlib.crc32(repr(own).encode())):
            return
        first, *others = self.stages.gather_objects(own)
        other = next(groups for groups in others if groups != first)
        known = [{name for group in groups for name in group} for groups in (first, other)]
        raise PipelineError(
            f"stages have optimizers with different parameters: only one of two has {sorted(known[0] ^ known[1])}. "
            "Lightning's callbacks for fine-tuning leave out parameters with the same values as one that the optimizer "
            "already has; add param groups by name, or set different values of such parameters before the first step"
        )

    def _holders(self, optimizer: Optimizer) -> list[tuple[int, ...]]:
        """The positions that hold each parameter of the optimizer; all positions for one that is not the module's."""
        holders_of = {id(holding.tensor): holding.holders for holding in self.ownership.holdings}
        everywhere = tuple(range(self.group.num_ranks))
        return [holders_of.get(id(p), everywhere) for group in optimizer.param_groups for p in group["params"]]


@contextmanager
def built_by_stages(
    module: pl.LightningModule,
    precision: Precision,
    split: Callable[[pl.LightningModule], tuple[Chain, Bounds]],
    position: int,
    num_ranks: int,
    device: torch.device = _CPU,
) -> Iterator[Bounds]:
    """Within the block ``module.configure_model()`` keeps only the values that the rank at ``position`` will hold.

    Before the block ``configure_model()`` runs once, and ``split`` then finds the layers and cuts them into stages; its
    changes of the module and of random states are undone. Yields the layers of each stage.

    Raises:
        ValueError: the module cannot be built in this way.
    """
    construction = Construction()
    try:
        with preserved_state(module), isolate_rng(include_cuda=False), preserved_random_state(device):
            with precision.module_init_context(), construction.dry_run():
                module.configure_model()
            chain, bounds = split(module)
            holdings = Ownership(module, chain, bounds, position, num_ranks).holdings
            held = {id(h.tensor): position in h.holders for h in holdings}
        with construction.building(lambda tensor: held.get(id(tensor), True)):
            del chain, holdings
            yield bounds
    except PipelineError as error:
        name = type(module).__name__
        raise ValueError(
            f"{name}.configure_model() cannot be run stage by stage: {error}. It is called twice, and must make the "
            f"same tensors each time without looking at the values of layers; else build them in {name}.__init__, "
            "which needs the host's memory for the whole model on every rank"
        ) from error
