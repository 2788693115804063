"""A forward pass that is to leave no trace leaves none."""

from collections import Counter, deque
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from lightning_multigpu.engine.step_state import preserved_state


class Tracked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("center", torch.zeros(2))
        self.metric = torchmetrics.MeanMetric()
        self.collected: list[Any] = [1.0]
        self.collected.append(self.collected)  # it is looked at once
        self.nested = {"latest": deque([torch.ones(1)])}
        self.names = {"first"}
        self.calls = Counter({"all": 1})
        self.found: dict[str, float] = {}
        self.grown = torch.zeros(2)
        self.count = 0
        self.generator = torch.Generator().manual_seed(3)
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.metric(x.mean())
        self.collected.append(2.0)
        self.nested["latest"][0].add_(1)
        self.nested["latest"].append(x)
        self.nested["new"] = deque()
        self.names.add("second")
        self.calls["forward"] += 1
        self.found["mean"] = 1.0
        self.grown.data = torch.cat([self.grown, torch.ones(1)])
        self.count += 1
        self.added = x
        self.center.data.add_(torch.rand(2, generator=self.generator))  # type: ignore[operator]
        return self.norm(x)


def snapshot(module: Tracked) -> list[object]:
    return [
        {name: value.tolist() for name, value in module.state_dict().items()},
        float(module.metric.mean_value),
        module.metric._update_count,
        list(module.collected),
        {name: [tensor.tolist() for tensor in values] for name, values in module.nested.items()},
        set(module.names),
        dict(module.calls),
        dict(module.found),
        module.grown.tolist(),
        module.count,
        module.generator.get_state().tolist(),
        [part.training for part in module.modules()],
        sorted(vars(module)),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back_where_it_was(fails: bool) -> None:
    module = Tracked()
    module(torch.randn(4, 2))
    module.found.clear()
    before, lists, metric_value = snapshot(module), module.collected, module.metric.mean_value
    parameter = module.norm.weight
    try:
        with preserved_state(module):
            module.eval()
            module(torch.randn(4, 2))
            module.train()
            module(torch.randn(4, 2))
            assert snapshot(module) != before
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert snapshot(module) == before
    assert module.collected is lists
    assert module.metric.mean_value is metric_value
    assert module.norm.weight is parameter
