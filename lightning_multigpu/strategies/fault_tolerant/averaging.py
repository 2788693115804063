"""The average of the gradients over the members, and what else travels with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.strategies.fault_tolerant.members import Members


@dataclass(frozen=True)
class Said:
    """What the members have said in a step: whether one asks for a meeting, the places of those that leave, and a
    number of each member that has to be the same."""

    wants_meeting: bool
    leaving: list[int]
    common: list[float]


class GradientAverage:
    """Averages gradients over the members in flat buffers; ``.grad`` changes once the sums are there.

    The module's buffers (BatchNorm's statistics, for example) travel too: all members get those of the first one. A
    header, in float64, travels with them::

        [ weight | asks for a meeting | leaves, common: a number for each member | has a gradient: for each parameter ]
    """

    def __init__(self, members: Members, meter: Meter) -> None:
        self._members, self._meter = members, meter
        self._flat: dict[Any, tuple[Sequence[Tensor], Tensor, list[Tensor]]] = {}  # by kind: tensors, flat, its views

    def average(
        self,
        parameters: list[Parameter],
        buffers: list[Tensor],
        weight: float,
        *,
        common: float,
        counts: bool,
        after_meeting: bool,
    ) -> Said:
        """Sums gradients and weights over the members, and divides one by the other unless the weights add up to 1.

        Args:
            weight: of this rank's gradients, which its loss was multiplied with; the sum is 1 if nobody is missing.
            common: a number that has to be the same on all members; see :class:`.CommonValues`.
            counts: False if this rank's gradients are of other weights than the others'.
            after_meeting: members may come late, with a state to take.

        Raises:
            RuntimeError: a member is lost, or too slow. Gradients and buffers are as they were.
        """
        members, size = self._members, self._members.size
        first = 2 + 2 * size
        header = torch.zeros(first + len(parameters), dtype=torch.float64)
        header[1], header[2 + members.index] = members.wants_meeting(), members.wants_to_leave
        header[2 + size + members.index] = common
        if counts:
            header[0] = weight
            header[first:] = torch.tensor([parameter.grad is not None for parameter in parameters])
        size_bytes = sum(tensor.nbytes for tensor in (header, *parameters, *buffers))
        timeout_s = members.timeout_s(size_bytes, meets=after_meeting)
        views: list[tuple[Tensor, Tensor]] = []
        flats: list[Tensor] = []
        with self._meter.blocking("all_reduce", group="data", group_size=size, size_bytes=size_bytes):
            works = members.begin_sum(header, timeout_s)
            try:
                kinds: list[tuple[bool, Sequence[Tensor]]] = [(True, parameters), (False, buffers)]
                for is_gradient, kind in kinds:
                    for dtype in dict.fromkeys(tensor.dtype for tensor in kind):
                        tensors = [tensor for tensor in kind if tensor.dtype == dtype]
                        if is_gradient:
                            values = [tensor.grad if counts else None for tensor in tensors]
                        else:
                            values = [tensor if members.index == 0 else None for tensor in tensors]
                        flat, parts = self._filled((is_gradient, dtype), tensors, values)
                        works += members.begin_sum(flat, timeout_s)
                        views += zip(tensors, parts, strict=True)
                        flats += [flat] * is_gradient
                for work in works:
                    work.wait()
            except BaseException:
                self._flat.clear()  # what is under way still writes there
                raise
        total, wants_meeting, *others = header.tolist()
        if total > 0 and abs(total - 1) > 1e-9:
            for flat in flats:
                flat.div_(total)
        has_gradient = dict(zip(map(id, parameters), others[2 * size :], strict=True))
        with torch.no_grad():
            for tensor, view in views:
                if id(tensor) in has_gradient:
                    _give(tensor, view if has_gradient[id(tensor)] else None)
                else:
                    tensor.copy_(view)
        leaving = [place for place, leaves in enumerate(others[:size]) if leaves == 1]
        members.requeue_is_due = 2 in others[:size]
        return Said(wants_meeting > 0, leaving, others[size : 2 * size])

    def _filled(self, kind: Any, tensors: list[Any], values: list[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        """A flat CPU tensor with the values, 0 for None, and the view of each; kept from step to step."""
        before, flat, views = self._flat.get(kind, ((), torch.empty(0), []))
        is_same = len(before) == len(tensors) and all(a is b for a, b in zip(before, tensors, strict=True))
        if not is_same or any(
            v is not None and v.data_ptr() == w.data_ptr() for v, w in zip(values, views, strict=True)
        ):
            flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=kind[1])
            parts = flat.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
            views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
            self._flat[kind] = tensors, flat, views
        dense: list[tuple[Tensor, Tensor]] = []
        for view, value in zip(views, values, strict=True):
            if value is None:
                view.zero_()
            else:
                dense.append((view, value.to_dense() if value.is_sparse else value))
        if dense:
            torch._foreach_copy_(*map(list, zip(*dense, strict=True)))  # type: ignore[arg-type]
        return flat, views


def _give(parameter: Any, average: Tensor | None) -> None:
    """Sets the parameter's gradient, a sparse one where it was sparse."""
    old = parameter.grad
    if average is not None:
        average = average.to(parameter.device)
        if old is not None and old.is_sparse:
            average = average.to_sparse(old.sparse_dim())
    parameter.grad = average
