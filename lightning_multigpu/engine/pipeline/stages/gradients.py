"""Gradients over several ranks: sums over stages, averages over pipelines, and norms of other stages' gradients.

::

    pipeline 0    stage 0 (rank 1) ---- stage 1 (rank 0)
                      |                     |               the data axis: one average for each stage
    pipeline 1    stage 0 (rank 3) ---- stage 1 (rank 2)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.tensors import alike, apply_flat, size_bytes
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer
from lightning_multigpu.engine.pipeline.splitting.ownership import Holding, Ownership
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup
from lightning_multigpu.engine.placeholder import Placeholder, exchange
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup

_BUCKET_BYTES = 25 << 20
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


class StageSums:
    """Sums over the stages of one pipeline; every method is a collective of the pipeline.

    Args:
        tensor: the ranks that split the layers of this stage; None without a tensor split. With it, :meth:`norms` and
            :meth:`sum` are collectives of all stages of these ranks' pipelines.
    """

    def __init__(self, group: PipelineGroup, tensor: TensorGroup | None = None) -> None:
        self._group = group
        self._tensor = tensor

    def sum_gradients(self, common: Sequence[Holding]) -> None:
        """Gives every holder of a parameter the sum of the ranks' gradients; a missing gradient counts as zero.

        Each path from a parameter to the loss runs through exactly one stage, so the sum is the gradient. Parameters
        without a gradient on any rank keep none. Sparse gradients become dense. All ranks pass the same ``common``.
        """
        trained = {h.tensor: h.holders for h in common if isinstance(h.tensor, Parameter) and h.tensor.requires_grad}
        if not trained:
            return
        found = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8, device=self._group.device)
        self._all_reduce(found, dist.ReduceOp.MAX)
        on_all: list[Parameter] = []
        for (parameter, holders), has_gradient in zip(trained.items(), found.tolist(), strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            if has_gradient and len(holders) < self._group.num_ranks:
                self._sum_between(parameter, holders)
            elif has_gradient:
                on_all.append(parameter)
        for gradients in alike(_gradients(on_all)):
            apply_flat(self._all_reduce, gradients)
        self._group.finish()

    def sum(self, number: Tensor) -> Tensor:
        """The sum of the ranks' numbers, the same on every rank; it may overwrite the rank's own."""
        number = number.to(self._group.device)
        if self._tensor is not None:
            self._tensor.all_reduce(number, "norm or overflow")
        self._all_reduce(number)
        return number

    def norms(self, parameters: Sequence[Parameter], counted: Sequence[bool]) -> Tensor:
        """Of each parameter's gradient its norms of order 1, 2 and inf, the same on every stage, in the host's memory.

        Args:
            parameters: the same on every stage.
            counted: whether this stage counts the parameter; one stage does.

        Returns:
            Shape (parameters, 4): the number of gradients, and the norms; zeros of parameters without a gradient.
        """
        own = torch.zeros(len(parameters), 1 + len(_ORDERS), dtype=torch.float64)
        with torch._C.DisableTorchFunctionSubclass():  # of split parameters these are the parts
            for row, parameter, is_counted in zip(own, parameters, counted, strict=True):
                gradient = parameter.grad
                if gradient is not None and is_counted:
                    values = gradient.coalesce().values() if gradient.is_sparse else gradient
                    row[0] = 1
                    if values.numel():  # a rank's part may be empty
                        row[1:] = torch.stack([torch.linalg.vector_norm(values, order).cpu() for order in _ORDERS])
        summed = own.to(self._group.device)
        if self._tensor is not None:
            is_part = torch.tensor([split_of(parameter) is not None for parameter in parameters])
            ranks = [(rank, rank + 1) for rank in range(self._tensor.size)]
            parts = self._tensor.all_gather(summed[None], 0, ranks, "gradient norms")
            for column, order in enumerate(_ORDERS, start=1):
                summed[is_part, column] = torch.linalg.vector_norm(parts[..., column], order, 0)[is_part]
        self._all_reduce(summed)
        return summed.cpu()

    def _sum_between(self, parameter: Parameter, holders: Sequence[int]) -> None:
        """Sums on the last holder, which sends the sum to the other holders."""
        *others, last = holders
        position, group = dist.get_rank(self._group.process_group), self._group
        if position not in holders:
            return
        (gradient,) = _gradients([parameter])
        if position == last:
            for other in others:
                gradient = gradient + group.receive(torch.empty_like(gradient), other)
            for other in others:
                group.send(gradient, other)
        else:
            group.send(gradient, last)
            gradient = group.receive(torch.empty_like(gradient), last)
        parameter.grad = gradient

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        with self._group.begin("all_reduce", size_bytes(tensor), blocking=True):
            dist.all_reduce(tensor, op=op, group=self._group.process_group)


class DataAxis:
    """The ranks that hold the same stage of several pipelines; every method is a collective of these ranks."""

    def __init__(self, reducer: GradientReducer, bookkeeping: MeteredGroup) -> None:
        self._reducer = reducer
        self._bookkeeping = bookkeeping

    def average_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Gives every rank the average of the ranks' gradients; a missing gradient counts as zero.

        Parameters without a gradient on any rank keep none.

        Raises:
            ValueError: a gradient is sparse.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            return
        mine = torch.tensor([parameter.grad is not None for parameter in trained])
        anywhere = self._bookkeeping.all_reduce(mine, "max").tolist()
        averaged = [parameter for parameter, found in zip(trained, anywhere, strict=True) if found]
        gradients = _gradients(averaged)
        if any(gradient.is_sparse for gradient in gradients):
            raise ValueError(
                "several pipelines side by side do not average sparse gradients; make the embedding with "
                "sparse=False, or use one pipeline"
            )
        owners = {id(gradient): id(parameter) for parameter, gradient in zip(averaged, gradients, strict=True)}
        # Ranks of a tensor group have different parts, and the same whole gradients, which must stay equal to the bit.
        # Rounding and compression of a gradient depend on its bucket, so whole gradients have buckets of their own.
        for is_part in (True, False):
            alike_ones = [g for p, g in zip(averaged, gradients, strict=True) if (split_of(p) is not None) is is_part]
            for bucket in alike(alike_ones, full_bytes=_BUCKET_BYTES):
                key = tuple(owners[id(gradient)] for gradient in bucket)
                apply_flat(functools.partial(self._reducer.average, key=key), bucket)


class RemoteGradient(Placeholder):
    """The gradient of a parameter that another stage holds; only its norms are known.

    Hooks that clip or log by all gradients so get the same values on every stage as on one device:
    ``torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)``, ``lightning.pytorch.utilities.grad_norm(self, 2)``, and
    ``isfinite(gradient).all()``, ``isnan(gradient).any()``, ``isinf(gradient).any()``, which follow from the norms.

    Args:
        parameter: the placeholder of the parameter.
        source: a description of the gradient, for messages.

    Attributes:
        norms: 1-norm, 2-norm and largest absolute value, by their orders; tensors without dimensions.
    """

    norms: dict[float, Tensor]

    @classmethod
    def of(cls, parameter: Tensor, source: str, norms: dict[float, Tensor]) -> RemoteGradient:
        made: Any = cls(parameter, source)
        made.norms = norms
        return made  # type: ignore[no-any-return]

    @override
    def resized(self, shape: Sequence[int]) -> RemoteGradient:
        return RemoteGradient.of(super().resized(shape), self.source, self.norms)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = args[0] if args else None
        test = _TESTS.get(func)
        if test is None or not isinstance(mine, RemoteGradient) or _LARGEST not in mine.norms:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        # An entry that is not finite makes the largest one not finite. It may be any entry: all get the same answer.
        return test(mine.norms[_LARGEST]).to(mine.device).expand(mine.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        mine = args[0] if args else None
        if isinstance(mine, RemoteGradient):
            if func in _SAME:
                return RemoteGradient.of(mine, mine.source, mine.norms)
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


@contextmanager
def remote_gradients(ownership: Ownership, sums: StageSums) -> Iterator[None]:
    """Within the block parameters of other stages have a :class:`RemoteGradient`, if those stages have a gradient.

    Entering is a collective of the pipeline, and of the ranks that split its layers: 4 numbers for each parameter.
    """
    shown: list[Parameter] = []
    holdings = [holding for holding in ownership.holdings if holding.is_parameter]
    parameters, counted = ownership.parameters(), {id(each) for each in ownership.counted()}
    norms = sums.norms(parameters, [id(parameter) in counted for parameter in parameters])
    of_parts = [(parameter, parameter.shape) for parameter in parameters if isinstance(parameter, Placeholder)]
    for held, _ in of_parts:
        if (split := split_of(held)) is not None:
            _resize(held, split.whole_shape(held))
    for row, holding, parameter in zip(norms, holdings, parameters, strict=True):
        if row[0] and isinstance(parameter, Placeholder):
            norms_of = dict(zip(_ORDERS, row[1:], strict=True))
            parameter.grad = RemoteGradient.of(parameter, _SOURCE.format(holding.name), norms_of)
            shown.append(parameter)
    try:
        yield
    finally:
        for parameter in shown:
            parameter.grad = None
        for held, shape in of_parts:
            if split_of(held) is not None:
                _resize(held, shape)


def _resize(parameter: Any, shape: Sequence[int]) -> None:
    """Gives the placeholder of a parameter another shape; it stays the same object."""
    exchange(parameter, Parameter(parameter.resized(shape), requires_grad=parameter.requires_grad))


def _gradients(parameters: Sequence[Parameter]) -> list[Tensor]:
    """The gradients of the parameters; a parameter without one gets zeros."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
