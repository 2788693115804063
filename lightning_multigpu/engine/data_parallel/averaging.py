"""Averages models instead of gradients: every rank takes several steps of its own, then all meet in the middle.

Source: T. Lin, S. U. Stich, K. K. Patel, M. Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020; averaging
the momentum with the weights follows J. Wang et al., "SlowMo", ICLR 2020, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_FLAT_BYTES = 32 << 20


class ModelAverager:
    """Keeps count of the steps that ranks take alone, and averages when they have taken enough.

    Args:
        every: optimizer steps from one average to the next.
        average: averages a flat, contiguous tensor of one dtype over the ranks, in place; a collective.

    Raises:
        ValueError: ``every`` is below 1.
    """

    def __init__(self, every: int, average: Callable[[Tensor], object]) -> None:
        if every < 1:
            raise ValueError(f"average_every={every}: ranks must meet every 1 or more steps")
        self.every = every
        self._average = average
        self._steps_alone = 0

    def stepped(self) -> bool:
        """Counts an optimizer step; True if an average is due."""
        self._steps_alone += 1
        return self._steps_alone >= self.every

    def average(self, parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> bool:
        """Averages weights and optimizer state, unless no step was taken since the last time; a collective.

        Of an optimizer's state that is what has the parameter's own shape (momentum, moments). A parameter that had no
        gradient yet on some rank, and so has no state there, keeps what each rank has.

        Returns:
            Whether anything was averaged.
        """
        if self._steps_alone == 0:
            return False
        self._steps_alone = 0
        parameters = list(parameters)
        with torch.no_grad():
            moments = self._on_all_ranks([_moments(state) for state in _states(optimizers)], parameters[0].device)
            for tensors in _chunks([*parameters, *moments]):
                self._average_together(tensors)
        return True

    def _on_all_ranks(self, moments: list[list[Tensor]], device: torch.device) -> list[Tensor]:
        """Those of the parameters whose optimizer state exists on every rank."""
        present = torch.tensor([float(bool(of_one)) for of_one in moments])
        self._average(present)
        return [
            tensor for of_one, share in zip(moments, present.tolist(), strict=True) if share == 1 for tensor in of_one
        ]

    def _average_together(self, tensors: list[Tensor]) -> None:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        self._average(flat)
        for tensor, averaged in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(averaged.view(tensor.shape))


def _states(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Each parameter with its state, in an order that is the same on all ranks."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, optimizer.state.get(parameter, {})


def _moments(entry: tuple[Tensor, dict[str, Any]]) -> list[Tensor]:
    parameter, state = entry
    values = [state[name] for name in sorted(state, key=str)]
    return [v for v in values if isinstance(v, Tensor) and v.shape == parameter.shape and v.is_floating_point()]


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype and device, up to a size that does not double the memory of the model."""
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        other = bool(chunk) and (tensor.dtype, tensor.device) != (chunk[0].dtype, chunk[0].device)
        if chunk and (other or size >= _FLAT_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if chunk:
        yield chunk
