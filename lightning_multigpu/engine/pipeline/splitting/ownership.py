"""Ownership: the ranks of a pipeline that hold the values of each parameter and buffer.

Tensors that belong only to layers of one rank's stages are held by that rank; the other ranks have placeholders in
their place, under the same names and in the same order. Tensors outside of the chain, and tensors shared between ranks
(tied weights), are held by all ranks, and their gradients are summed over the ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module, Parameter, RNNBase

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.pipeline.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.splitting.placeholder import Placeholder, exchange
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup


@dataclass
class Holding:
    """A parameter or buffer: its first name, the tensor or its placeholder, and the positions that have its values."""

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
        self.holdings = list(_holdings(module, chain, bounds, num_ranks))
        self._recurrent = [part for part in module.modules() if isinstance(part, RNNBase)]

    def parameters(self) -> list[Parameter]:
        """All parameters, in the module's order."""
        return [h.tensor for h in self.holdings if isinstance(h.tensor, Parameter)]

    def held(self) -> list[Parameter]:
        """Parameters with values on this rank, in the module's order."""
        return [h.tensor for h in self.holdings if self.position in h.holders and isinstance(h.tensor, Parameter)]

    def buffers(self) -> list[Tensor]:
        """Buffers with values on this rank, in the module's order."""
        return [h.tensor for h in self.holdings if self.position in h.holders and not h.is_parameter]

    def common(self) -> list[Parameter]:
        """Parameters that more than one rank holds."""
        return [h.tensor for h in self.holdings if len(h.holders) > 1 and isinstance(h.tensor, Parameter)]

    def counted(self) -> list[Parameter]:
        """The parameters that this rank counts in sums over all ranks: each parameter is counted by one rank."""
        return [h.tensor for h in self.holdings if h.holders[-1] == self.position and isinstance(h.tensor, Parameter)]

    def holders_by_name(self) -> dict[str, tuple[int, ...]]:
        """The positions that hold each tensor, by name; a tensor that is registered twice has two names."""
        holders = {id(h.tensor): h.holders for h in self.holdings}
        return {name: holders[id(tensor)] for name, tensor in _named_tensors(self._module)}

    def is_whole(self) -> bool:
        """Whether this rank has all values."""
        return not any(isinstance(holding.tensor, Placeholder) for holding in self.holdings)

    def lacking(self) -> list[str]:
        """Names of tensors that this rank has to hold and has no values of."""
        return [h.name for h in self.holdings if self.position in h.holders and isinstance(h.tensor, Placeholder)]

    def share_values(self, group: MeteredGroup, source: int) -> None:
        """Gives every rank of ``group``, at the start of a run, the values that it holds.

        They come from the world's rank ``source``, which has all values.
        """
        self._share(self.holdings, group, source)

    def share_held(self, everyone: MeteredGroup, peers: MeteredGroup) -> None:
        """Gives all ranks equal values if no rank has all values and each has those that it holds.

        Args:
            everyone: all ranks; the tensors that all hold come from its first rank.
            peers: the ranks with this position in all pipelines; the tensors that only they hold come from the first.
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
        """Replaces tensors that only other ranks hold by placeholders. Parameters stay the same Python objects."""
        for holding in self.holdings:
            if self.position in holding.holders:
                continue
            source = f"{'parameter' if holding.is_parameter else 'buffer'} {holding.name}"
            if isinstance(holding.tensor, Placeholder):
                holding.tensor.source = source
            else:
                self._exchange(holding, Placeholder(holding.tensor.data, source))

    def move(self, device: torch.device) -> None:
        """Moves the tensors that this rank holds to its device, except those that may become another rank's."""
        unassigned = {id(tensor) for tensor in self._chain.unassigned()}
        for holding in self.holdings:
            is_held = self.position in holding.holders and id(holding.tensor) not in unassigned
            if is_held and holding.tensor.device != device:
                holding.tensor.data = holding.tensor.data.to(device)

    def gather(self, group: PipelineGroup) -> None:
        """Brings all values into the host's memory of the last position; a collective of the pipeline."""
        for holding, value in self.values_of_others(group):
            self._exchange(holding, value)

    def values_of_others(self, group: PipelineGroup) -> Iterator[tuple[Holding, Tensor]]:
        """On the last position the values that it does not hold, in host memory; a collective of the pipeline."""
        last = self.num_ranks - 1
        for holding in self.holdings:
            if self.position == holding.holders[0] and last not in holding.holders:
                group.send(holding.tensor, last)
            elif self.position == last and last not in holding.holders:
                value = torch.empty(holding.tensor.shape, dtype=holding.tensor.dtype)
                yield holding, group.receive(value, holding.holders[0])
        group.finish()

    def restore(self, group: MeteredGroup, ranks: Sequence[int], holdings: Sequence[Holding] | None = None) -> None:
        """Brings values into the host's memory of every rank of ``group``.

        Args:
            group: the stages.
            ranks: the world's rank at each position.
            holdings: those to bring; by default all.
        """
        for part in _in_parts(self.holdings if holdings is None else holdings):
            for position in range(self.num_ranks):
                mine = [holding for holding in part if holding.holders[-1] == position]
                values = [self._host_copy(holding) for holding in mine]
                group.broadcast_tensors(values, src=ranks[position])
                for holding, value in zip(mine, values, strict=True):
                    if isinstance(holding.tensor, Placeholder):
                        self._exchange(holding, value)
                    elif position != self.position:
                        holding.tensor.data.copy_(value)

    def split_again(
        self, bounds: Sequence[tuple[int, int]], group: MeteredGroup, ranks: Sequence[int], device: torch.device
    ) -> None:
        """Splits the layers anew, and moves tensors to the ranks that hold them from now on. A collective of ``group``.

        Parameters stay the same Python objects. Moving tensors are for a moment in the host's memory of every rank.

        Args:
            bounds: the layers ``[start, stop)`` of each stage.
            group: the stages.
            ranks: the world's rank at each position.
            device: where this rank computes.

        Raises:
            PipelineError: a parameter cannot be exchanged, because something refers to it.
        """
        holders = {h.name: h.holders for h in _holdings(self._module, self._chain, bounds, self.num_ranks)}
        moving = [holding for holding in self.holdings if holding.holders != holders[holding.name]]
        before = [holding.tensor for holding in moving]
        self.restore(group, ranks, moving)
        for holding in moving:
            holding.holders = holders[holding.name]
        self.drop()
        self.move(device)
        for holding, tensor in zip(moving, before, strict=True):
            if holding.is_parameter and holding.tensor is not tensor:
                raise PipelineError(
                    f"parameter {holding.name} cannot move to another stage: something made before the first step "
                    "refers to it, such as a weak reference; leave that out or, where the balance is measured, use "
                    "balance='parameters'"
                )

    def _host_copy(self, holding: Holding) -> Tensor:
        tensor = holding.tensor
        if self.position == holding.holders[-1]:
            return tensor.detach().to("cpu")
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def _exchange(self, holding: Holding, value: Tensor) -> None:
        """Puts ``value`` into the tensor's place: into the same object or, if that is in use, into all modules."""
        old = holding.tensor
        new: Tensor = value
        if isinstance(old, Parameter):
            new = Parameter(value, requires_grad=old.requires_grad)
            old.grad = None
        with self._without_weak_references():
            try:
                exchange(old, new)
            except RuntimeError:  # an autograd graph still refers to it
                for module in self._module.modules():
                    for table in (module._parameters, module._buffers):
                        for name, entry in table.items():
                            if entry is old:
                                table[name] = new  # type: ignore[assignment]
                holding.tensor = new

    @contextmanager
    def _without_weak_references(self) -> Iterator[None]:
        """Drops the weak references of ``nn.LSTM`` and its like to their parameters within the block."""
        for part in self._recurrent:
            part._flat_weight_refs = []
        yield
        for part in self._recurrent:
            weights = [getattr(part, name, None) for name in part._flat_weights_names]
            part._flat_weights = weights
            part._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


def _holdings(module: Module, chain: Chain, bounds: Sequence[tuple[int, int]], num_ranks: int) -> Iterator[Holding]:
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
            found = holders.get(id(tensor), everywhere)  # layers that have not been traced, or are not used
            yield Holding(name, tensor, tuple(sorted(found if len(found) == 1 else everywhere)))


def _with_values(tensor: Tensor) -> Tensor:
    """The tensor; for a placeholder, memory for its values."""
    if isinstance(tensor, Placeholder):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor


def _named_tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _in_parts(holdings: Sequence[Holding], limit_bytes: int = 64 << 20) -> Iterator[list[Holding]]:
    """Groups of about ``limit_bytes``, so that no second copy of the whole model is made."""
    part: list[Holding] = []
    size = 0
    for holding in holdings:
        part.append(holding)
        size += holding.tensor.nbytes
        if size >= limit_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part
