"""The ranks among which layers are split, and the collectives on activations that their layers need."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.digest import ranks_text
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.metering.records import Transfer
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from lightning_multigpu.communication.shared_memory.segment import SharedMemoryUnavailableError
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.replaced_attributes import replaced

_BESIDE_FROM_BYTES = 1 << 20
"""Smaller tensors are reduced at once: to hand one to the thread costs more than it hides."""

_LARGEST_SEED = 2**62
_READ_TIMEOUT_S = 60


class TensorGroup:
    """The collectives of the ranks that share each layer; all ranks must call the same ones in the same order.

    CPU tensors of ranks on one host are reduced through shared memory, others by the group's back end. Sums have the
    same bits on every rank. Making one is a collective of the group. The collectives have no gradients: the layers and
    functions of this package do.

    ==============  ======================  ======================================================
    N ranks         shape on each rank      result, and what a rank sends in a ring of its bytes
    ==============  ======================  ======================================================
    all_reduce      (...), overwritten      (...), the sum on all; 2 (N - 1) / N
    all_gather      (..., length / N, ...)  (..., length, ...) on all; (N - 1) / N
    ==============  ======================  ======================================================

    Through shared memory nothing is sent. The meter counts the bytes of the whole tensors. Communication in a ring:
    Patarasuk and Yuan (2009).

    Args:
        group: the ranks, 2 or more; None for the first of ``size`` ranks without the others, for trials: it is always
            :meth:`alone`.
        meter: counts every transfer, under the name of the layer.
        shared_memory: reduce CPU tensors through shared memory where the ranks can share it.
        readers: the same ranks over Gloo; for :meth:`agree_on_read`.

    Attributes:
        on_gather: called with the layer's name and the operation that needs the whole of a :class:`.SplitTensor`.
        shows_parts: parameters of split layers read as this rank's part, and not as whole ones; see :meth:`showing`.
        observer: called with the operation, the layer's name and the bytes of each collective, also within
            :meth:`alone`, in the thread that asks for it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        size: int = 0,
        meter: Meter | None = None,
        shared_memory: bool = True,
        readers: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self._readers = readers
        self._is_alone = group is None
        self.shows_parts = True
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = size if group is None else dist.get_world_size(group)
        self.on_gather: Callable[[str, str], object] = lambda layer, operation: None
        self.observer: Callable[[str, str, int], object] | None = None
        self._is_nccl = group is not None and dist.get_backend(group) == "nccl"
        self._meter = meter or Meter()
        self._ranks = "" if group is None else ranks_text(dist.get_process_group_ranks(group))
        self._shared: SharedMemoryAllReduce | None = None
        if shared_memory and group is not None and not self._is_nccl:
            # Raised on all ranks, if some are on other hosts or in other containers.
            with contextlib.suppress(SharedMemoryUnavailableError):
                self._shared = SharedMemoryAllReduce(group)
        self._thread: ThreadPoolExecutor | None = None

    def alone(self) -> AbstractContextManager[None]:
        """A block in which nothing is sent: a sum is this rank's own tensor, and the parts of other ranks are zeros.

        For trying whether a step runs: a rank in which it raises an error leaves no other one waiting.
        """
        return replaced(self, _is_alone=True)

    def showing(self, *, parts: bool) -> AbstractContextManager[None]:
        """A block in which parameters of split layers read as this rank's part, or as the whole ones."""
        return replaced(self, shows_parts=parts)

    def agree_on_read(self, what: str) -> None:
        """Waits until all ranks come to the same read of a whole tensor; does nothing without ``readers``.

        Raises:
            RuntimeError: the other ranks do not come to it within 60 s: they run other code.
        """
        try:
            if self._readers is None or self._is_alone:
                return
            own = torch.tensor([zlib.crc32(what.encode())])
            told = [torch.zeros_like(own) for _ in range(self.size)]
            dist.all_gather(told, own, group=self._readers, async_op=True).wait(timedelta(seconds=_READ_TIMEOUT_S))
            if all(torch.equal(own, each) for each in told):
                return
            problem = "another rank reads something else"
        except RuntimeError:
            problem = f"the other ranks have not come to it within {_READ_TIMEOUT_S} s"
        raise RuntimeError(
            f"{what}, which are split over the ranks, are gathered, and {problem}: all ranks of a tensor group have to "
            "run this code, also where rank 0 alone uses the result"
        )

    @contextlib.contextmanager
    def own_random(self, device: torch.device) -> Iterator[None]:
        """Within the block random numbers differ between ranks: for parts of tensors.

        They follow from those outside of it, so that an activation checkpoint draws the same again.
        """
        seed = int(torch.randint(_LARGEST_SEED, ())) + 1 + self.rank  # the same on all ranks, but for the rank
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                torch.cuda.manual_seed(seed)
            yield

    def all_reduce(self, tensor: Tensor, name: str) -> Tensor:
        """Sums ``tensor``, contiguous and of one shape and dtype on all ranks, in place over all ranks; returns it."""
        self._observe("all_reduce", tensor, name)
        return tensor if self._is_silent(tensor) else self._reduce(tensor, name, blocking=True)

    def begin_all_reduce(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """:meth:`all_reduce` beside what this rank computes; no other collective may begin before its end.

        It runs beside on GPUs, and on CPUs where the tensor has 1 MiB or more. Returns a function that waits for its
        end, and returns the tensor.
        """
        if tensor.nbytes < _BESIDE_FROM_BYTES and not self._is_nccl:
            self.all_reduce(tensor, name)
            return lambda: tensor
        self._observe("all_reduce", tensor, name)
        if self._is_silent(tensor):
            return lambda: tensor
        if self._is_nccl:
            transfer = self._begin("all_reduce", tensor, name)
            work: Any = dist.all_reduce(tensor, group=self.group, async_op=True)

            def finish() -> Tensor:
                with transfer:
                    work.wait()
                return tensor

            return finish
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "tensor-split")
        reducing, meter = self._thread.submit(self._reduce, tensor, name, blocking=False), self._meter

        def wait() -> Tensor:
            start_s = meter.now()
            try:
                return reducing.result()
            finally:
                meter.waited(start_s, meter.now())

        return wait

    def all_gather(self, tensor: Tensor, dim: int, bounds: Sequence[tuple[int, int]], name: str) -> Tensor:
        """The parts of all ranks, one after the other along ``dim``; contiguous if that is the first one.

        ``bounds`` are first and one-past-last index of each rank's part in the result, one after the other.
        """
        if self._is_nccl and tensor.is_cpu and not self._is_silent(tensor):  # an average in the host's memory
            return self.all_gather(tensor.cuda(), dim, bounds, name).cpu()
        own = tensor.detach().movedim(dim, 0).contiguous()
        whole = own.new_zeros(bounds[-1][1], *own.shape[1:])
        row = whole[0].numel()
        start, stop = bounds[self.rank]
        self._observe("all_gather", whole, name)
        if self._is_silent(tensor):
            whole[start:stop] = own
            return whole.movedim(0, dim)
        shared = self._shared_for(tensor)
        with self._begin("all_gather", whole, name, blocking=True):
            if shared is not None:
                whole[start:stop] = own
                shared.all_gather(whole, bounds=[(a * row, b * row) for a, b in bounds])
            else:
                padded = own.new_zeros(max(b - a for a, b in bounds), *own.shape[1:])
                padded[: len(own)] = own
                parts = [torch.empty_like(padded) for _ in bounds]
                dist.all_gather(parts, padded, group=self.group)
                for (a, b), part in zip(bounds, parts, strict=True):
                    whole[a:b] = part[: b - a]
        return whole.movedim(0, dim)

    def abort(self) -> None:
        """Makes ranks raise that wait for each other in shared memory; any thread may call it."""
        shared = self._shared  # which close() may take away meanwhile
        if shared is not None:
            shared.abort()

    def close(self) -> None:
        """Ends the thread and releases shared memory; a second call does nothing."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._shared is not None:
            self._shared.close()
        # torch keeps the graph of a backward pass that raises an error, and its functions have this object.
        vars(self).update(group=None, _readers=None, _shared=None, _meter=None, on_gather=_refuse, observer=None)

    def _is_silent(self, tensor: Tensor) -> bool:
        """Whether nothing is sent: within :meth:`alone`, and for what has no values on this stage of a pipeline."""
        return self._is_alone or isinstance(tensor, Placeholder)

    def _reduce(self, tensor: Tensor, name: str, *, blocking: bool) -> Tensor:
        with self._begin("all_reduce", tensor, name, blocking=blocking):
            if (shared := self._shared_for(tensor)) is not None:
                shared(tensor)
            else:
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def _shared_for(self, tensor: Tensor) -> SharedMemoryAllReduce | None:
        """The shared memory for CPU tensors; None for those on a GPU, which Gloo takes to the host by itself."""
        return self._shared if tensor.is_cpu else None

    def _observe(self, operation: str, tensor: Tensor, name: str) -> None:
        if self.observer is not None:
            self.observer(operation, name, tensor.nbytes)

    def _begin(self, operation: str, tensor: Tensor, name: str, *, blocking: bool = False) -> Transfer:
        size_bytes, uses_memory = tensor.nbytes, self._shared_for(tensor) is not None
        return self._meter.begin(
            operation,
            group=f"tensor {name}".rstrip(),
            group_size=self.size,
            size_bytes=size_bytes,
            memory_bytes=size_bytes if uses_memory else 0,
            sent_bytes=size_bytes if uses_memory else None,
            blocking=blocking,
            ranks=self._ranks,
            on_stream=self._is_nccl,
        )


def _refuse(layer: str, operation: str) -> None:
    raise RuntimeError(
        f"{operation} needs the values of {layer} that the other ranks have, and the run has ended: read them before "
        "the end of the fit, or load a checkpoint"
    )
