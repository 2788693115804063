"""Sharded gradients: each is averaged on the rank that updates its parameter.

Each gradient travels to the rank that owns its parameter while backward still runs; other ranks then drop theirs. Small
gradients for one rank travel together, in a bucket::

    backward     [g4] ....... [g3] ....... [g2] ....... [g1] ....... [g0] |-- waits --| optimizer
    transfers        [-- g4 to rank 1 --]   [-- g3, g2 to rank 0 --]    [-- ... ------]

All ranks send in one order, from the module's last parameter to its first, whatever the order of their backward passes.

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, as in
FairScale 0.4.13, ``ShardedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.traffic import sent_share
from lightning_multigpu.engine.data_parallel.trained_parameters import unused_error
from lightning_multigpu.placement.gradient_kinds import ABSENT, SPARSE, kind_of
from lightning_multigpu.placement.owned_step import call_on_gradient


class ShardedGradients:
    """The gradients of a module, each of which is averaged on one rank; see the top of this file.

    After :meth:`finish` a parameter has a gradient on its own rank and, unless ``shows_all``, on no other.

    Args:
        module: the same on all ranks.
        owners: the rank within the group of each parameter that an optimizer has. Other gradients stay as they are.
        group: the ranks; its meter records every transfer.
        bucket_bytes: small gradients for one rank travel together, in messages of at least these bytes.
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
        *,
        bucket_bytes: int = 0,
        find_unused: bool = False,
        shows_all: bool = False,
    ) -> None:
        self.accumulates = False
        self._names = {p: name for name, p in module.named_parameters() if p.requires_grad and p in owners}
        self._order = [*reversed(self._names)]
        self._owners, self._group, self._bucket_bytes = owners, group, bucket_bytes
        self._find_unused, self._shows_all = find_unused, shows_all
        self._hooks = [call_on_gradient(p, self._gradient_is_ready) for p in self._order]
        # In the present backward pass:
        self._ready: set[Tensor] = set()
        self._num_sent = 0
        self._buckets: dict[tuple[int, torch.dtype, torch.device], list[Parameter]] = {}
        self._filled_bytes: dict[tuple[int, torch.dtype, torch.device], int] = {}
        self._under_way: list[tuple[int, list[Parameter], Tensor, Any]] = []
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
            raise unused_error([self._names[p] for p in self._order if p not in self._ready], "ShardedStrategy")
        for (owner, *_), parameters in self._buckets.items():
            self._reduce(owner, parameters)
        self._wait()
        averaged = [
            parameter
            for owner, parameters, flat, _ in self._under_way
            for parameter in self._settle(owner, parameters, flat)
        ]
        for parameter, gradient in self._aside.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._averaged = [*dict.fromkeys([*averaged, *self._aside])]
        self._num_sent = 0
        for each in (self._aside, self._ready, self._buckets, self._filled_bytes, self._under_way, self._sparse):
            each.clear()

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _gradient_is_ready(self, parameter: Any) -> None:
        if self.accumulates or self._find_unused:
            return
        if parameter in self._ready:
            raise RuntimeError(
                f"backward has come to {self._names[parameter]} twice, after its gradient was sent: backward is called "
                "twice in a step, or layers that share parameters are checkpointed with use_reentrant=True. Call it "
                "once, for the sum of the losses, pass use_reentrant=False, or use "
                "ShardedStrategy(find_unused_parameters=True)"
            )
        self._ready.add(parameter)
        while self._num_sent < len(self._order) and self._order[self._num_sent] in self._ready:
            self._send(self._order[self._num_sent])
            self._num_sent += 1

    def _send_agreed(self) -> None:
        """Sends the gradients that any rank has; a rank without one sends zeros."""
        kinds = torch.tensor([kind_of(parameter.grad) for parameter in self._order], dtype=torch.int32)
        for parameter, kind in zip(self._order, self._group.all_reduce(kinds, "max").tolist(), strict=True):
            if kind == ABSENT:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if kind == SPARSE:
                self._sparse.add(parameter)
            self._send(parameter)

    def _send(self, parameter: Parameter) -> None:
        """Puts a gradient into the bucket of its owner, and sends the bucket when it is full."""
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            self._sparse.add(parameter)
        if parameter.nbytes >= self._bucket_bytes:
            self._reduce(self._owners[parameter], [parameter])
            return
        kind = self._owners[parameter], parameter.dtype, parameter.device
        self._buckets.setdefault(kind, []).append(parameter)
        self._filled_bytes[kind] = self._filled_bytes.get(kind, 0) + parameter.nbytes
        if self._filled_bytes[kind] >= self._bucket_bytes:
            self._reduce(self._owners[parameter], self._buckets.pop(kind))
            del self._filled_bytes[kind]

    def _reduce(self, owner: int, parameters: list[Parameter]) -> None:
        """Begins to average gradients on their owner, or on all ranks."""
        group = self._group
        dense = [p.grad.to_dense().reshape(-1) for p in parameters if p.grad is not None]
        flat = (torch.cat(dense) if len(dense) > 1 else dense[0].contiguous()).div_(group.size)
        share = sent_share("all_reduce", group.size) if self._shows_all else float(owner != group.rank)
        transfer = group.begin("reduce", flat.nbytes, sent_bytes=round(share * flat.nbytes), on_stream=flat.is_cuda)
        work: Any
        if self._shows_all:
            work = dist.all_reduce(flat, group=group.group, async_op=True)
        else:
            work = dist.reduce(flat, group.ranks[owner], group=group.group, async_op=True)
        work.get_future().add_done_callback(lambda _: transfer.finish())
        self._under_way.append((owner, parameters, flat, work))

    def _wait(self) -> None:
        meter = self._group.meter
        since = meter.mark(on_stream=any(flat.is_cuda for _, _, flat, _ in self._under_way))
        for *_, work in self._under_way:
            work.wait()
        meter.waited(since)

    def _settle(self, owner: int, parameters: Sequence[Parameter], flat: Tensor) -> Sequence[Parameter]:
        """Makes the averages the gradients of this rank's parameters, which it returns; others have none."""
        if not self._shows_all and owner != self._group.rank:
            for parameter in parameters:
                parameter.grad = None
            return []
        for parameter, part in zip(parameters, flat.split_with_sizes([p.numel() for p in parameters]), strict=True):
            average = part.view_as(parameter)
            parameter.grad = average.to_sparse(1) if parameter in self._sparse else average
        return parameters
