"""The backward pass of a stage from its outputs, in one piece or in two.

In two pieces (Qi et al. 2023, arXiv:2401.10241) the gradients of what the stage has received come first, because the
stage before waits for them, and those of the parameters later. torch has both as functions without a public name, which
only :func:`backward_in_parts` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import Parameter

Gradients = tuple[Tensor | None, ...]


def backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], received: Sequence[Tensor]) -> Gradients:
    """Adds to the parameters' gradients; gives those of what was received.

    Args:
        outputs: of the stage, all of which need a gradient.
        gradients: of the outputs; None for a loss.
        received: leaves that the outputs were computed from, or not.
    """
    torch.autograd.backward(outputs, gradients)
    return _taken(received)


def backward_in_parts(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    received: Sequence[Tensor],
    parameters: Sequence[Parameter],
) -> tuple[Gradients, Callable[[], None]]:
    """The gradients of what was received, and what adds to the parameters' gradients when it is called.

    Right only where :func:`divisible`. The outputs are detached in place.
    """
    given: Any = None if all(gradient is None for gradient in gradients) else gradients
    try:
        _, parts = stage_backward_input(list(outputs), given, list(received), iter(parameters))
    except RuntimeError as error:  # torch's words around what was raised
        raise error.__cause__ or error from None
    return _taken(received), lambda: _finish(parameters, parts)


def divisible(outputs: Iterable[Tensor], received: Iterable[Tensor]) -> bool:
    """Whether each output was computed from something received that needs a gradient.

    torch looks for parameters behind what was received, and would lose those of any other output.
    """
    wanted = {id(tensor) for tensor in received if tensor.requires_grad}
    return all(any(id(leaf) in wanted for leaf in _leaves(output)) for output in outputs)


def _finish(parameters: Sequence[Parameter], parts: Any) -> None:
    stage_backward_weight(iter(parameters), parts)


def _taken(received: Sequence[Tensor]) -> Gradients:
    gradients = tuple(tensor.grad for tensor in received)
    for tensor in received:
        tensor.grad = None
    return gradients


def _leaves(output: Tensor) -> Iterable[Tensor]:
    """The tensors that the gradients of the output are accumulated in."""
    if output.grad_fn is None:
        yield output
        return
    nodes: list[Any] = [output.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
