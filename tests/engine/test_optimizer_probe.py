"""Optimizers that compute with the gradients of all parameters are found: a stage has those of its own layers only."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_multigpu.engine import parity
from lightning_multigpu.engine.parity import couples_parameters


class SAM(Optimizer):
    """Sharpness-aware minimisation as it is usually written: its step to the side is divided by the global norm."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base_optimizer = SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (0.05 / norm))
        torch.enable_grad()(closure)()
        for p in parameters:
            p.data = self.state[p]["old"]
        self.base_optimizer.step()


class Clipping(AdamW):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()
        return loss


class Named(AdamW):
    """Only its name is new."""


class Broken(SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("needs a GPU")


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5, 6))]


def clip(optimizer: Optimizer, *args: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)


def hooked() -> Optimizer:
    optimizer = SGD(parameters(), lr=0.1)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def scheduled() -> Optimizer:
    optimizer = Clipping(parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


@pytest.mark.parametrize(
    ("made", "couples"),
    [
        (lambda: SAM(parameters()), True),
        (lambda: Clipping(parameters()), True),
        (scheduled, True),
        (hooked, True),  # by gradients that batches have accumulated: it runs before the closure that computes them
        (lambda: torch.optim.LBFGS(parameters()), True),
        (lambda: Named([{"params": [p], "lr": 0.1} for p in parameters()]), False),
    ],
    ids=["SAM", "clips", "scheduled", "hooked", "LBFGS", "subclass"],
)
def test_what_computes_with_all_gradients_is_found(made: Any, couples: bool) -> None:
    optimizer = made()
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    assert couples_parameters(optimizer) is couples
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, after, strict=True))
    assert not optimizer.state


def test_what_fails_is_said() -> None:
    with pytest.raises(RuntimeError, match="needs a GPU"):
        couples_parameters(Broken(parameters(), lr=0.1))


TORCHS = [
    cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls.__name__ not in ("Optimizer", "SparseAdam", "LBFGS")
]


@pytest.mark.parametrize("cls", TORCHS)
def test_the_optimizers_of_torch_work_parameter_by_parameter(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As this version has them: they are probed here, and not elsewhere."""
    monkeypatch.setattr(parity, "_KNOWN", set())
    assert not couples_parameters(cls(parameters(), lr=0.1))
