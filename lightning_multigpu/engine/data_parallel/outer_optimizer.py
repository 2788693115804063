"""An optimizer over the changes that ranks make to the weights while each steps alone.

Source: A. Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023, algorithm 1::

    each rank    anchor --> k steps of its own --> weights          change = anchor - weights
    all ranks    anchor <-- a step of Nesterov's SGD from the anchor, whose gradient is the ranks' average change
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import SGD

from lightning_multigpu.communication.tensors import alike, apply_flat
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer

OUTER_OPTIMIZER = "outer_optimizer"  # its state in a checkpoint
FLAT_BYTES = 32 << 20  # a flat copy of all parameters would double the memory of the model


class OuterOptimizer:
    """Nesterov's SGD whose gradient is the change of the weights since the last average, averaged over the ranks.

    A parameter that is new, or was frozen at the last average, takes part from the next average on.

    Args:
        average: averages the ``.grad`` of anchors, by their parameters, over the ranks; a collective.
        lr, momentum: of :class:`torch.optim.SGD`.

    Attributes:
        anchors: the weights, by their parameters, that ranks have begun from.
    """

    def __init__(
        self, average: Callable[[Mapping[Tensor, Tensor]], object], *, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        self._average = average
        self._make = partial(SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
        self.anchors: dict[Tensor, Tensor] = {}
        self._momenta: dict[Tensor, Tensor] = {}
        self._alike: set[Tensor] = set()  # whose values were equal on all ranks at the last average

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights at the last average and of the momentum."""
        return sum(tensor.nbytes for tensor in (*self.anchors.values(), *self._momenta.values()))

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Keeps the weights, equal on all ranks, from which each rank now steps alone."""
        listed = list(parameters)
        self._alike = self._alike or {*listed}
        self.anchors = {p: p.detach().clone() for p in listed if p.requires_grad and p in self._alike}

    @torch.no_grad()
    def step(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Averages the changes and steps; a collective. Returns the parameters to average themselves."""
        anchors, alike_before, self._alike = self.anchors, self._alike, {*parameters}
        for parameter, anchor in anchors.items():
            anchor.grad = anchor - parameter
        self._average(anchors)
        if anchors:
            optimizer = self._make(anchors.values())
            for parameter in anchors.keys() & self._momenta.keys():
                optimizer.state[anchors[parameter]]["momentum_buffer"] = self._momenta[parameter]
            optimizer.step()
            optimizer.zero_grad()
            for parameter, anchor in anchors.items():
                parameter.copy_(anchor)
                if (momentum := optimizer.state[anchor].get("momentum_buffer")) is not None:
                    self._momenta[parameter] = momentum
        return [p for p in parameters if p not in anchors and (p.requires_grad or p not in alike_before)]

    def state(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The momentum of each parameter, by its name."""
        return {name: self._momenta[p] for name, p in named.items() if p in self._momenta}

    def load(self, named: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Goes on from :meth:`state` and the present weights."""
        self._momenta = {p: state[name].to(p) for name, p in named.items() if name in state}


def average_changes(reducer: GradientReducer, anchors: Mapping[Tensor, Tensor]) -> None:
    """Averages the ``.grad`` of anchors, by their parameters; compresses them if the reducer compresses gradients."""
    for members in alike(anchors, full_bytes=FLAT_BYTES):
        changes = [anchors[parameter].grad for parameter in members]
        key = tuple(map(id, members))  # of the error feedback
        apply_flat(partial(reducer.average, key=key), changes)  # type: ignore[arg-type]
    reducer.end_step(1.0)
