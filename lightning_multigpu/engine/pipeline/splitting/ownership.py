"""Which stage holds the values of which parameter and buffer.

What belongs to the layers of one rank's stages only is held by that rank; the others have stand-ins in its place,
under the same names and in the same order. What is outside of the chain, or shared between ranks (tied weights), is
held by all of them, and its gradients are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.pipeline.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.splitting.placeholder import Placeholder, exchange
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup


@dataclass
class Holding:
    """A parameter or buffer: its first name, the tensor or its stand-in, and the positions that have its values."""

    name: str
    tensor: Tensor
    holders: tuple[int, ...]

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, Parameter)


class Ownership:
    """The parameters and buffers of a module as one rank of a pipeline holds them.

    Args:
        module: the whole module.
        chain: its layers.
        bounds: the layers ``[start, stop)`` of each stage.
        position: of this rank; it has every stage whose index modulo ``num_ranks`` is its position.
        num_ranks: of the pipeline.
    """

    def __init__(
        self, module: Module, chain: Chain, bounds: Sequence[tuple[int, int]], position: int, num_ranks: int
    ) -> None:
        self._module = module
        self._chain = chain
        self.position = position
        self.num_ranks = num_ranks
        self.holdings = [
            Holding(name, tensor, holders)
            for name, tensor, holders in _holders_of_tensors(module, chain, bounds, num_ranks)
        ]

    def parameters(self) -> list[Parameter]:
        """All parameters, in the module's order."""
        return [h.tensor for h in self.holdings if isinstance(h.tensor, Parameter)]

    def held(self) -> list[Parameter]:
        """Parameters with values on this stage, in the module's order."""
        return [h.tensor for h in self.holdings if self.position in h.holders and isinstance(h.tensor, Parameter)]

    def buffers(self) -> list[Tensor]:
        """Buffers with values on this stage, in the module's order."""
        return [h.tensor for h in self.holdings if self.position in h.holders and not h.is_parameter]

    def common(self) -> list[Parameter]:
        """Parameters that more than one stage holds."""
        return [h.tensor for h in self.holdings if len(h.holders) > 1 and isinstance(h.tensor, Parameter)]

    def counted(self) -> list[Parameter]:
        """Parameters that this stage counts for in sums over all stages: each has one stage that does."""
        return [h.tensor for h in self.holdings if h.holders[-1] == self.position and isinstance(h.tensor, Parameter)]

    def holders_by_name(self) -> dict[str, tuple[int, ...]]:
        """The positions that hold each name; a tensor that is registered twice has two names."""
        holders = {id(h.tensor): h.holders for h in self.holdings}
        return {name: holders[id(tensor)] for name, tensor in _named_tensors(self._module)}

    def is_whole(self) -> bool:
        """Whether this rank has all values."""
        return not any(isinstance(holding.tensor, Placeholder) for holding in self.holdings)

    def lacking(self) -> list[str]:
        """Names of what this rank is to hold and has no values of."""
        return [h.name for h in self.holdings if self.position in h.holders and isinstance(h.tensor, Placeholder)]

    def share_values(self, group: MeteredGroup, source: int) -> None:
        """Gives every rank of ``group`` the values that it holds, from the world's rank ``source``, which has all.

        That is the start of a run.
        """
        self._share(self.holdings, group, source)

    def share_held(self, everyone: MeteredGroup, peers: MeteredGroup) -> None:
        """The same where no rank has all values, and each has those that it holds.

        Args:
            everyone: gets from its first rank what all stages hold.
            peers: the ranks with this position in all pipelines; they get from the first what only they hold.
        """
        self._share([h for h in self.holdings if len(h.holders) == self.num_ranks], everyone, everyone.first_rank)
        if peers.size > 1:
            self._share([h for h in self.holdings if h.holders == (self.position,)], peers, peers.first_rank)

    def _share(self, holdings: Sequence[Holding], group: MeteredGroup, source: int) -> None:
        for part in _in_parts(holdings):
            values = [_with_values(holding.tensor) for holding in part]
            group.broadcast_tensors(values, src=source)
            for holding, value in zip(part, values, strict=True):
                if isinstance(holding.tensor, Placeholder) and self.position in holding.holders:
                    self._exchange(holding, value)

    def drop(self) -> None:
        """Replaces what only other stages hold by stand-ins. The parameters stay the same Python objects."""
        self._drop(self.holdings)

    def _drop(self, holdings: Sequence[Holding]) -> None:
        for holding in holdings:
            if self.position in holding.holders:
                continue
            source = f"{'parameter' if holding.is_parameter else 'buffer'} {holding.name}"
            if isinstance(holding.tensor, Placeholder):
                holding.tensor.source = source
            else:
                self._exchange(holding, Placeholder(holding.tensor.data, source))

    def move(self, device: torch.device) -> None:
        """Moves what this stage holds to its device, but for what may become another stage's."""
        waiting = {id(tensor) for tensor in self._chain.waiting()}
        for holding in self.holdings:
            is_held = self.position in holding.holders and id(holding.tensor) not in waiting
            if is_held and holding.tensor.device != device:
                holding.tensor.data = holding.tensor.data.to(device)

    def gather(self, line: PipelineGroup) -> None:
        """Makes the module whole in the host's memory of the last position only; a collective of the pipeline."""
        last = self.num_ranks - 1
        for holding in self.holdings:
            if self.position == holding.holders[0] and last not in holding.holders:
                line.send(holding.tensor, last)
            elif self.position == last and last not in holding.holders:
                value = torch.empty(holding.tensor.shape, dtype=holding.tensor.dtype)
                self._exchange(holding, line.receive(value, holding.holders[0]))
        line.finish()

    def restore(self, group: MeteredGroup, ranks: Sequence[int]) -> None:
        """Makes the module whole again, in the host's memory of every rank of ``group``: the end of a run.

        Args:
            group: the stages.
            ranks: the world's rank at each position.
        """
        self._restore(self.holdings, group, ranks)

    def split_again(
        self, bounds: Sequence[tuple[int, int]], group: MeteredGroup, ranks: Sequence[int], device: torch.device
    ) -> None:
        """Deals the layers out anew; what another rank holds from now on goes there. A collective of ``group``.

        The parameters stay the same Python objects. What moves is for a moment in the host's memory of every rank.

        Args:
            bounds: the layers ``[start, stop)`` of each stage.
            group: the stages.
            ranks: the world's rank at each position.
            device: where this rank computes.

        Raises:
            PipelineError: something refers to a parameter in a way that keeps it from being exchanged.
        """
        holders = {
            name: found for name, _, found in _holders_of_tensors(self._module, self._chain, bounds, self.num_ranks)
        }
        moving = [holding for holding in self.holdings if holding.holders != holders[holding.name]]
        before = [holding.tensor for holding in moving]
        self._restore(moving, group, ranks)
        for holding in moving:
            holding.holders = holders[holding.name]
        self._drop(moving)
        self.move(device)
        for holding, tensor in zip(moving, before, strict=True):
            if holding.is_parameter and holding.tensor is not tensor:
                raise PipelineError(
                    f"parameter {holding.name} cannot move to another stage: something made before the first step "
                    "refers to it, such as a weak reference; leave that out, or use balance='parameters'"
                )

    def _restore(self, holdings: Sequence[Holding], group: MeteredGroup, ranks: Sequence[int]) -> None:
        for part in _in_parts(holdings):
            for position in range(self.num_ranks):
                mine = [holding for holding in part if holding.holders[-1] == position]
                values = [self._host_copy(holding) for holding in mine]
                group.broadcast_tensors(values, src=ranks[position])
                for holding, value in zip(mine, values, strict=True):
                    if isinstance(holding.tensor, Placeholder):
                        self._exchange(holding, value)
                    elif position != self.position:
                        holding.tensor.data.copy_(value)

    def _host_copy(self, holding: Holding) -> Tensor:
        tensor = holding.tensor
        if self.position == holding.holders[-1]:
            return tensor.detach().to("cpu")
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def _exchange(self, holding: Holding, value: Tensor) -> None:
        """Puts ``value`` in the tensor's place: into the same object, or if that is in use into all modules."""
        old = holding.tensor
        new: Tensor = value
        if isinstance(old, Parameter):
            new = Parameter(value, requires_grad=old.requires_grad)
            old.grad = None
        try:
            exchange(old, new)
        except RuntimeError:  # an autograd graph still refers to it
            for module in self._module.modules():
                for table in (module._parameters, module._buffers):
                    for name, entry in table.items():
                        if entry is old:
                            table[name] = new  # type: ignore[assignment]
            holding.tensor = new


def _holders_of_tensors(
    module: Module, chain: Chain, bounds: Sequence[tuple[int, int]], num_ranks: int
) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    holders: dict[int, set[int]] = {}
    inside = chain.modules()
    for stage, (start, stop) in enumerate(bounds):
        for layer in chain.layers[start:stop]:
            for _, tensor in _named_tensors(layer):
                holders.setdefault(id(tensor), set()).add(stage % num_ranks)
    everywhere = set(range(num_ranks))
    for part in module.modules():
        if part not in inside:
            for own in (*part._parameters.values(), *part._buffers.values()):
                if own is not None:
                    holders[id(own)] = everywhere
    seen: set[int] = set()
    for name, tensor in _named_tensors(module):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found = holders.get(id(tensor), everywhere)  # of layers that have not been traced, or not been used
            yield name, tensor, tuple(sorted(found if len(found) == 1 else everywhere))


def _with_values(tensor: Tensor) -> Tensor:
    """The tensor; if it is a stand-in, memory for its values."""
    if isinstance(tensor, Placeholder):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor


def _named_tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _in_parts(holdings: Sequence[Holding], limit_bytes: int = 64 << 20) -> Iterator[list[Holding]]:
    """Groups of about ``limit_bytes``, so that no second copy of the whole model is made on the way."""
    part: list[Holding] = []
    size = 0
    for holding in holdings:
        part.append(holding)
        size += holding.tensor.numel() * holding.tensor.element_size()
        if size >= limit_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part
