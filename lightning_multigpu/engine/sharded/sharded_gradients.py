"""Sharded gradients: each is averaged on the rank that updates its parameter, by FairScale's ShardedDataParallel.

Each gradient travels to the rank that owns its parameter while backward still runs; other ranks then drop theirs. Small
gradients for one rank travel together, in a bucket::

    backward     [g4] ....... [g3] ....... [g2] ....... [g1] ....... [g0] |-- waits --| optimizer
    transfers        [-- g4 to rank 1 --]   [-- g3, g2 to rank 0 --]    [-- ... ------]

All ranks send in one order, from the module's last parameter to its first, whatever the order of their backward passes.

FairScale 0.4.13 fails on torch 2.13 in these cases, which :class:`ShardedGradients` handles:

- ``zero_grad`` sets gradients to None nowadays, and a bucket then sends the gradients of an earlier step.
- If ranks' losses depend on different parameters, or backward reaches them in another order, ranks add up gradients of
  different parameters, or wait for ever.
- Of several backward passes after one forward pass, only the first is averaged.
- A parameter that no loss depends on gets a gradient of zero in a bucket, so that weight decay and momentum change it.
- Sparse gradients fail.

Source: FairScale 0.4.13, ``fairscale/nn/data_parallel/sharded_ddp.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fairscale.internal.params import Workhandle
from fairscale.nn.data_parallel import ShardedDataParallel
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.clocks import recorded_event
from lightning_multigpu.engine.data_parallel.trained_parameters import unused_error
from lightning_multigpu.engine.sharded.shard_transport import ShardTransport, quiet
from lightning_multigpu.placement.gradient_kinds import ABSENT, SPARSE, kind_of


class ShardedGradients(ShardedDataParallel):  # type: ignore[misc]  # without annotations
    """A module each of whose gradients is averaged on one rank; see the top of this file.

    After :meth:`finish` a parameter has a gradient on its own rank and, unless ``shows_all``, on no other.

    Args:
        module: has a trained parameter; the same on all ranks.
        transports: of the optimizers. Gradients of parameters without an optimizer stay as they are.
        group: the ranks; its meter records every transfer.
        bucket_bytes: size of the buffer in which small gradients travel to a rank; one for each rank, 0 for none.
        reduce_dtype: float16 or bfloat16 to send gradients in, without buckets only; None keeps the gradients' dtype.
        find_unused: the losses of ranks may depend on different parameters. After each backward pass the ranks agree on
            the parameters with a gradient, and only then send gradients.
        shows_all: every rank gets the averaged gradients of all parameters, for code that reads them.
    """

    def __init__(
        self,
        module: Module,
        transports: Sequence[ShardTransport],
        group: MeteredGroup,
        *,
        bucket_bytes: int = 0,
        reduce_dtype: torch.dtype | None = None,
        find_unused: bool = False,
        shows_all: bool = False,
    ) -> None:
        with quiet():
            super().__init__(
                module,
                [transport.shards for transport in transports],
                process_group=group.group,
                broadcast_buffers=False,
                sync_models_at_startup=False,
                reduce_buffer_size=bucket_bytes // max(p.element_size() for p in module.parameters()),
                auto_refresh_trainable=False,
                reduce_fp16=reduce_dtype == torch.float16,
                warn_on_trainable_params_changed=False,
            )
        self._group = group
        self._meter = group.meter
        self._find_unused = find_unused
        self._shows_all = shows_all and group.size > 1
        self._bf16 = reduce_dtype == torch.bfloat16
        self._on_stream = self.device_type == "cuda"
        self._transfers = self._work_handles = _Transfers(group, on_stream=self._on_stream)
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._reduces: dict[Parameter, Callable[[], None]] = {}
        self._views: dict[Parameter, Tensor] = {}
        # In the present backward pass:
        self._ready: set[Parameter] = set()
        self._sent: list[Parameter] = []
        self._sparse: set[Parameter] = set()
        self._unused: set[Parameter] = set()
        # From earlier backward passes:
        self._averaged: list[Parameter] = []
        self._shown: list[Parameter] = []
        self._aside: dict[Parameter, Tensor] = {}
        self._shown_before: dict[Parameter, Tensor] = {}

    @property
    def accumulates(self) -> bool:
        """Whether gradients stay on their ranks: within :meth:`no_sync`."""
        return bool(self._should_accumulate_grads)

    @property
    def spare_bytes(self) -> int:
        """Bytes of the buckets that hold no parameter's gradient at present: those for other ranks."""
        buckets = sum(bucket.buffer.nbytes for bucket in self._bucket_list)
        own = (v.nbytes for p, v in self._views.items() if p.grad is not None and p.grad.data_ptr() == v.data_ptr())
        return int(buckets - sum(own))

    def begin(self) -> None:
        """Begins a backward pass: puts gradients of earlier passes aside, so that they are not averaged twice."""
        self._shown_before = {p: p.grad for p in self._shown if p.grad is not None}
        for parameter in self._shown:
            parameter.grad = None
        self._shown.clear()
        self._aside = {p: gradient for p, gradient in self._aside.items() if p.grad is not None}
        for parameter in self._averaged:
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad, None
                self._aside[parameter] = gradient.clone() if parameter in self._views else gradient
        self._averaged.clear()

    def finish_accumulating(self) -> None:
        """Ends a backward pass without communication: gradients stay on their ranks."""
        unused = [parameter for parameter in self._aside if parameter.grad is None]
        for parameter in unused:
            parameter.grad = self._aside.pop(parameter)
        self._averaged += unused

    def finish(self) -> None:
        """Ends a backward pass: waits for its gradients. A collective.

        Raises:
            RuntimeError: a parameter has no gradient, and other ranks wait for it.
        """
        if self._find_unused:
            self._send_agreed()
        elif len(self._sent) < len(self._order):
            raise unused_error([self._names[p] for p in self._order if p not in self._ready], "ShardedStrategy")
        event = recorded_event() if self._on_stream else None
        since_s = self._meter.now()
        self._consume_work_handles()
        if event is not None:
            self._meter.waited_on_stream(event)
        else:
            self._meter.waited(since_s, self._meter.now())
        self._sent, sent = [], self._sent
        for parameter in sent:
            self._settle(parameter)
        for parameter, gradient in self._aside.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._averaged = [*{*sent, *self._aside}]
        self._aside.clear()
        if self._shows_all:
            self._show(sent)
            for parameter in self._shown_before.keys() - {*self._shown}:
                parameter.grad = self._shown_before[parameter]
                self._shown.append(parameter)
            self._shown_before.clear()
        self._ready.clear()
        self._sparse.clear()
        self._unused.clear()
        self._clear_counters()

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        while self._grad_hooks:
            self._grad_hooks.pop().remove()

    def refresh_trainable(self) -> None:
        with quiet():
            super().refresh_trainable()
        self._order = [p for p in reversed(list(self.module.parameters())) if p in self._reduces]

    def _setup_bucket_strategy(self) -> None:
        gradients = {parameter: parameter.grad for parameter in self._trainable_params}
        for parameter in gradients:
            parameter.grad = None
        super()._setup_bucket_strategy()
        for parameter, gradient in gradients.items():  # a bucket has replaced it by zeros
            parameter.grad = gradient
        for bucket in self._bucket_list:
            parts = bucket.buffer.split_with_sizes([parameter.numel() for parameter in bucket._params])
            self._views |= {p: part.view_as(p) for p, part in zip(bucket._params, parts, strict=True)}

    def _get_reduce_fn(self, index: int, param: Parameter, dst_rank: int) -> Callable[..., None]:
        self._reduces[param] = super()._get_reduce_fn(index, param, dst_rank)

        def ready(*_: Any) -> None:
            if not self._should_accumulate_grads:
                self._gradient_is_ready(param)

        return ready

    @torch.no_grad()
    def _gradient_is_ready(self, parameter: Parameter) -> None:
        if self._find_unused:
            return
        if parameter in self._ready:
            raise RuntimeError(
                f"backward has come to {self._names[parameter]} twice, after its gradient was sent: backward is called "
                "twice in a step, or layers that share parameters are checkpointed with use_reentrant=True. Call it "
                "once, for the sum of the losses, pass use_reentrant=False, or use "
                "ShardedStrategy(find_unused_parameters=True)"
            )
        self._ready.add(parameter)
        while len(self._sent) < len(self._order) and self._order[len(self._sent)] in self._ready:
            self._send(self._order[len(self._sent)])

    @torch.no_grad()
    def _send_agreed(self) -> None:
        """Sends the gradients that any rank has; a rank without one sends zeros."""
        kinds = torch.tensor([kind_of(parameter.grad) for parameter in self._order], dtype=torch.int32)
        found = dict(zip(self._order, self._group.all_reduce(kinds, "max").tolist(), strict=True))
        full = [bucket for bucket in self._bucket_list if any(found[p] != ABSENT for p in bucket._params)]
        together = {parameter for bucket in full for parameter in bucket._params}
        for parameter, kind in found.items():
            if kind == ABSENT and parameter not in together:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if kind == SPARSE:
                self._sparse.add(parameter)
            if kind == ABSENT:
                self._unused.add(parameter)
            self._send(parameter)

    def _send(self, parameter: Parameter) -> None:
        """Lets FairScale send a gradient, or put it into its bucket and send the bucket when it is full."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            self._sparse.add(parameter)
            gradient = gradient.to_dense()
        view = self._views.get(parameter)
        if view is not None:
            gradient = view.copy_(gradient)
        parameter.grad = gradient
        if self._bf16:
            parameter.grad.data = parameter.grad.data.bfloat16()
        size_bytes = parameter.grad.nbytes // (2 if self._reduce_fp16 else 1)
        if view is not None:
            size_bytes = self._buckets[parameter.device][self._trainable_param_to_rank[parameter]].buffer.nbytes
        self._transfers.following = self._trainable_param_to_rank[parameter], size_bytes
        self._bucket_flush_callback_set = True  # finish() does FairScale's work at the end of backward
        self._reduces[parameter]()
        self._sent.append(parameter)

    def _settle(self, parameter: Parameter) -> None:
        if self._trainable_param_to_rank[parameter] != self._rank or parameter in self._unused:
            parameter.grad = None
        elif parameter in self._sparse:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_sparse(1)
        elif parameter in self._views:  # its own tensor: "grad.data = ..." would move the bucket's view
            parameter.grad = self._views[parameter].detach()

    def _show(self, sent: Sequence[Parameter]) -> None:
        """Gives the other ranks copies of the gradients; the next backward pass drops the copies."""
        for rank, source in enumerate(self._group.ranks):
            own = rank == self._rank
            of_rank = [p for p in sent if self._trainable_param_to_rank[p] == rank and p not in self._unused]
            for parameter in () if own else of_rank:
                parameter.grad = torch.empty_like(parameter)
            values = [parameter.grad.to_dense() for parameter in of_rank if parameter.grad is not None]
            self._group.broadcast_tensors(values, src=source)
            self._shown += () if own else of_rank


class _Transfers(deque[Workhandle]):
    """FairScale's queue of transfers under way; the group's meter records each.

    ``following`` is the target rank of the next transfer, and its bytes.
    """

    def __init__(self, group: MeteredGroup, *, on_stream: bool) -> None:
        super().__init__()
        self._group = group
        self._on_stream = on_stream
        self.following = 0, 0

    def append(self, entry: Workhandle) -> None:
        target, size_bytes = self.following
        sent_bytes = 0 if target == self._group.rank else size_bytes
        transfer = self._group.begin("reduce", size_bytes, sent_bytes=sent_bytes, on_stream=self._on_stream)
        entry.handle.get_future().add_done_callback(lambda _: transfer.finish())
        super().append(entry)
