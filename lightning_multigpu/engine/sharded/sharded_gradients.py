"""Sharded gradients: each is averaged on the rank that updates its parameter.

Each gradient travels to the rank that owns its parameter while backward still runs; other ranks then drop theirs.
Gradients travel in buckets, each with gradients for all ranks (:mod:`lightning_multigpu.communication.owner_parts`)::

    backward     [g4] ....... [g3] ....... [g2] ....... [g1] ....... [g0] |-- waits --| optimizer
    transfers                   [-- g4 to rank 1, g3 to 0 --]  [-- g2 to 0, g1 to 1 --]

All ranks send in one order, from the module's last parameter to its first, whatever the order of their backward passes.
A bucket is looked at when backward comes to the last of its parameters; the last bucket is sent after backward.

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, as in
FairScale 0.4.13, ``ShardedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.owner_parts import MOST, Bucket, OwnerParts, split
from lightning_multigpu.communication.tensors import marks_of
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
        named = module.named_parameters() if group.size > 1 else ()
        self._names: dict[Any, str] = {p: name for name, p in named if p.requires_grad and p in owners}
        self._owners, self._group, self._parts, self._bucket_bytes = owners, group, parts, bucket_bytes
        self._find_unused, self._shows_all = find_unused, shows_all
        arranged = [*self._arranged(reversed(self._names))]
        self._buckets = [parts.bucket(members, owners) for members in arranged]
        # The last one is sent after backward.
        self._hooks = [] if find_unused else [call_on_gradient(each[-1], self._send_complete) for each in arranged[:-1]]
        # In the present backward pass:
        self._before: dict[Tensor, Any] = {}  # marks of the gradients to which it adds
        self._num_sent = 0
        self._under_way: list[tuple[Bucket, Callable[[], Tensor]]] = []
        self._sparse: set[Tensor] = set()
        # From earlier backward passes:
        self._averaged: list[Tensor] = []
        self._aside: dict[Tensor, Tensor] = {}

    def _arranged(self, parameters: Iterable[Parameter]) -> Iterator[list[Parameter]]:
        """What travels together."""
        filling: dict[tuple[torch.dtype, torch.device], tuple[list[Parameter], list[int]]] = {}
        for parameter in parameters:
            kind = parameter.dtype, parameter.device
            members, filled = filling.setdefault(kind, ([], [0] * self._group.size))
            members.append(parameter)
            filled[self._owners[parameter]] += parameter.nbytes
            if min(filled) >= self._bucket_bytes or sum(filled) >= MOST * len(filled) * self._bucket_bytes:
                yield filling.pop(kind)[0]
        yield from (members for members, _ in filling.values())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block gradients are accumulated, and stay on their ranks."""
        accumulated, self.accumulates = self.accumulates, True
        try:
            yield
        finally:
            self.accumulates = accumulated

    def begin(self) -> None:
        """Begins a backward pass: puts averages of earlier passes aside, so that they are not averaged twice."""
        self._aside = {p: gradient for p, gradient in self._aside.items() if p.grad is not None}
        for parameter in self._averaged:
            if parameter.grad is not None:
                self._aside[parameter], parameter.grad = parameter.grad, None
        self._averaged.clear()
        self._before = {p: marks_of([p.grad]) for p in self._names if p.grad is not None}

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
        rest = self._agreed() if self._find_unused else self._complete()
        for bucket in rest[:-1]:
            self._reduce(bucket)
        meter = self._group.meter
        since = meter.mark(on_stream=any(bucket.members[0].is_cuda for bucket in self._buckets))
        found = [(bucket, wait()) for bucket, wait in self._under_way]
        for bucket in rest[-1:]:
            found.append((bucket, self._reduce(bucket, is_last=True)()))
        meter.waited(since)
        averaged: list[Tensor] = []
        for bucket, flat in found:
            members = bucket.members if self._shows_all else bucket.own[0]
            for parameter, average in zip(members, split(flat, members), strict=True):
                parameter.grad = average.to_sparse(1) if self._sparse and parameter in self._sparse else average
            averaged += members
        for parameter, gradient in self._aside.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._averaged = [*dict.fromkeys([*averaged, *self._aside])] if self._aside else averaged
        self._num_sent = 0
        for each in (self._before, self._aside, self._under_way, self._sparse):
            each.clear()

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _is_ready(self, parameter: Tensor) -> bool:
        """Whether backward has come to a parameter."""
        gradient = parameter.grad
        return gradient is not None and not (self._before and self._before.get(parameter) == marks_of([gradient]))

    def _send_complete(self, _: Any = None) -> None:
        """Sends the next buckets but the last, as far as they are complete."""
        while not self.accumulates and self._num_sent < len(self._buckets) - 1:
            bucket = self._buckets[self._num_sent]
            if not all(map(self._is_ready, bucket.members)):
                return
            self._num_sent += 1
            self._reduce(bucket)

    def _complete(self) -> list[Bucket]:
        """The buckets that are left to send, all of which have all gradients."""
        self._send_complete()
        rest = self._buckets[self._num_sent :]
        if missing := [self._names[p] for bucket in rest for p in bucket.members if not self._is_ready(p)]:
            raise unused_error(missing, "ShardedStrategy")
        sent = (p for bucket in self._buckets[: self._num_sent] for p in bucket.members)
        if twice := [self._names[p] for p in sent if p.grad is not None]:
            raise RuntimeError(
                f"backward has come to {twice[0]} twice, after its gradient was sent: backward is called twice in a "
                "step, or layers that share parameters are checkpointed with use_reentrant=True. Call it once, for the "
                "sum of the losses, pass use_reentrant=False, or use ShardedStrategy(find_unused_parameters=True)"
            )
        return rest

    def _agreed(self) -> list[Bucket]:
        """Buckets of the gradients that any rank has; a rank without one sends zeros."""
        order = [p for bucket in self._buckets for p in bucket.members]
        kinds = torch.tensor([0 if p.grad is None else 1 if p.grad.is_sparse else 2 for p in order])
        found = dict(zip(order, self._group.all_reduce(kinds, "max").tolist(), strict=True))
        for parameter, kind in found.items():
            if kind and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if kind == 1:
                self._sparse.add(parameter)
        there = [(bucket, [p for p in bucket.members if found[p]]) for bucket in self._buckets]
        return [
            bucket if len(members) == len(bucket.members) else self._parts.bucket(members, self._owners)
            for bucket, members in there
            if members
        ]

    @torch.no_grad()
    def _reduce(self, bucket: Bucket, *, is_last: bool = False) -> Callable[[], Tensor]:
        """Begins to average gradients on their owners, or on all ranks."""
        gradients: list[Tensor] = []
        for parameter in bucket.members:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if gradient.is_sparse:
                self._sparse.add(parameter)
                gradient = gradient.to_dense()
            gradients.append(gradient)
        wait = self._parts.reduce(bucket, gradients, to_all=self._shows_all, is_last=is_last)
        if not is_last:
            self._under_way.append((bucket, wait))
        return wait
