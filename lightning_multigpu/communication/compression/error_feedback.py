"""Error feedback: the error of a step's compression is added to the gradients of the next step.

Without it, a gradient that is always too small to be sent would be lost; with it, the sum of the sent values follows
the sum of the given values.

Sources: S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi, "Error feedback fixes SignSGD and other gradient
compression schemes", ICML 2019, algorithm 2; H. Tang, C. Yu, X. Lian, T. Zhang, J. Liu, "DoubleSqueeze: parallel
stochastic gradient descent with double-pass error-compensated compression", ICML 2019: there the owner of a sum keeps
the sum's error too.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lightning_multigpu.communication.compression.pieces import Pieces, offsets


class _Errors:
    """The errors of one flat tensor, of the last accepted step and of the step under way."""

    def __init__(self, before: Tensor) -> None:
        self.before = before
        self.after = torch.empty_like(before)
        self.written = False

    def accept(self) -> None:
        if self.written:
            self.before, self.after = self.after, self.before
        self.written = False


class ErrorFeedback:
    """The errors of one rank, float32, by parameter name.

    They are stored in flat tensors like the gradients', so that a step adds them at once. When the buckets change, each
    parameter's errors move to its new tensor.
    """

    def __init__(self) -> None:
        self._tensors: dict[Pieces, _Errors] = {}
        self._others: dict[str, Tensor] = {}  # name -> flat errors that belong to no known tensor: of earlier buckets

    def begin(self, pieces: Pieces) -> tuple[Tensor, Tensor]:
        """The errors to add to the flat tensor of these pieces, and the memory for the errors of this step.

        If a tensor comes twice within a step, the second time adds the errors of the first.
        """
        errors = self._tensors.get(pieces)
        if errors is None:
            errors = self._tensors[pieces] = _Errors(self.take(pieces))
        errors.accept()
        errors.written = True
        return errors.before, errors.after

    def end_step(self, *, accept: bool) -> None:
        """Keeps the errors of the step, or forgets them and keeps the earlier ones."""
        for errors in self._tensors.values():
            if accept:
                errors.accept()
            errors.written = False

    def scale(self, factor: float) -> None:
        """Multiplies all errors after a change of the gradients' scale (a loss scaler's, for example)."""
        for tensor in [*self._others.values(), *(errors.before for errors in self._tensors.values())]:
            tensor.mul_(factor)

    def give(self, pieces: Pieces, errors: Tensor) -> None:
        """Adds ``errors`` (flat) to the errors of these pieces, between steps."""
        _add(self._others, pieces, errors)

    def take(self, pieces: Pieces) -> Tensor:
        """The errors of these pieces, flat, between steps; they are removed from their former tensor."""
        for known in [known for known in self._tensors if _share_elements(known, pieces)]:
            _add(self._others, known, self._tensors.pop(known).before)
        collected = torch.zeros(offsets(pieces)[-1])
        for piece, (a, b) in zip(pieces, pairwise(offsets(pieces)), strict=True):
            other = self._others.get(piece.name)
            if other is not None:
                collected[a:b] = other[piece.start : piece.stop]
                other[piece.start : piece.stop] = 0
                if piece.is_whole:
                    del self._others[piece.name]
        return collected


def _add(by_name: dict[str, Tensor], pieces: Pieces, flat: Tensor) -> None:
    for piece, (a, b) in zip(pieces, pairwise(offsets(pieces)), strict=True):
        if piece.name not in by_name:
            by_name[piece.name] = torch.zeros(piece.parameter_numel)
        by_name[piece.name][piece.start : piece.stop] += flat[a:b]


def _share_elements(known: Pieces, new: Pieces) -> bool:
    ranges: dict[str, list[tuple[int, int]]] = {}
    for piece in known:
        ranges.setdefault(piece.name, []).append((piece.start, piece.stop))
    return any(a < piece.stop and piece.start < b for piece in new for a, b in ranges.get(piece.name, ()))
