"""Ownership: the ranks of a pipeline that hold the values of each parameter and buffer.

The ranks whose stages use a tensor hold it; the other ranks have a placeholder in its place, under the same names and
in the same order. Gradients of a parameter that several ranks hold (tied weights) are summed over these ranks. ::

    embed -> [0] -> [1] -> [2] -> [3] -> norm -> head        first stage: embed, layers 0 and 1
                                                             last stage:  layers 2 and 3, norm, head

Steps on trial show which stages lack a parameter outside of the layers. Until then, parameters registered before the
layers count as used before them, and the rest as used after them. Buffers outside of the layers are on all ranks,
unless steps write into them before the layers.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter, RNNBase

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup
from lightning_multigpu.engine.placeholder import Placeholder, exchange
from lightning_multigpu.planning.pipelines.balance import Bounds


@dataclass
class Holding:
    """A parameter or buffer: its first name, the tensor or its placeholder, and the positions that have its values."""

    name: str
    tensor: Tensor
    holders: tuple[int, ...]
    is_outside: bool = False
    """It is outside of the layers."""

    @property
    def source(self) -> str:
        """The source that its placeholder names."""
        fix = f" (outside of the layers; replicated=[{self.name!r}] keeps it on every rank)" if self.is_outside else ""
        return f"{'parameter' if self.is_parameter else 'buffer'} {self.name}{fix}"

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, Parameter)


class Ownership:
    """The stages of one rank of a pipeline, and the parameters and buffers that it holds.

    Args:
        position: this rank's position; it has every stage whose index modulo ``num_ranks`` is its position.
        group: the ranks of the pipeline; None if this rank has all layers, or only plans.

    Attributes:
        previous, following: the positions of the ranks that have the stages before and after this rank's.
    """

    def __init__(
        self,
        module: Module,
        chain: Chain,
        bounds: Bounds,
        position: int,
        num_ranks: int,
        group: PipelineGroup | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self._module = module
        self.chain = chain
        self.bounds = bounds
        self.position = position
        self.num_ranks = num_ranks
        self.previous, self.following = (position - 1) % num_ranks, (position + 1) % num_ranks
        self.device = device
        self._group = group
        self.holdings = list(_holdings(module, chain, bounds, num_ranks))
        own = {id(holding.tensor): holding for holding in self.holdings}
        self._places: list[tuple[str, dict[str, Any], str, Holding]] = [
            (f"{path}.{key}".lstrip("."), table, key, own[id(tensor)])
            for path, part in module.named_modules(remove_duplicate=False)
            for table in (part._parameters, part._buffers)
            for key, tensor in table.items()
            if tensor is not None
        ]
        self._recurrent = [part for part in module.modules() if isinstance(part, RNNBase)]

    @property
    def group(self) -> PipelineGroup:
        assert self._group is not None
        return self._group

    @property
    def stages(self) -> range:
        """The indices of this rank's stages."""
        return range(self.position, len(self.bounds), self.num_ranks)

    def finish(self) -> None:
        """Waits until everything has been sent, and frees what a dry run has left."""
        if self._group is not None:
            self._group.finish()
            gc.collect()  # reference cycles hold autograd graphs, and these hold parameters

    def parameters(self) -> list[Parameter]:
        """All parameters, in the module's order."""
        return [h.tensor for h in self.holdings if isinstance(h.tensor, Parameter)]

    def held(self) -> list[Parameter]:
        """Parameters with values on this rank, in the module's order."""
        return [h.tensor for h in self.holdings if self.position in h.holders and isinstance(h.tensor, Parameter)]

    def at_ends(self) -> tuple[list[Parameter], list[Parameter]]:
        """Parameters outside of the layers on the first rank, and on the last one, without those on all ranks."""
        found = [h for h in self.holdings if h.is_outside and len(h.holders) < self.num_ranks]
        first, last = (
            [h.tensor for h in found if position in h.holders and isinstance(h.tensor, Parameter)]
            for position in (0, self.num_ranks - 1)
        )
        return first, last

    def buffers(self) -> list[Tensor]:
        """Buffers with values on this rank, in the module's order."""
        return [h.tensor for h in self.holdings if self.position in h.holders and not h.is_parameter]

    def common(self) -> list[Holding]:
        """Parameters that more than one rank holds, the same list on every rank."""
        return [holding for holding in self.holdings if len(holding.holders) > 1 and holding.is_parameter]

    def counted(self) -> list[Parameter]:
        """The parameters that this rank counts in sums over all ranks: each parameter is counted by one rank."""
        return [h.tensor for h in self.holdings if h.holders[-1] == self.position and isinstance(h.tensor, Parameter)]

    def holders_by_name(self) -> dict[str, tuple[int, ...]]:
        """The positions that hold each tensor, by name; a tensor that is registered twice has two names."""
        self.check_places()
        return {name: holding.holders for name, _, _, holding in self._places}

    def check_places(self, *, parameters: bool = True) -> None:
        """Takes over buffers that an assignment has replaced since the model was split.

        Raises:
            ValueError: a buffer that other ranks lack has another shape; or, with ``parameters``, another parameter has
                come to the place of one that was split.
        """
        for name, table, key, holding in self._places:
            if (now := table.get(key)) is None or now is holding.tensor:
                continue
            if isinstance(holding.tensor, Parameter):
                if not parameters:
                    continue
                raise ValueError(
                    f"{name} is another parameter than when the model was split: a hook has tied or replaced it, and "
                    "stages hold the values of the former one. Tie and replace parameters in __init__, setup or "
                    "configure_model, which run before the split (on_fit_start comes after it)"
                )
            if now.shape != holding.tensor.shape and len(holding.holders) < self.num_ranks:
                raise ValueError(
                    f"buffer {name} had the shape {tuple(holding.tensor.shape)} when the model was split, and has "
                    f"{tuple(now.shape)} now: other stages expect the former; register it in its full size"
                )
            if self.position not in holding.holders:
                table[key] = now = Placeholder(now, holding.source)
            holding.tensor = now

    def missing(self) -> set[str]:
        """Names of tensors whose values this rank lacks."""
        return {holding.name for holding in self.holdings if isinstance(holding.tensor, Placeholder)}

    def share(self, world: MeteredGroup, peers: MeteredGroup) -> bool:
        """Gives each rank the values that it holds, the same on all ranks; a collective of the world.

        Rank 0 sends its values, if it has all. Else a rank of each pipeline that has a tensor sends it to the holders
        that lack it; then the first pipeline's values count, and those of rank 0 for tensors that all ranks hold.
        ``peers`` are the ranks at this position in all pipelines.

        Returns:
            Whether every rank had all values.

        Raises:
            ValueError: on all ranks, if neither rank 0 nor a rank of the pipeline has values that a rank must hold.
        """
        lacking = world.gather_objects(self.missing())
        if not lacking[0]:
            self._share(self.holdings, world, 0)
            return not any(lacking)
        ranks, size = self.group.ranks, self.num_ranks
        step = abs(ranks[-1] - ranks[-2]) if size > 1 else 1  # between ranks of a tensor group's pipelines
        firsts = (first for first in range(len(lacking)) if first // step % size == 0)
        pipelines = [[lacking[first + step * number] for number in range(size)] for first in firsts]
        nowhere = set[str]().union(*(set.intersection(*positions) for positions in pipelines))
        if nowhere:
            found = [holding.name for holding in self.holdings if holding.name in nowhere]
            names = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            raise ValueError(
                f"no rank of a pipeline has values of {names}: configure_model() makes them from values of layers on "
                "other ranks; make them independently of each other"
            )
        for holding in self.holdings:
            having = [position for position, rank in enumerate(ranks) if holding.name not in lacking[rank]]
            self._send(holding, having[-1], [p for p in holding.holders if p not in having])
        self.group.finish()
        self._share([h for h in self.holdings if len(h.holders) == size], world, world.first_rank)
        others = [h for h in self.holdings if len(h.holders) < size]
        for holding in others:
            *receivers, sender = holding.holders
            self._send(holding, sender, receivers)
        self.group.finish()
        if peers.size > 1:
            self._share([h for h in others if self.position in h.holders], peers, peers.first_rank)
        return False

    def _send(self, holding: Holding, sender: int, receivers: Sequence[int]) -> None:
        """Sends the values of a tensor from one position to others; a collective of these positions."""
        if self.position == sender:
            for receiver in receivers:
                self.group.send(holding.tensor, receiver)
        elif self.position in receivers:
            value = self.group.receive(torch.empty(holding.tensor.shape, dtype=holding.tensor.dtype), sender)
            if isinstance(holding.tensor, Placeholder):
                self._exchange(holding, value)
            else:
                holding.tensor.data.copy_(value)

    def _share(
        self, holdings: Sequence[Holding], group: MeteredGroup, source: int, *, everywhere: bool = False
    ) -> None:
        """Gives the values that the global rank ``source`` has to the holders, or to all ranks of the group."""
        is_source = dist.get_rank() == source
        for part in _in_parts(holdings):
            values = [
                h.tensor.detach().cpu() if is_source else torch.empty(h.tensor.shape, dtype=h.tensor.dtype)
                for h in part
            ]
            group.broadcast_tensors(values, src=source)
            for holding, value in zip(part, values, strict=True):
                if not isinstance(holding.tensor, Placeholder):
                    if not is_source:
                        holding.tensor.data.copy_(value)
                elif everywhere or self.position in holding.holders:
                    self._exchange(holding, value)

    def drop(self) -> None:
        """Replaces tensors that this rank does not hold by placeholders. Parameters stay the same Python objects."""
        for holding in self.holdings:
            if self.position in holding.holders:
                continue
            if isinstance(holding.tensor, Placeholder):
                holding.tensor.sources = (holding.source,)
            else:
                self._exchange(holding, Placeholder(holding.tensor.data, holding.source))

    def move(self) -> None:
        """Moves the tensors that this rank holds to its device, except tensors that another rank may hold later."""
        unassigned = {id(tensor) for tensor in self.chain.unassigned()}
        for holding in self.holdings:
            is_held = self.position in holding.holders and id(holding.tensor) not in unassigned
            if is_held and holding.tensor.device != self.device:
                holding.tensor.data = holding.tensor.data.to(self.device)

    def gather(self) -> None:
        """Copies all values to the host's memory at the last position; a collective of the pipeline."""
        for holding, value in self.values_of_others():
            self._exchange(holding, value)

    def values_of_others(self) -> Iterator[tuple[Holding, Tensor]]:
        """At the last position, the values that it does not hold, in host memory; a collective of the pipeline."""
        self.check_places(parameters=False)
        last = self.num_ranks - 1
        for holding in self.holdings:
            if self.position == holding.holders[0] and last not in holding.holders:
                self.group.send(holding.tensor, last)
            elif self.position == last and last not in holding.holders:
                value = torch.empty(holding.tensor.shape, dtype=holding.tensor.dtype)
                yield holding, self.group.receive(value, holding.holders[0])
        self.group.finish()

    @contextmanager
    def whole_at_last(self) -> Iterator[None]:
        """Within the block the last position has all values, on its device; entering is a collective of the pipeline.

        They are other tensors, in the modules alone, and their memory is free at the end: cycles may refer to them.
        """
        values: dict[int, Tensor] = {}
        for holding, value in self.values_of_others():
            value = value.to(self.device)
            if holding.is_parameter:
                value = Parameter(value, requires_grad=holding.tensor.requires_grad)
                for hook in (holding.tensor._backward_hooks or {}).values():
                    value.register_hook(hook)  # type: ignore[no-untyped-call]
            values[id(holding.tensor)] = value
        places = [
            (table, key, holding.tensor) for _, table, key, holding in self._places if id(holding.tensor) in values
        ]
        with self._without_weak_references():
            for table, key, tensor in places:
                table[key] = values[id(tensor)]
        try:
            yield
        finally:
            with self._without_weak_references():
                for table, key, tensor in places:
                    table[key] = tensor
            for value in values.values():
                value.grad, value.data = None, value.new_empty(0)

    def restore(self, peers: MeteredGroup) -> None:
        """Copies all values to the host's memory of every rank of the pipeline, whose collectives ``peers`` has."""
        self.check_places(parameters=False)
        for position, rank in enumerate(self.group.ranks):
            self._share([h for h in self.holdings if h.holders[-1] == position], peers, rank, everywhere=True)

    def split_again(self, bounds: Bounds, moved: Callable[[Holding, int, list[int]], None]) -> bool:
        """Moves tensors to their holders from now on, and returns whether any moved; a collective of the pipeline.

        Parameters stay the same Python objects. A tensor that moves passes through the host's memory of its sender and
        of its receivers.

        Args:
            moved: called on every rank with a parameter, the position of its sender, and the positions of its new
                holders.

        Raises:
            PipelineError: a parameter cannot be exchanged, because something refers to it.
        """
        self.check_places(parameters=False)
        new = {h.name: h for h in _holdings(self._module, self.chain, bounds, self.num_ranks)}
        moving = [h for h in self.holdings if h.name in new and h.holders != new[h.name].holders]
        before = [holding.tensor for holding in moving]
        self.bounds = bounds
        for holding in moving:
            old, holding.holders = holding.holders, new[holding.name].holders
            receivers = [position for position in holding.holders if position not in old]
            self._send(holding, old[-1], receivers)
            if holding.is_parameter:
                moved(holding, old[-1], receivers)
        self.group.finish()
        self.drop()
        self.move()
        for holding, tensor in zip(moving, before, strict=True):
            if holding.is_parameter and holding.tensor is not tensor:
                raise PipelineError(
                    f"parameter {holding.name} cannot move to another stage: something made before the first step "
                    "refers to it, such as a weak reference; leave that out or, where the balance is measured, use "
                    "balance='parameters'"
                )
        return bool(moving)

    def _exchange(self, holding: Holding, value: Tensor) -> None:
        """Replaces a tensor by ``value``: in the same Python object or, if a graph uses that, in all modules."""
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
        """Within the block ``nn.LSTM`` and other recurrent layers have no weak references to their parameters."""
        for part in self._recurrent:
            part._flat_weight_refs = []
        yield
        for part in self._recurrent:
            weights = [getattr(part, name, None) for name in part._flat_weights_names]
            part._flat_weights = weights
            part._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


def _holdings(module: Module, chain: Chain, bounds: Bounds, num_ranks: int) -> Iterator[Holding]:
    everywhere = set(range(num_ranks))
    positions = [0, *(s % num_ranks for s, bound in enumerate(bounds) for _ in range(*bound)), num_ranks - 1]
    holders: dict[int, set[int]] = {}
    for position, layer in zip(positions[1:-1], chain.layers, strict=True):
        for _, tensor in _named_tensors(layer):
            holders.setdefault(id(tensor), set()).add(position)
    outside = _parts_outside(module, chain)
    untraced = set() if chain.is_arranged else {id(t) for part in chain.modules() for t in _own_tensors(part)}
    names: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(module):
        names.setdefault(id(tensor), []).append(name)
    for name, tensor in _named_tensors(module):
        if name != names[id(tensor)][0]:
            continue
        found = holders.get(id(tensor), set())
        is_outside = id(tensor) in outside or not found  # a tensor of no layer can only be used outside of them
        if is_outside:
            uses = chain.uses.get(name, set())
            is_read_only = not (uses or isinstance(tensor, Parameter))
            if is_read_only or id(tensor) in untraced or _is_replicated(chain, names[id(tensor)]):
                found = everywhere
            else:
                found = found | {positions[part] for part in uses or outside.get(id(tensor), {-1})}
        yield Holding(name, tensor, tuple(sorted(found)), is_outside)


def _parts_outside(module: Module, chain: Chain) -> dict[int, set[int]]:
    """The parts of a step that should use each tensor outside of the layers, by its ``id``.

    Part 0 uses tensors that are registered before the layers, part -1 those that are registered after them.
    """
    found: dict[int, set[int]] = {}
    inside, part = chain.modules(), 0
    for child in module.modules():
        if child in inside:
            part = -1
            continue
        for tensor in _own_tensors(child):
            found.setdefault(id(tensor), set()).add(part)
    return found


def _own_tensors(module: Module) -> list[Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _is_replicated(chain: Chain, names: Sequence[str]) -> bool:
    """Whether the user wants a tensor with these names, outside of the layers, on all ranks."""
    if isinstance(chain.replicated, bool):
        return chain.replicated
    return any(f"{name}.".startswith(f"{wanted}.") for name in names for wanted in chain.replicated)


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
