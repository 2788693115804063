"""Gradients of parameters that several stages hold, and norms over all stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.splitting.placeholder import Placeholder
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup

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


_BUCKET_BYTES = 25 << 20


class DataAxis:
    """What the ranks that hold the same stage do together; every method is a collective of theirs.

    Args:
        group: those ranks; used by nothing else.
        bookkeeping: the same ranks, for small messages.
        meter: told of the gradients, as group "data".
    """

    def __init__(self, group: dist.ProcessGroup, bookkeeping: MeteredGroup, meter: Meter) -> None:
        self._reducer = GradientReducer(group, meter, axis="data")
        self._bookkeeping = bookkeeping

    def average_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Gives every rank the average of the ranks' gradients; a rank without one counts as zero.

        Parameters for which no rank has a gradient keep none.

        Raises:
            ValueError: a gradient is sparse.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            return
        mine = torch.tensor([parameter.grad is not None for parameter in trained])
        anywhere = self._bookkeeping.all_reduce(mine, "max").tolist()
        used = [parameter for parameter, found in zip(trained, anywhere, strict=True) if found]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                raise ValueError(
                    "several pipelines side by side do not average sparse gradients; make the embedding with "
                    "sparse=False, or use one pipeline"
                )
        for bucket in _buckets(used):
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self._reducer.average(flat)
            for gradient, part in zip(gradients, flat.split_with_sizes([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def share_buffers(self, buffers: list[Tensor]) -> None:
        """Gives every rank the buffers of the first one: BatchNorm's statistics."""
        if buffers:
            self._bookkeeping.broadcast_tensors(buffers, src=self._bookkeeping.first_rank)

    def close(self) -> None:
        """Ends the thread that sends gradients."""
        self._reducer.close()


def _buckets(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Parameters of one dtype whose gradients travel together, about 25 MiB."""
    by_dtype: dict[torch.dtype, list[Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for members in by_dtype.values():
        bucket: list[Parameter] = []
        size = 0
        for member in members:
            bucket.append(member)
            size += member.numel() * member.element_size()
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


_LARGEST = float("inf")
_ORDERS = (1.0, 2.0, _LARGEST)
_SOURCE = (
    "the gradient of parameter {} (here only its norms of order 1, 2 and inf are known; pass over parameters for which "
    "trainer.strategy.holds(parameter) is False)"
)
_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
_SCALES = (_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar)
_TESTS = {
    test: function
    for function in (torch.isfinite, torch.isnan, torch.isinf)
    for test in (function, getattr(Tensor, function.__name__))
}


class RemoteGradient(Placeholder):
    """The gradient of a parameter that another stage holds: of its values only norms are known.

    ``isfinite(gradient).all()``, ``isnan(gradient).any()`` and ``isinf(gradient).any()`` follow from those.

    Args:
        parameter: the stand-in for the parameter.
        source: what it stands for, for messages.
        norms: 1-norm, 2-norm and largest absolute value, by their orders; tensors without dimensions.
    """

    norms: dict[float, Tensor]

    @staticmethod
    def __new__(cls, parameter: Tensor, source: str, norms: dict[float, Tensor]) -> RemoteGradient:
        made = Placeholder.__new__(cls, parameter, source)
        assert isinstance(made, RemoteGradient)
        return made

    def __init__(self, parameter: Tensor, source: str, norms: dict[float, Tensor]) -> None:
        super().__init__(parameter, source)
        self.norms = norms

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = args[0] if args else None
        test = _TESTS.get(func)
        if test is None or not isinstance(mine, RemoteGradient) or _LARGEST not in mine.norms:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        # An entry that is not finite makes the largest so. Which one it was, nobody knows: all entries answer alike.
        return test(mine.norms[_LARGEST]).to(mine.device).expand(mine.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        mine = args[0] if args else None
        if isinstance(mine, RemoteGradient):
            if func in _SAME:
                return RemoteGradient(mine, mine.source, mine.norms)
            if func is _aten.linalg_vector_norm.default:
                norm = mine._norm(*args[1:], **(kwargs or {}))
                if norm is not None:
                    return norm
            if func._schema.is_mutable:
                mine.norms = mine._scaled(func, args[1]) if func in _SCALES else {}
                return mine
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _norm(
        self, ord: float = 2, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        if keepdim or float(ord) not in self.norms or not (dim is None or len(dim) == self.ndim):
            return None
        return self.norms[float(ord)].to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def _scaled(self, func: Any, factor: Any) -> dict[float, Tensor]:
        if isinstance(factor, Placeholder) or (isinstance(factor, Tensor) and factor.numel() != 1):
            return {}
        size = abs(float(factor))
        divides = func in (_aten.div_.Tensor, _aten.div_.Scalar)
        return {order: norm / size if divides else norm * size for order, norm in self.norms.items()}


class RemoteGradients:
    """Shows each stage the gradients of the others for a while.

    Args:
        ownership: which stage holds which parameter.
        sums: over the stages.
    """

    def __init__(self, ownership: Ownership, sums: StageSums) -> None:
        self._ownership = ownership
        self._sums = sums

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within the block parameters that other stages hold have a gradient, if they have one there.

        Entering is a collective of the pipeline: 4 numbers a parameter are summed.
        """
        shown: list[Parameter] = []
        everything = [h for h in self._ownership.holdings if isinstance(h.tensor, Parameter)]
        own = torch.zeros(len(everything), 1 + len(_ORDERS), dtype=torch.float64)
        for row, holding in zip(own, everything, strict=True):
            gradient = holding.tensor.grad
            if gradient is not None:  # what several stages hold has one on each, and no stage asks for its norms
                values = gradient.coalesce().values() if gradient.is_sparse else gradient
                row.copy_(torch.stack([torch.ones(()), *(torch.linalg.vector_norm(values, o).cpu() for o in _ORDERS)]))
        for row, holding in zip(self._sums.total(own), everything, strict=True):
            parameter = holding.tensor
            if row[0] and isinstance(parameter, Placeholder) and isinstance(parameter, Parameter):
                norms = dict(zip(_ORDERS, row[1:], strict=True))
                parameter.grad = RemoteGradient(parameter, _SOURCE.format(holding.name), norms)
                shown.append(parameter)
        try:
            yield
        finally:
            for parameter in shown:
                parameter.grad = None
