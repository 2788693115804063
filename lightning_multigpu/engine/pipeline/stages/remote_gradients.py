"""Gradients of other stages that know their norms, for hooks that clip or log by all gradients.

``torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)`` and ``lightning.pytorch.utilities.grad_norm(self, 2)`` then
are on every stage what they are on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.splitting.placeholder import Placeholder
from lightning_multigpu.engine.pipeline.stages.gradients import StageSums

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
