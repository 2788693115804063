"""The average of the gradients over the members, and what else travels with it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.shared_memory.host_all_reduce import IN_PLACE_FROM_BYTES
from lightning_multigpu.communication.tensors import alike
from lightning_multigpu.strategies.fault_tolerant.members import Members

_FLAT_BYTES = 64 << 20


@dataclass(frozen=True)
class Said:
    """What the members have said in a step: whether one asks for a meeting; by their places, who wants to leave, and a
    number that has to be the same."""

    wants_meeting: bool
    wants_to_leave: list[int]
    common: list[float]


class _Flat:
    """Values of tensors of one dtype in a row; ``views`` are those of each, by its place among parameters and buffers.

    ``key`` is that of gradients in every step; None for other values, which are never compressed.
    """

    def __init__(self, tensors: dict[int, Tensor], *, is_of_gradients: bool, layout: int) -> None:
        self.is_of_gradients, self.is_averaged = is_of_gradients, False  # of buffers, some are averaged
        sizes = [tensor.numel() for tensor in tensors.values()]
        self.values = torch.empty(sum(sizes), dtype=next(iter(tensors.values())).dtype)
        self.key = (layout, min(tensors)) if is_of_gradients and self.values.is_floating_point() else None
        parts = zip(tensors, self.values.split(sizes), strict=True)  # type: ignore[no-untyped-call]
        self.views = {place: part.view(tensors[place].shape) for place, part in parts}

    def fill(self, values: list[Tensor | None]) -> None:
        """Copies the values, and zeros for None."""
        pairs = zip(self.views.values(), values, strict=True)
        dense = [(view, value.to_dense() if value.is_sparse else value) for view, value in pairs if value is not None]
        if len(dense) < len(values):
            self.values.zero_()
        if dense:
            torch._foreach_copy_(*map(list, zip(*dense, strict=True)))  # type: ignore[arg-type]


class GradientAverage:
    """Averages gradients over the members in flat buffers; ``.grad`` changes once the sums are there.

    The module's buffers (BatchNorm's statistics, for example) travel too: all members get those of the first one, or
    averages. A header, in float64, goes first::

        [ weight | counts | asks for a meeting | leaves, common, layout, given: a number for each member ]

    Only if members have gradients of different parameters (``given``), they also tell each other of which.
    """

    def __init__(self, members: Members, meter: Meter) -> None:
        self._members, self._meter = members, meter
        self._tensors: list[Tensor] = []
        self._layout = 0  # of these tensors
        self._flats: tuple[Any, list[_Flat]] = None, []  # and the group and layout that they were made for
        self._sent_bytes = 0, 0  # in all, and through shared memory

    def average(
        self,
        parameters: list[Tensor],
        buffers: list[Tensor],
        weight: float,
        *,
        common: float,
        loss_scale: float,
        counts: bool,
        averages_buffers: bool,
        after_meeting: bool,
    ) -> Said:
        """Sums gradients and weights over the members, and divides one by the other unless the weights add up to 1.

        Args:
            weight: of this rank's gradients, which its loss was multiplied with; the sum is 1 if nobody is missing.
            common: a number that has to be the same on all members; see :class:`.CommonValues`.
            loss_scale: the factor of the next step's losses, for the errors of compression.
            counts: False if this rank's gradients are of other weights than the others'.
            averages_buffers: average those of floating-point numbers, over the members that count.
            after_meeting: members may come late, with a state to take.

        Raises:
            ValueError: members train parameters of different shapes.
            RuntimeError: a member is lost, or too slow. Gradients and buffers are as they were.
        """
        members, size, tensors = self._members, self._members.size, [*parameters, *buffers]
        if size == 1:
            if weight > 0 and abs(weight - 1) > 1e-9:
                for gradient in [parameter.grad for parameter in parameters if parameter.grad is not None]:
                    gradient.div_(weight)
            return Said(bool(members.wants_meeting()), [members.wants_to_leave], [common])
        if len(tensors) != len(self._tensors) or any(a is not b for a, b in zip(tensors, self._tensors, strict=True)):
            self._tensors, text = tensors, repr([(tensor.shape, tensor.dtype) for tensor in tensors])
            self._layout = zlib.crc32(text.encode())
        given = [counts and parameter.grad is not None for parameter in parameters]
        header = torch.zeros(3 + 4 * size, dtype=torch.float64)
        header[0], header[1], header[2] = weight * counts, counts, members.wants_meeting()
        numbers = [members.wants_to_leave, common, self._layout, zlib.crc32(bytes(given))]
        header[3 + members.index :: size] = torch.tensor(numbers, dtype=torch.float64)
        size_bytes = sum(tensor.nbytes for tensor in (header, *tensors))
        timeout_s = members.timeout_s(size_bytes, meets=after_meeting)
        with self._meter.blocking("all_reduce", group="data", group_size=size, size_bytes=size_bytes) as transfer:
            members.sum([header], timeout_s)
            total, counted, wants_meeting, *said = header.tolist()
            leaves, commons, layouts, givens = (said[i * size : (i + 1) * size] for i in range(4))
            if len({*layouts}) > 1:
                raise ValueError(f"ranks {members.ranks} train parameters of different shapes, or not the same ones")
            flats = self._made_flats(len(parameters))
            transfer.sent_bytes, transfer.memory_bytes = self._sent_bytes
            if len({*givens}) > 1:
                members.sum([by_all := torch.tensor(given, dtype=torch.float32)], timeout_s)
                given = by_all.tolist()
            try:
                for flat in flats:
                    if flat.is_of_gradients:
                        flat.fill([_local(parameters[place], view, counts) for place, view in flat.views.items()])
                        continue
                    flat.is_averaged = averages_buffers and flat.values.is_floating_point() and counted > 0
                    has_value = counts if flat.is_averaged else members.index == 0
                    flat.fill([tensors[place] if has_value else None for place in flat.views])
                members.sum([flat.values for flat in flats], timeout_s, [flat.key for flat in flats])
                if parameters:
                    members.all_reduce.end_step(loss_scale)
            except BaseException:
                self._flats = None, []  # what is under way still writes there
                raise
        with torch.no_grad():
            for flat in flats:
                if flat.is_averaged:
                    flat.values.div_(counted)
                elif flat.is_of_gradients and total > 0 and abs(total - 1) > 1e-9:
                    flat.values.div_(total)
                for place, view in flat.views.items():
                    if flat.is_of_gradients:
                        _give(parameters[place], view if given[place] else None)
                    else:
                        tensors[place].copy_(view)
        return Said(wants_meeting > 0, [*map(int, leaves)], commons)

    def _made_flats(self, num_parameters: int) -> list[_Flat]:
        """Flat tensors for the gradients and for the buffers, in shared memory if members share some; a collective."""
        made_for = dist.group.WORLD, self._layout  # the same on all members
        if self._flats[0] != made_for:
            places = {id(tensor): place for place, tensor in enumerate(self._tensors)}
            kinds = self._tensors[:num_parameters], self._tensors[num_parameters:]
            flats = [
                _Flat({places[id(each)]: each for each in group}, is_of_gradients=kind is kinds[0], layout=self._layout)
                for kind in kinds
                for group in alike(kind, full_bytes=_FLAT_BYTES)
            ]
            for key, flat in enumerate(flats):
                if flat.values.nbytes > IN_PLACE_FROM_BYTES:
                    self._members.all_reduce.move(flat.values, key)
            sent = [self._members.all_reduce.plan(flat.values, flat.key).sent for flat in flats]
            self._sent_bytes = sum(map(sum, sent)), sum(memory for _, memory in sent)
            self._flats = made_for, flats
        return self._flats[1]


def _local(parameter: Tensor, view: Tensor, counts: bool) -> Tensor | None:
    """This rank's gradient, in a memory that sums do not change."""
    gradient = parameter.grad
    if gradient is None or not counts:
        return None
    if not gradient.is_sparse and gradient.data_ptr() == view.data_ptr():  # it was added to the average of before
        parameter.grad = gradient = gradient.clone()
    return gradient


def _give(parameter: Tensor, average: Tensor | None) -> None:
    """Sets the parameter's gradient, a sparse one where it was sparse."""
    if average is not None:
        if average.device != parameter.device:
            average = average.to(parameter.device)
        if parameter.grad is not None and parameter.grad.is_sparse:
            average = average.to_sparse(parameter.grad.sparse_dim())
    parameter.grad = average
