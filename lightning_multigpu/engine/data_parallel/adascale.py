"""AdaScale: the learning rate of a step is multiplied by the gain of its large batch over the batch of one rank.

A step averages the gradients of S batches: one for each rank and accumulated batch. If they are all equal, the step is
worth one step of one batch; if they are only noise, it is worth S steps. The squared norms of the S gradients
and of their average give the variance of a batch's gradient and the squared norm of the true one. These give the gain,
between 1 and S, by which the learning rate is multiplied for this step::

    backward     hooks: |g|^2 of this rank's gradients of each batch        \\  one all-reduce of 2 numbers
    reduced      |G|^2 of the average, on the ranks that count a parameter  /  a parameter group
    step         lr x gain ........ update ........ lr

Batches may have different sizes. Let g_i be the mean gradient over the n_i samples of batch i, its expectation m, its
variance v / n_i, and w_i its weight in the average, where all w_i add up to 1. Then

    E sum w_i |g_i|^2 = |m|^2 + v sum w_i / n_i      and      E |sum w_i g_i|^2 = |m|^2 + v sum w_i^2 / n_i

give unbiased estimates of |m|^2 and v, and S = (sum w_i / n_i) / (sum w_i^2 / n_i). Where every rank has samples, and
its weight is its share of them, S is the number of batches whatever their sizes.

After T. Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for Distributed Training", ICML 2020, Algorithm 1 and
appendix B.3; averages over steps are weighted as in ``fairscale.optim.AdaScale`` (0.4.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_multigpu.engine.data_parallel.agreement import Share

_SMALLEST_VARIANCE = 1e-6  # as in FairScale
_ROUNDING = 1e-9


class AdaScale:
    """Multiplies the learning rates of an optimizer by the gain of each step.

    Call :meth:`begin_backward` and :meth:`end_backward` around each backward pass, and :meth:`measure` once the
    gradients of a step are averaged. Ranks get the same gain, bit for bit.

    Args:
        optimizer: its ``step`` runs once after each :meth:`measure`.
        all_reduce: sums a tensor of 2 x parameter groups over the ranks; a collective.
        rank, num_ranks: this rank, and the number of ranks that average their gradients.
        counts: whether this rank adds a parameter's averaged gradient to the norm; one rank does for each.
        smoothing: weight of earlier steps in the averages of norms, from 0 to below 1; by default 1 - S / 1000, at
            least 0.

    Attributes:
        gain: the gain of the last step, over all parameter groups.
        steps: the sum of all gains: training so far is worth this number of steps with the batch of one rank.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        all_reduce: Callable[[Tensor], Tensor],
        *,
        rank: int,
        num_ranks: int,
        counts: Callable[[Tensor], bool],
        smoothing: float | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._all_reduce = all_reduce
        self._rank = rank
        self._num_ranks = num_ranks
        self._counts = counts
        self._smoothing = smoothing
        self.gain = 1.0
        self.steps = 0.0
        self._gains: list[float] = []
        # For each parameter group: averages of a sample's variance and of the squared norm, the sum of their weights.
        self._averages = torch.zeros(0, 3, dtype=torch.float64)
        self._own: dict[tuple[int, torch.device], Tensor] = {}
        self._shares: list[Share] = []  # of each rank's batches in this step
        self._factor: float | None = None  # during backward: that of this rank's batch
        self._rates: list[Any] | None = None
        self._hooked: list[tuple[int, int]] = []
        self._on_parameters: list[Any] = []
        self._on_steps = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """Leaves the optimizer and its parameters as they were."""
        self._restore()
        for handle in (*self._on_parameters, *self._on_steps):
            handle.remove()
        self._on_parameters, self._on_steps, self._hooked = [], [], []

    def begin_backward(self, shares: Sequence[Share]) -> None:
        """From here on gradients are those of one batch of this rank.

        Args:
            shares: of the batches that the ranks have now, in rank order; the same on all ranks.
        """
        self._register_hooks()
        self._shares += [share for share in shares if share.factor > 0]
        self._factor = shares[self._rank].factor

    def end_backward(self) -> None:
        """The gradients of a batch are complete on this rank."""
        self._factor = None

    @torch.no_grad()
    def measure(self, *, accumulate: int, loss_scale: float) -> None:
        """Finds the gain of the step whose averaged gradients the parameters have now; a collective.

        Gradients that are inf or NaN change no average: a gradient scaler leaves such a step out.

        Args:
            accumulate: the divisor of each loss; the last step of an epoch may have fewer batches.
            loss_scale: the factor of each loss.
        """
        shares, self._shares = self._shares, []
        total = sum(share.factor for share in shares)
        # For a sample's variance of 1: that of one batch and that of the average.
        of_one = sum(share.factor / share.size for share in shares) / total
        of_average = sum(share.factor**2 / share.size for share in shares) / total**2
        size = of_one / of_average  # S
        num_groups = len(self._optimizer.param_groups)
        sums = torch.zeros(2, num_groups, dtype=torch.float64)
        for (index, _), value in self._own.items():
            sums[0, index] += value.cpu()
        self._own.clear()
        for index, parameter in self._parameters():
            if parameter.grad is not None and self._counts(parameter):
                sums[1, index] += _squared_norm(parameter.grad).cpu()
        sums = self._all_reduce(sums) / loss_scale**2
        new = self._averages.new_zeros(num_groups - len(self._averages), 3)
        self._averages = torch.cat([self._averages, new])
        if size > 1 + _ROUNDING and bool(sums.isfinite().all()):
            # For losses that are not divided.
            own, mean = sums[0] * (accumulate**2 / total), sums[1] * (accumulate * self._num_ranks / total) ** 2
            variance = (own - mean) / (1 - 1 / size)
            true = (mean - variance / size).clamp(min=0.0)
            of_sample = variance.clamp(min=_SMALLEST_VARIANCE) / of_one
            found = torch.stack([of_sample, true, torch.ones_like(true)], dim=1)
            theta = max(0.0, 1 - size / 1000) if self._smoothing is None else self._smoothing
            self._averages = theta * self._averages + (1 - theta) * found
        of_sample, true, weight = self._averages.T
        weight = weight.where(weight > 0, 1.0)
        variance, true = of_sample * of_one / weight, true / weight
        self._gains = [self._gain(v, t, size) for v, t in zip(variance, true, strict=True)]
        self.gain = self._gain(variance.sum(), true.sum(), size)

    def state_dict(self) -> dict[str, Any]:
        """The averages, one row a parameter group, and the sum of gains."""
        return {"averages": self._averages, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`."""
        self._averages, self.steps = state["averages"].clone(), float(state["steps"])

    def _gain(self, variance: Tensor, true: Tensor, size: float) -> float:
        whole = float(variance + true)
        return whole / float(variance / size + true) if whole > 0 else 1.0

    # Gradients of this rank

    def _parameters(self) -> Iterator[tuple[int, Parameter]]:
        for index, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                yield index, parameter

    def _register_hooks(self) -> None:
        trained = [(index, parameter) for index, parameter in self._parameters() if parameter.requires_grad]
        known = [(index, id(parameter)) for index, parameter in trained]
        if known == self._hooked:
            return
        self._hooked = known
        for handle in self._on_parameters:
            handle.remove()
        self._on_parameters = [
            parameter.register_hook(partial(self._note, index))  # type: ignore[no-untyped-call]
            for index, parameter in trained
        ]

    @torch.no_grad()
    def _note(self, index: int, gradient: Tensor) -> None:
        """Notes the norm of a gradient; torch calls it before the gradient is added, and before it is averaged."""
        if self._factor:
            place = (index, gradient.device)
            self._own[place] = self._own.get(place, 0.0) + _squared_norm(gradient) / self._factor

    # Steps

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiplies the rates after the closure, in which Lightning runs backward."""
        self._restore()
        optimizer, *given = args
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            self._multiply()
            return None

        def then_multiplied() -> Any:
            loss = closure()
            self._multiply()
            return loss

        return (optimizer, then_multiplied), {name: value for name, value in kwargs.items() if name != "closure"}

    def _multiply(self) -> None:
        groups = self._optimizer.param_groups
        self._rates = [group["lr"] for group in groups]
        for group, gain in zip(groups, self._gains, strict=False):
            group["lr"] = group["lr"] * gain
        self.steps += self.gain

    def _after_step(self, *_: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._rates is not None:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
                group["lr"] = rate
            self._rates = None


def _squared_norm(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    wide = torch.float32 if values.dtype.itemsize < 4 else values.dtype
    norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm.double().square()
