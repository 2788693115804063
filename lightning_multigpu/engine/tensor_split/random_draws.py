"""The random numbers that a step draws, and whether it draws them where activations are split.

Ranks have to draw the same numbers for tensors that all of them have, and different ones for parts of tensors. A step
on whole layers and the same step on split ones draw in the same order, so that shapes show which is which::

    draw     on whole layers    on split layers of 2 ranks
    0        (8, 6, 16)         (8, 6, 16)                    whole: must be drawn outside of regions
    1        (8, 4, 6, 6)       (8, 2, 6, 6)                  a part: must be drawn inside
    2        ()                 ()                            whole: a decision, to leave out a layer for example
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_multigpu import _torch_compat


def _signature(input: Tensor, p: float, train: bool) -> None:
    """The parameters of the dropouts that are no functions of Python."""


_DROPOUTS: dict[Any, inspect.Signature] = {
    func: inspect.signature(func)
    for func in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
}
for _func in (torch.dropout, torch.alpha_dropout, torch.feature_alpha_dropout, torch.feature_dropout):
    _DROPOUTS[_func] = inspect.signature(_signature)
_ATTENTION = inspect.signature(F.multi_head_attention_forward)


class Draw(NamedTuple):
    """Random numbers for one tensor: its shape, and whether a region was open."""

    shape: tuple[int, ...]
    is_inside: bool


class NoDropout(TorchFunctionMode):
    """Within the block nothing is dropped, and random numbers are taken down, also those of the dropout left out.

    Args:
        device: of the module.
        is_inside: whether a region is open.

    Attributes:
        draws: in their order.
    """

    def __init__(self, device: torch.device, is_inside: Callable[[], bool]) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        self._is_inside = is_inside
        self._on_gpu = device if device.type == "cuda" else None

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "__get__":  # a tensor's attribute; a third of all calls
            return func(*args, **kwargs)
        if func in _DROPOUTS:
            given = _given(_DROPOUTS[func], args, kwargs)
            if given["p"] and given.get("training", given.get("train")):
                self._note(given["input"])
            return given["input"]
        if func is F.scaled_dot_product_attention:
            if not _torch_compat.ATTENDS_WITHOUT_HEADS:
                _check_heads(*args[:2], **{name: kwargs[name] for name in ("query", "key") if name in kwargs})
            if args[4] if len(args) > 4 else kwargs.pop("dropout_p", 0.0):
                self._note(args[0] if args else kwargs["query"])
            args = (*args[:4], *([0.0] if len(args) > 4 else []), *args[5:])
        elif func is F.multi_head_attention_forward:
            given = _given(_ATTENTION, args, kwargs)
            if given["dropout_p"] and given["training"]:
                self._note(given["query"])
            if "training" in kwargs:
                kwargs["training"] = False
        before = self._states()
        result = func(*args, **kwargs)
        if not all(map(torch.equal, before, self._states())):
            self._note(result)
        return result

    def _note(self, of: Any) -> None:
        shape = tuple(of.shape) if isinstance(of, Tensor) else ()
        self.draws.append(Draw(shape, self._is_inside()))

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return states if self._on_gpu is None else [*states, torch.cuda.get_rng_state(self._on_gpu)]


def misplaced(draws: Sequence[Draw], are_parts: Sequence[bool]) -> str | None:
    """Why the numbers of a step on split layers are not those that the ranks have to draw; None if they are.

    Args:
        draws: of this rank.
        are_parts: for each, whether any rank has drawn for a part of a tensor.
    """
    for draw, is_part in zip(draws, are_parts, strict=True):
        if is_part and not draw.is_inside:
            return f"ranks would draw the same random numbers for different parts of a tensor, {draw.shape} here"
        if draw.is_inside and not is_part:
            return (
                f"ranks would draw different random numbers, where activations are split, for a tensor of {draw.shape} "
                "that all of them have"
            )
    return None


def _check_heads(query: Tensor, key: Tensor) -> None:
    if query.dim() == 4 and 0 in (query.shape[1], key.shape[1]):
        raise RuntimeError("a rank has no heads, and torch before 2.13 ends the process in attention without heads")


def _given(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
