"""The reducer: averages gradients over the ranks, bucket by bucket, while backward still runs.

torch's DistributedDataParallel collects gradients in buckets and passes each full bucket to the reducer's hook. The
reducer's thread sends the buckets around the ring in that order. DistributedDataParallel waits for them at the end::

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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_multigpu.communication.compression import CompressedAllReduce
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce, SentBytes
from lightning_multigpu.communication.metering.clocks import recorded_event
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.rank_ranges import ranks_text
from lightning_multigpu.communication.ring import RingAllReduce
from lightning_multigpu.communication.tensors import size_bytes

CommHook = Callable[[Any, GradBucket], Future[Tensor]]
_UnderWay = tuple[Callable[[], None], Tensor, Future[Tensor]]
_Job = tuple[Tensor, int, Hashable, Future[Tensor]]


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
        self._ranks = ranks_text(dist.get_process_group_ranks(group))
        self._meter = meter
        self._hook = hook
        self._nccl = dist.get_backend(group) == "nccl" and all_reduce is None
        if all_reduce is None and not self._nccl:
            all_reduce = HierarchicalAllReduce(None, RingAllReduce(group))
        self.all_reduce = all_reduce
        self._has_views = False
        self._places: dict[int, tuple[tuple[int, int], list[Tensor], list[int]]] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_complete = False
        # The end of the last hook, on the main thread's clock or on its stream: from then on it only waits.
        self._last_bucket_s: float | None = None
        self._last_bucket: torch.cuda.Event | None = None

    @property
    def compressed(self) -> CompressedAllReduce | None:
        """What compresses gradients; None without compression."""
        return None if self.all_reduce is None else self.all_reduce.compressed

    def attach(self, module: DistributedDataParallel) -> None:
        """Makes ``module`` reduce its gradients through this reducer, instead of the module attached before."""
        self._has_views, self._places = module.gradient_as_bucket_view, {}
        module.register_comm_hook(state=self, hook=GradientReducer.reduce)

    def detach(self) -> None:
        """Frees the memory of the attached module's buckets; that module is not used any more."""
        if self.all_reduce is not None:
            self.all_reduce.forget_moved()

    def finish(self) -> bool:
        """Ends a backward pass on the main thread: meters its wait and raises the exception of a failed transfer.

        Returns:
            Whether all buckets were reduced. DistributedDataParallel averages none before the last one is full.

        Raises:
            BaseException: the exception of a bucket's transfer.
        """
        if self._last_bucket_s is not None:
            self._meter.waited(self._last_bucket_s, self._meter.now())
            self._last_bucket_s = None
        if self._last_bucket is not None:
            self._meter.waited_on_stream(self._last_bucket)
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
            self._begin(tensor, key, blocking=True)()
            return
        with self._meter.blocking("all_reduce", on_stream=tensor.is_cuda, **self._described(tensor)):
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
        self._is_complete = bucket.is_last()
        try:
            if self._has_views:
                with torch._C.DisableTorchFunctionSubclass():  # of split parameters these are the parts
                    self._take_moved(bucket)
            if self._hook is not None:
                return self._reduce_by_user_hook(*self._hook, bucket)
            if self._nccl:
                return self._reduce_by_nccl(bucket.buffer())
            return self._reduce_in_thread(bucket)
        except BaseException as error:
            self._error = self._error or error
            failed: Future[Tensor] = Future()
            failed.set_result(bucket.buffer())
            return failed
        finally:
            if self._nccl or (self._hook is not None and bucket.buffer().is_cuda):
                self._last_bucket = recorded_event()
            else:
                self._last_bucket_s = self._meter.now()

    def _take_moved(self, bucket: GradBucket) -> None:
        """Copies gradients into the bucket that are no longer views of it.

        ``grad.data = ...`` gives torch's view of the bucket another memory, which is written from then on.
        """
        buffer, number = bucket.buffer(), bucket.index()
        if buffer.is_sparse:
            return
        key, parameters, addresses = self._places.get(number, ((0, 0), [], []))
        if key == (buffer.data_ptr(), buffer.numel()):
            gradients = [parameter.grad for parameter in parameters]
            if not any(g is None for g in gradients) and [g.data_ptr() for g in gradients] == addresses:  # type: ignore[union-attr]
                return
        parameters, views = bucket.parameters(), bucket.gradients()
        self._places[number] = (buffer.data_ptr(), buffer.numel()), parameters, [view.data_ptr() for view in views]
        for parameter, view in zip(parameters, views, strict=True):
            if parameter.grad is None:  # this rank's loss does not depend on it
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)

    def _reduce_in_thread(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        key = None if self.compressed is None else tuple(map(id, bucket.parameters()))
        future: Future[Tensor] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gradient-ring", daemon=True)
            self._thread.start()
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()
        self._jobs.put((buffer, bucket.index(), key, future))
        return future

    def _work(self) -> None:
        """Begins a bucket before it finishes the previous one, if the next one is already full."""
        under_way: _UnderWay | None = None
        closing = False
        while not closing:
            begun: _UnderWay | None = None
            with suppress(queue.Empty):
                job = self._jobs.get(block=under_way is None)
                closing = job is None
                begun = None if job is None else self._begin_job(*job)
            if under_way is not None:
                self._finish_job(*under_way)
            under_way = begun

    def _begin_job(self, buffer: Tensor, index: int, key: Hashable, future: Future[Tensor]) -> "_UnderWay":
        finish = _nothing
        if self._error is None:
            try:
                finish = self._begin(buffer, key, index)
            except BaseException as error:
                self._error = error
        return finish, buffer, future

    def _finish_job(self, finish: Callable[[], None], buffer: Tensor, future: Future[Tensor]) -> None:
        if self._error is None:
            try:
                finish()
            except BaseException as error:
                self._error = error
        future.set_result(buffer)

    def _begin(
        self, buffer: Tensor, key: Hashable, index: int | None = None, *, blocking: bool = False
    ) -> Callable[[], None]:
        """Starts to average a tensor and returns what finishes it; a bucket has one ``index`` in all steps."""
        assert self.all_reduce is not None
        if buffer.is_sparse:
            # Gloo exchanges indices and values of sparse gradients itself; their size differs from rank to rank.
            sent = SentBytes(size_bytes(buffer), 0)
            with self._meter.begin("all_reduce", blocking=blocking, **self._described(buffer, sent)):
                dist.all_reduce(buffer, group=self._group)
                buffer.div_(self._world_size)
            return _nothing
        staged = buffer.cpu()
        sent = self.all_reduce.sent_bytes(staged, key)
        transfer = self._meter.begin("all_reduce", blocking=blocking, **self._described(buffer, sent))
        try:
            if index is not None and staged is buffer:
                self.all_reduce.move(buffer, index)
            pending = self.all_reduce.begin(staged, key, average=True)
        except BaseException:
            transfer.broke()
            raise

        def finish() -> None:
            with transfer:
                pending.finish()
                if staged is not buffer:
                    buffer.copy_(staged)

        return finish

    def _reduce_by_nccl(self, buffer: Tensor) -> Future[Tensor]:
        transfer = self._meter.begin("all_reduce", on_stream=True, **self._described(buffer))
        work = dist.all_reduce(buffer, op=dist.ReduceOp.AVG, group=self._group, async_op=True)
        assert work is not None

        def ended(future: Future[list[Tensor]]) -> Tensor:
            transfer.finish()
            return future.value()[0]

        averaged: Future[Tensor] = work.get_future().then(ended)
        return averaged

    def _reduce_by_user_hook(self, state: Any, hook: CommHook, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        transfer = self._meter.begin("all_reduce", on_stream=buffer.is_cuda, **self._described(buffer))

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

    def _described(self, buffer: Tensor, sent: SentBytes | None = None) -> dict[str, Any]:
        """The meter's arguments for a transfer; without ``sent``, the meter computes the bytes of an all-reduce."""
        described = {
            "group": "data",
            "group_size": self._world_size,
            "size_bytes": size_bytes(buffer),
            "ranks": self._ranks,
        }
        if sent is not None:
            described |= {"sent_bytes": sent.network + sent.memory, "memory_bytes": sent.memory}
        return described


def _nothing() -> None:
    pass
