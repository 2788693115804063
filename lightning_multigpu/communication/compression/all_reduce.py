"""The all-reduce of gradients that ranks compress before sending, with error feedback.

The error of a step's compression is added to the gradients of the next step. Without it, a gradient that is always too
small to be sent would be lost; with it, the sum of the sent values follows the sum of the given values.

Sources: S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi, "Error feedback fixes SignSGD and other gradient
compression schemes", ICML 2019, algorithm 2; H. Tang, C. Yu, X. Lian, T. Zhang, J. Liu, "DoubleSqueeze: parallel
stochastic gradient descent with double-pass error-compensated compression", ICML 2019: there the owner of a sum keeps
the sum's error too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.compression.compressors import Compressor
from lightning_multigpu.communication.compression.owner_summed import (
    DEFAULT_SEGMENT_ELEMENTS,
    OwnerSummed,
    Segment,
    ShardBuffers,
    segments_by_owner,
    sent_bytes,
)
from lightning_multigpu.communication.ring import RingAllReduce
from lightning_multigpu.communication.tensors import check_reducible


class _Errors:
    """The errors of one flat tensor, of the last accepted step and of the step under way."""

    def __init__(self, numel: int) -> None:
        self.before, self.after = torch.zeros(numel), torch.empty(numel)
        self.written = False

    def accept(self) -> None:
        if self.written:
            self.before, self.after = self.after, self.before
        self.written = False


class ErrorFeedback:
    """The errors of one rank, float32, of each flat tensor by its key; a step forgets those of tensors it lacks."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, _Errors] = {}

    def begin(self, key: Hashable, numel: int) -> tuple[Tensor, Tensor]:
        """The errors to add to a flat tensor, and the memory for the errors of this step.

        If a tensor comes twice within a step, the second time adds the errors of the first.
        """
        errors = self._tensors.get(key)
        if errors is None or errors.before.numel() != numel:
            errors = self._tensors[key] = _Errors(numel)
        errors.accept()
        errors.written = True
        return errors.before, errors.after

    def end_step(self, *, accept: bool) -> None:
        """Keeps the errors of the step, or forgets them and keeps the earlier ones."""
        self._tensors = {key: errors for key, errors in self._tensors.items() if errors.written}
        for errors in self._tensors.values():
            if accept:
                errors.accept()
            errors.written = False

    def scale(self, factor: float) -> None:
        """Multiplies all errors after a change of the gradients' scale (a loss scaler's, for example)."""
        for errors in self._tensors.values():
            errors.before.mul_(factor)


class CompressedAllReduce:
    """Sums or averages CPU tensors of gradients over the ranks of a group; all ranks get the same bits.

    All ranks of the group must make the same calls in the same order, one at a time; which thread calls does not
    matter. Sums are made in float32 whatever the tensors' dtype is.

    With error feedback, the part of a step's gradients that was not sent is added to the next step's. :meth:`end_step`
    ends a step. If a sum was not finite on any rank, all ranks keep the state from before the step, which a loss scaler
    skips.

    Args:
        group: a process group whose back end sends CPU tensors point to point (gloo, mpi); nothing else may use it
            for messages while a call is under way.
        segment_elements: elements that are encoded, sent and decoded at once.

    Attributes:
        ring: reduces tensors other than gradients, without loss.
        step_is_finite: whether all sums of the step under way have been finite so far.
    """

    def __init__(
        self, group: dist.ProcessGroup, compressor: Compressor, *, segment_elements: int = DEFAULT_SEGMENT_ELEMENTS
    ) -> None:
        self.compressor = compressor
        self.step = 0
        self._segment_elements = segment_elements
        self.ring = RingAllReduce(group)
        self._messages = self.ring.messages
        self.rank, self.world_size = self.ring.rank, self.ring.world_size
        self._errors = ErrorFeedback() if compressor.has_error_feedback else None
        self._loss_scale: float | None = None
        self.step_is_finite = True
        self._segments: dict[int, list[list[Segment]]] = {}
        self._free_buffers: dict[int, list[ShardBuffers]] = {}

    def __call__(self, tensor: Tensor, key: Hashable, *, average: bool = False) -> Tensor:
        """Reduces ``tensor`` in place and returns it.

        Args:
            tensor: any shape, contiguous, on the CPU, floating-point; the same shape and dtype on every rank.
            key: of the tensor in every step, for the errors that it adds to the next one.
            average: divide the sums by the number of ranks.

        Raises:
            ValueError: the tensor is not on the CPU, not contiguous or not floating-point.
            RuntimeError: another rank has ended, or the group's timeout has passed.
        """
        return self.begin(tensor, key, average=average)()

    def begin(self, tensor: Tensor, key: Hashable, *, average: bool = False) -> Callable[[], Tensor]:
        """As a call, but returns when this rank's parts are being sent; the result does the rest, and is called once.

        While one tensor is under way, the next may begin, so that the network does not wait for decoding and encoding.
        Tensors must be finished in the order in which they began, and before :meth:`end_step`.
        """
        _check(tensor)
        flat = tensor.detach().view(-1)
        values = flat if flat.dtype == torch.float32 else flat.float()
        errors = None if self._errors is None else self._errors.begin(key, values.numel())
        segments = self._segments_of(values.numel())
        free = self._free_buffers.setdefault(values.numel(), [])
        buffers = free.pop() if free else ShardBuffers(segments, self.rank)
        exchange = OwnerSummed(self.compressor, self._messages, segments, buffers, values, errors, average)
        exchange.send_parts()

        def finish() -> Tensor:
            self.step_is_finite &= exchange.finish()
            free.append(buffers)
            if values is not flat:
                flat.copy_(values)
            return tensor

        return finish

    def sent_bytes(self, tensor: Tensor) -> int:
        """Bytes that this rank sends when ``tensor`` is reduced."""
        return sent_bytes(self._segments_of(tensor.numel()), self.rank)

    def end_step(self, loss_scale: float = 1.0) -> None:
        """Ends a step: keeps its errors if all of its sums were finite, else the state from before the step.

        ``loss_scale`` is the next step's; errors are scaled like its gradients.
        """
        if self._errors is not None:
            self._errors.end_step(accept=self.step_is_finite)
        self.step += self.step_is_finite
        self.step_is_finite = True
        if self._errors is not None and self._loss_scale is not None and self._loss_scale != loss_scale:
            self._errors.scale(loss_scale / self._loss_scale)
        self._loss_scale = loss_scale

    def _segments_of(self, numel: int) -> list[list[Segment]]:
        if numel not in self._segments:
            self._segments[numel] = segments_by_owner(self.compressor, numel, self.world_size, self._segment_elements)
        return self._segments[numel]


def _check(tensor: Tensor) -> None:
    check_reducible(tensor, "compression")
    if not tensor.is_floating_point():
        raise ValueError(f"compression takes real floating-point tensors, not {tensor.dtype}: reduce it by the ring")
