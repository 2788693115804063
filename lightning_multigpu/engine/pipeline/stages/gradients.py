"""Gradients of parameters that several stages hold, and norms over all stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.pipeline.stages.transfer import PipelineGroup

_NONE, _DENSE, _SPARSE = 0, 1, 2


class StageSums:
    """Sums over the stages of one pipeline; every method is a collective of the pipeline.

    Args:
        line: the stages.
        meter: told of every collective, as group "pipeline".
    """

    def __init__(self, line: PipelineGroup, meter: Meter) -> None:
        self._line = line
        self._meter = meter

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Gives every stage the sum of the stages' gradients; a stage without a gradient counts as zero.

        Each path from a parameter to the loss runs through exactly one stage, so that the sum is the gradient.
        Parameters for which no stage has a gradient keep none.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            return
        kinds = self._kinds(trained)
        by_dtype: dict[torch.dtype, list[Parameter]] = {}
        for parameter, kind in zip(trained, kinds, strict=True):
            if kind == _SPARSE:
                self._sum_sparse(parameter)
            elif kind == _DENSE:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for members in by_dtype.values():
            flat = torch.cat([_gradient_or_zeros(member).reshape(-1) for member in members])
            self._all_reduce(flat)
            for member, part in zip(members, flat.split_with_sizes([m.numel() for m in members]), strict=True):
                if member.grad is None:
                    member.grad = part.view_as(member).clone()
                else:
                    member.grad.copy_(part.view_as(member))

    def norm(self, parameters: Sequence[Parameter]) -> Tensor:
        """The 2-norm of the gradients of all stages' ``parameters`` together, the same on every stage."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        local = torch.nn.utils.get_total_norm(gradients)
        square = local.to(self._line.device, torch.float64) ** 2
        self._all_reduce(square)
        return square.sqrt()

    def total(self, numbers: Tensor) -> Tensor:
        """The sum of the stages' ``numbers``, of equal shapes, in the host's memory."""
        summed = numbers.to(self._line.device, copy=True)
        self._all_reduce(summed)
        return summed.cpu()

    def any(self, flag: Tensor) -> Tensor:
        """Writes into ``flag`` (one number) the largest of the stages' values."""
        value = flag.to(self._line.device)
        self._all_reduce(value, dist.ReduceOp.MAX)
        return flag.copy_(value)

    def _kinds(self, parameters: Sequence[Parameter]) -> list[int]:
        mine = torch.tensor([_kind(parameter) for parameter in parameters], dtype=torch.uint8, device=self._line.device)
        self._all_reduce(mine, dist.ReduceOp.MAX)
        return mine.tolist()

    def _sum_sparse(self, parameter: Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            indices = torch.empty((1, 0), dtype=torch.int64)
            values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype)
            gradient = torch.sparse_coo_tensor(
                indices, values, parameter.shape, device=parameter.device, check_invariants=False, is_coalesced=True
            )
        gradient = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
        self._all_reduce(gradient)
        parameter.grad = gradient

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        values = tensor._values() if tensor.is_sparse else tensor
        size_bytes = values.numel() * values.element_size()
        with self._meter.blocking(
            "all_reduce", group="pipeline", group_size=self._line.num_ranks, size_bytes=size_bytes
        ):
            dist.all_reduce(tensor, op=op, group=self._line.group)


def _kind(parameter: Parameter) -> int:
    if parameter.grad is None:
        return _NONE
    return _SPARSE if parameter.grad.is_sparse else _DENSE


def _gradient_or_zeros(parameter: Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
