"""Sharded gradients: each is averaged on the rank that updates its parameter.

Each gradient travels to the rank that owns its parameter while backward still runs; other ranks then drop theirs.
Gradients travel in buckets, each with gradients for all ranks (:mod:`lightning_multigpu.communication.owner_parts`)::

    backward     [g4] ....... [g3] ....... [g2] ....... [g1] ....... [g0] |-- waits --| optimizer
    transfers                   [-- g4 to rank 1, g3 to 0 --]  [-- g2 to 0, g1 to 1 --]

All ranks send in one order, from the module's last parameter to its first, whatever the order of their backward passes.

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, as in
FairScale 0.4.13, ``ShardedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.owner_parts import MOST, Bucket, OwnerParts, split
from lightning_multigpu.engine.data_parallel.trained_parameters import unused_error
from lightning_multigpu.placement.owned_step import call_on_gradient


class ShardedGradients:
    """The gradients of a module, each of which is averaged on one rank; see the top of this file.

    After :meth:`finish` a parameter has a gradient on its own rank and, unless ``shows_all``, on no other.

    Args:
        module: the same on all ranks.
        owners: the rank within the group of each parameter that an optimizer has. Other gradients stay as they are.
        group: the ranks; its meter records the waits.
        parts: moves the gradients.
        bucket_bytes: a bucket has at least these bytes for each rank, but no more than eight times as many together.
        find_unused: the losses of ranks may depend on different parameters. After each backward pass the ranks agree on
            the parameters with a gradient, and only then send gradients.
        shows_all: every rank gets the averaged gradients of all parameters, for code that reads them.

    Attributes:
        accumulates: whether gradients stay on their ranks: within :meth:`no_sync`.
    """

    def __init__(
        self,
        module: Module,
        owners: Mapping[Tensor, int],
        group: MeteredGroup,
        parts: OwnerParts,
        *,
        bucket_bytes: int = 0,
        find_unused: bool = False,
        shows_all: bool = False,
    ) -> None:
        self.accumulates = False
        self._names = {p: name for name, p in module.named_parameters() if p.requires_grad and p in owners}
        self._order = [*reversed(self._names)]
        self._owners, self._group, self._parts, self._bucket_bytes = owners, group, parts, bucket_bytes
        self._find_unused, self._shows_all = find_unused, shows_all
        self._hooks = [call_on_gradient(p, partial(self._gradient_is_ready, at)) for at, p in enumerate(self._order)]
        # In the present backward pass:
        self._is_ready = bytearray(len(self._order))  # by place in the order
        self._num_sent = 0
        self._filling: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
        self._filled_bytes: dict[tuple[torch.dtype, torch.device], list[int]] = {}  # by owner
        self._under_way: list[tuple[Bucket, Callable[[], Tensor]]] = []
        self._sparse: set[Parameter] = set()
        # From earlier backward passes:
        self._averaged: list[Parameter] = []
        self._aside: dict[Parameter, Tensor] = {}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block gradients are accumulated, and stay on their ranks."""
        accumulated, self.accumulates = self.accumulates, True
        try:
            yield
        finally:
            self.accumulates = accumulated

    def begin(self) -> None:
        """Begins a backward pass: puts gradients of earlier passes aside, so that they are not averaged twice."""
        self._aside = {p: gradient for p, gradient in self._aside.items() if p.grad is not None}
        for parameter in self._averaged:
            if parameter.grad is not None:
                self._aside[parameter], parameter.grad = parameter.grad, None
        self._averaged.clear()

    @torch.no_grad()
    def finish(self) -> None:
        """Ends a backward pass: waits for the averages, unless gradients accumulate. A collective then.

        Raises:
            RuntimeError: a parameter has no gradient, and other ranks wait for it.
        """
        if self.accumulates:
            without = [parameter for parameter in self._aside if parameter.grad is None]
            for parameter in without:
                parameter.grad = self._aside.pop(parameter)
            self._averaged += without
            return
        if self._find_unused:
            self._send_agreed()
        elif self._num_sent < len(self._order):
            raise unused_error(
                [self._names[p] for p, ready in zip(self._order, self._is_ready, strict=True) if not ready],
                "ShardedStrategy",
            )
        for parameters in self._filling.values():
            self._reduce(parameters)
        averaged = [*self._settle()]
        for parameter, gradient in self._aside.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._averaged = [*dict.fromkeys([*averaged, *self._aside])]
        self._num_sent, self._is_ready = 0, bytearray(len(self._order))
        for each in (self._aside, self._filling, self._filled_bytes, self._under_way, self._sparse):
            each.clear()

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _gradient_is_ready(self, place: int, parameter: Any) -> None:
        if self.accumulates or self._find_unused:
            return
        if self._is_ready[place]:
            raise RuntimeError(
                f"backward has come to {self._names[parameter]} twice, after its gradient was sent: backward is called "
                "twice in a step, or layers that share parameters are checkpointed with use_reentrant=True. Call it "
                "once, for the sum of the losses, pass use_reentrant=False, or use "
                "ShardedStrategy(find_unused_parameters=True)"
            )
        self._is_ready[place] = True
        while self._num_sent < len(self._order) and self._is_ready[self._num_sent]:
            self._send(self._order[self._num_sent])
            self._num_sent += 1

    def _send_agreed(self) -> None:
        """Sends the gradients that any rank has; a rank without one sends zeros. A sum is dense if one of them is."""
        kinds = torch.tensor([0 if p.grad is None else 1 if p.grad.is_sparse else 2 for p in self._order])
        for parameter, kind in zip(self._order, self._group.all_reduce(kinds, "max").tolist(), strict=True):
            if kind == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if kind == 1:
                self._sparse.add(parameter)
            self._send(parameter)

    def _send(self, parameter: Parameter) -> None:
        """Puts a gradient into a bucket, and sends the bucket when it is full."""
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            self._sparse.add(parameter)
        kind = parameter.dtype, parameter.device
        self._filling.setdefault(kind, []).append(parameter)
        filled = self._filled_bytes.setdefault(kind, [0] * self._group.size)
        filled[self._owners[parameter]] += parameter.nbytes
        if min(filled) >= self._bucket_bytes or sum(filled) >= MOST * len(filled) * self._bucket_bytes:
            self._reduce(self._filling.pop(kind))
            del self._filled_bytes[kind]

    @torch.no_grad()
    def _reduce(self, parameters: Sequence[Parameter]) -> None:
        """Begins to average gradients on their owners, or on all ranks."""
        bucket = self._parts.bucket(parameters, self._owners)
        gradients = [p.grad for p in bucket.members if p.grad is not None]
        flat = torch.cat([(each.to_dense() if each.is_sparse else each).reshape(-1) for each in gradients])
        del gradients
        for parameter in bucket.members:
            parameter.grad = None
        self._under_way.append((bucket, self._parts.reduce(bucket, flat, to_all=self._shows_all)))

    def _settle(self) -> Iterator[Parameter]:
        """Waits for the averages, and makes them the gradients of this rank's parameters, which it returns."""
        meter = self._group.meter
        since = meter.mark(on_stream=any(bucket.members[0].is_cuda for bucket, _ in self._under_way))
        found = [(bucket.members if self._shows_all else bucket.own[0], wait()) for bucket, wait in self._under_way]
        meter.waited(since)
        for members, flat in found:
            for parameter, average in zip(members, split(flat, members), strict=True):
                parameter.grad = average.to_sparse(1) if parameter in self._sparse else average
                yield parameter  # type: ignore[misc]
