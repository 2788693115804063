"""Where each power iteration of PowerSGD starts: at the end of the last one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_multigpu.communication.compression.powersgd import first_factor


class WarmStarts:
    """The factor Q of each matrix, with which its next power iteration starts: the same on every rank.

    Args:
        rank: of the factors.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._factors: dict[str, Tensor] = {}
        self._of_this_step: dict[str, Tensor] = {}

    def get(self, name: str, columns: int) -> Tensor:
        """(rank, columns). One of another size, because the rank was another in the checkpoint, is made anew."""
        factor = self._factors.get(name)
        if factor is None or factor.shape != (self._rank, columns):
            factor = self._factors[name] = first_factor(name, self._rank, columns)
        return factor

    def put(self, name: str, factor: Tensor) -> None:
        """For the next step, if this one is accepted. The length is taken off, which would grow with every step."""
        norm = torch.linalg.vector_norm(factor)
        if norm > 0:
            self._of_this_step[name] = factor / norm

    def end_step(self, *, accept: bool) -> None:
        """Keeps or forgets what was put."""
        if accept:
            self._factors.update(self._of_this_step)
        self._of_this_step = {}

    def state(self) -> dict[str, Tensor]:
        """A copy, by name."""
        return {name: self._factors[name].clone() for name in sorted(self._factors)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes the place of all factors; ``state`` is copied."""
        self._factors = {name: factor.detach().to("cpu", torch.float32, copy=True) for name, factor in state.items()}
        self._of_this_step = {}
