"""The reducer: averages gradients over the ranks, bucket by bucket, while backward still runs.

torch's DistributedDataParallel collects gradients in buckets and passes each full bucket to the reducer's hook. The
reducer's thread sends the buckets around the ring in that order. DistributedDataParallel waits for them at the end. The
main thread sends the last bucket itself if the thread is idle::

    main thread     backward ...... [b0 full] ..... [b1 full] ..... [b2 full] |-- waits --| optimizer
                                       |               |               |      :           :
    ring thread                        [--- b0 ---]    [--- b1 ---]    [--- b2 -----------]
                                        hidden          hidden          hidden  exposed
"""

# No postponed annotations here: torch reads those of a communication hook as objects.
import queue
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_multigpu.communication.digest import ranks_text
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce, Plan
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.metering.records import Mark, Transfer
from lightning_multigpu.communication.ring import RingAllReduce
from lightning_multigpu.communication.tensors import size_bytes

CommHook = Callable[[Any, GradBucket], Future[Tensor]]


@dataclass
class _Bucket:
    """A bucket of torch's, for as long as its memory stays the same.

    Attributes:
        place: its address and number of elements.
        key: of its gradients in every step, for compression.
        parameters, addresses: those whose gradients it has, and where in it each gradient is.
        plan: how it is reduced; made at its first step.
    """

    index: int
    place: tuple[int, int]
    key: Hashable
    parameters: list[Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    plan: Plan | None = None


_Job = tuple[Tensor, _Bucket | None, Future[Tensor]]


class GradientReducer:
    """The communication hook behind a DistributedDataParallel module.

    Tensors travel through ``all_reduce``; CUDA tensors are copied to the host for it. Without ``all_reduce`` and with a
    group over NCCL, NCCL moves them. :meth:`finish` raises the exception of a hook: torch would turn it into a cast
    error.

    Args:
        group: the ranks to average over; nothing else may use it.
        meter: records every bucket.
        hook: a user's own communication hook and its state, used in place of ``all_reduce``.
        all_reduce: over the same ranks; by default NCCL or, with another back end, a ring.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        meter: Meter,
        *,
        hook: tuple[Any, CommHook] | None = None,
        all_reduce: HierarchicalAllReduce | None = None,
    ) -> None:
        self._group = group
        self._world_size = dist.get_world_size(group)
        ranks = ranks_text(dist.get_process_group_ranks(group))
        self._transfer = partial(meter.begin, "all_reduce", group="data", group_size=self._world_size, ranks=ranks)
        self._meter = meter
        self._hook = hook
        self._nccl = dist.get_backend(group) == "nccl" and all_reduce is None
        if all_reduce is None and not self._nccl:
            all_reduce = HierarchicalAllReduce(None, RingAllReduce(group))
        self.all_reduce = all_reduce
        self.compressed = None if all_reduce is None else all_reduce.compressed
        self._has_views = False
        self._buckets: dict[int, _Bucket] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._newest: Future[Tensor] | None = None
        self._error: BaseException | None = None
        self._is_complete = False
        # The end of the last hook: from then on the main thread, or its stream, only waits.
        self._last_bucket: Mark | None = None

    def attach(self, module: DistributedDataParallel) -> None:
        """Makes ``module`` reduce its gradients through this reducer, instead of the module attached before."""
        self._has_views, self._buckets = module.gradient_as_bucket_view, {}
        module.register_comm_hook(state=self, hook=GradientReducer.reduce)

    def detach(self) -> None:
        """Frees the memory of the attached module's buckets; that module is not used any more."""
        self._buckets = {}
        if self.all_reduce is not None:
            self.all_reduce.forget_moved()

    def finish(self) -> bool:
        """Ends a backward pass on the main thread: meters its wait and raises the exception of a failed transfer.

        Returns:
            Whether all buckets were reduced. DistributedDataParallel averages none before the last one is full.

        Raises:
            BaseException: the exception of a bucket's transfer.
        """
        if self._last_bucket is not None:
            self._meter.waited(self._last_bucket)
            self._last_bucket = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        is_complete, self._is_complete = self._is_complete, False
        return is_complete

    def average(self, tensor: Tensor, key: Hashable = None) -> None:
        """Averages any flat tensor over the ranks, in place; the main thread waits, so backward must be over.

        ``key`` is that of gradients in every step, if they are to be compressed.
        """
        if self.all_reduce is not None:
            self._begin(tensor, None, key, blocking=True)()
            return
        with self._transfer(size_bytes=tensor.nbytes, blocking=True, on_stream=tensor.is_cuda):
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self._group)

    def end_step(self, loss_scale: float) -> None:
        """Keeps the errors of compression after an optimizer step, whose losses had this factor; a collective."""
        if self.all_reduce is not None:
            self.all_reduce.end_step(loss_scale)

    def close(self) -> None:
        """Ends the ring thread; buckets that it already has are still reduced."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=5)
            self._thread = None
        if self.all_reduce is not None:
            self.all_reduce.close()

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """The hook: ``bucket.buffer()`` (flat, one dtype) becomes the average over the ranks. Returns at once."""
        self._is_complete, buffer = bucket.is_last(), bucket.buffer()
        since: Mark | None = None
        try:
            found: _Bucket | None = None
            if self._has_views or not (self._nccl or self._hook):
                with torch._C.DisableTorchFunctionSubclass():  # of split parameters these are the parts
                    found = self._found(bucket, buffer)
            if self._hook is not None:
                return self._reduce_by_user_hook(*self._hook, bucket)
            if self._nccl:
                return self._reduce_by_nccl(buffer)
            future: Future[Tensor] = Future()
            is_idle, self._newest = self._newest is None or self._newest.done(), future
            if self._is_complete and is_idle:  # no backward is left to hide it, and waking the thread takes time
                since = self._meter.now()
                if self._error is None:
                    self._begin(buffer, found)()
                future.set_result(buffer)
                return future
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="gradient-ring", daemon=True)
                self._thread.start()
            if buffer.is_cuda:
                torch.cuda.current_stream(buffer.device).synchronize()
            self._jobs.put((buffer, found, future))
            return future
        except BaseException as error:
            self._error = self._error or error
            failed: Future[Tensor] = Future()
            failed.set_result(buffer)
            return failed
        finally:
            on_stream = self._nccl or (self._hook is not None and buffer.is_cuda)
            self._last_bucket = self._meter.mark(on_stream=on_stream) if since is None else since

    def _found(self, bucket: GradBucket, buffer: Tensor) -> _Bucket:
        """What is known of the bucket, into which gradients are copied that are no longer views of it.

        ``grad.data = ...`` gives torch's view of the bucket another memory, which is written from then on.
        """
        index, place = bucket.index(), (0, 0) if buffer.is_sparse else (buffer.data_ptr(), buffer.numel())
        key = None if self.compressed is None else tuple(map(id, bucket.parameters()))
        found = self._buckets.get(index)
        if found is None or (found.place, found.key) != (place, key):
            found = self._buckets[index] = _Bucket(index, place, key)
            if bucket.is_last():  # torch may have arranged them anew
                self._buckets = {number: each for number, each in self._buckets.items() if number <= index}
        if buffer.is_sparse or not self._has_views:
            return found
        with suppress(AttributeError):  # None has no address
            if found.addresses and [p.grad.data_ptr() for p in found.parameters] == found.addresses:  # type: ignore[union-attr]
                return found
        found.parameters, views = bucket.parameters(), bucket.gradients()
        found.addresses = [view.data_ptr() for view in views]
        for parameter, view in zip(found.parameters, views, strict=True):
            if parameter.grad is None:  # this rank's loss does not depend on it
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
        return found

    def _work(self) -> None:
        """Begins a bucket before it finishes the previous one, if the next one is already full."""
        under_way: _Job | None = None
        finish: Callable[[], object] | None = None
        closing = False
        while not closing:
            job: _Job | None = None
            begun: Callable[[], object] | None = None
            with suppress(queue.Empty):
                job = self._jobs.get(block=under_way is None)
                closing = job is None
            if job is not None:
                begun = self._tried(self._begin, *job[:2])
            if under_way is not None:
                self._tried(finish or _nothing)
                under_way[2].set_result(under_way[0])
            under_way, finish = job, begun

    def _tried(self, work: Callable[..., Any], *args: Any) -> Any:
        """The result; None, and the error is kept, if there is one or was one before."""
        if self._error is None:
            try:
                return work(*args)
            except BaseException as error:
                self._error = error
        return None

    def _begin(
        self, buffer: Tensor, bucket: _Bucket | None, key: Hashable = None, *, blocking: bool = False
    ) -> Callable[[], object]:
        """Starts to average a tensor and returns what finishes it."""
        assert self.all_reduce is not None
        if buffer.is_sparse:
            # Gloo exchanges indices and values of sparse gradients itself; their size differs from rank to rank.
            nbytes = size_bytes(buffer)
            with self._transfer(size_bytes=nbytes, sent_bytes=nbytes, blocking=blocking):
                dist.all_reduce(buffer, group=self._group)
                buffer.div_(self._world_size)
            return _nothing
        staged, key = buffer.cpu(), key if bucket is None else bucket.key
        if staged is not buffer:
            bucket = None  # the copy has another memory in each step
        make = partial(self.all_reduce.plan, staged, key, average=True)
        plan = make() if bucket is None or bucket.plan is None else bucket.plan
        network, memory = plan.sent
        transfer: Transfer = self._transfer(
            size_bytes=buffer.nbytes, sent_bytes=network + memory, memory_bytes=memory, blocking=blocking
        )
        try:
            if bucket is not None and bucket.plan is None:
                if self.all_reduce.move(buffer, bucket.index):
                    plan = make()
                    bucket.place, bucket.addresses = (buffer.data_ptr(), buffer.numel()), []
                bucket.plan = plan  # holds the memory, so that no other bucket can have this place
            pending = plan.begin()
        except BaseException:
            transfer.broke()
            raise

        def finish() -> None:
            try:
                if pending is not None:
                    pending()
                if staged is not buffer:
                    buffer.copy_(staged)
            except BaseException:
                transfer.broke()
                raise
            transfer.finish()

        return finish

    def _reduce_by_nccl(self, buffer: Tensor) -> Future[Tensor]:
        transfer: Transfer = self._transfer(size_bytes=buffer.nbytes, on_stream=True)
        work = dist.all_reduce(buffer, op=dist.ReduceOp.AVG, group=self._group, async_op=True)
        assert work is not None

        def ended(future: Future[list[Tensor]]) -> Tensor:
            transfer.finish()
            return future.value()[0]

        averaged: Future[Tensor] = work.get_future().then(ended)
        return averaged

    def _reduce_by_user_hook(self, state: Any, hook: CommHook, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        transfer: Transfer = self._transfer(size_bytes=size_bytes(buffer), on_stream=buffer.is_cuda)

        def ended(future: Future[Any]) -> Any:
            transfer.finish()
            try:
                value = future.value()
            except BaseException as error:
                self._error = self._error or error
                return buffer
            return value[0] if isinstance(value, (list, tuple)) else value

        try:
            future = hook(state, bucket)
        except BaseException:
            transfer.broke()
            raise
        return future.then(ended)  # unlike a future of our own it keeps the streams that order a CUDA future's values


def _nothing() -> None:
    pass
