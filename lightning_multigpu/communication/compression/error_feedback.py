"""Error feedback: the error of a step's compression is added to the gradients of the next step.

Without it, a gradient that is always too small to be sent would be lost; with it, the sum of the sent values follows
the sum of the given values.

Sources: S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi, "Error feedback fixes SignSGD and other gradient
compression schemes", ICML 2019, algorithm 2; H. Tang, C. Yu, X. Lian, T. Zhang, J. Liu, "DoubleSqueeze: parallel
stochastic gradient descent with double-pass error-compensated compression", ICML 2019: there the owner of a sum keeps
the sum's error too.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class _Errors:
    """The errors of one flat tensor, of the last accepted step and of the step under way."""

    def __init__(self, numel: int) -> None:
        self.before, self.after = torch.zeros(numel), torch.empty(numel)
        self.written = False

    def accept(self) -> None:
        if self.written:
            self.before, self.after = self.after, self.before
        self.written = False


class ErrorFeedback:
    """The errors of one rank, float32, of each flat tensor by its key; a step forgets those of tensors it lacks."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, _Errors] = {}

    def begin(self, key: Hashable, numel: int) -> tuple[Tensor, Tensor]:
        """The errors to add to a flat tensor, and the memory for the errors of this step.

        If a tensor comes twice within a step, the second time adds the errors of the first.
        """
        errors = self._tensors.get(key)
        if errors is None or errors.before.numel() != numel:
            errors = self._tensors[key] = _Errors(numel)
        errors.accept()
        errors.written = True
        return errors.before, errors.after

    def end_step(self, *, accept: bool) -> None:
        """Keeps the errors of the step, or forgets them and keeps the earlier ones."""
        self._tensors = {key: errors for key, errors in self._tensors.items() if errors.written}
        for errors in self._tensors.values():
            if accept:
                errors.accept()
            errors.written = False

    def scale(self, factor: float) -> None:
        """Multiplies all errors after a change of the gradients' scale (a loss scaler's, for example)."""
        for errors in self._tensors.values():
            errors.before.mul_(factor)
