"""What a step changes in a module is put back, in the objects that hold it."""

from __future__ import annotations

from collections import Counter, deque

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_multigpu.engine.pipeline.kept_state import kept_state


class Busy(nn.Module):
    """Changes everything that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.metric = MeanMetric()
        self.total = torch.zeros(2)
        self.count = 0
        self.seen: list[float] = [1.0]
        self.nested = {"a": [1, 2], "b": {"c": torch.ones(1)}}
        self.names = Counter({"x": 1})
        self.last: deque[int] = deque([1, 2], maxlen=2)
        self.marks = {1}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        self.metric.update(y.mean())
        self.total += 1
        self.count += 1
        self.seen.append(2.0)
        self.nested["a"].append(3)  # type: ignore[attr-defined]
        self.nested["b"]["c"] *= 5  # type: ignore[index,call-overload]
        self.nested["new"] = []
        self.names["y"] += 1
        self.last.append(3)
        self.marks.add(2)
        self.added = y
        return y


def described(module: Busy) -> str:
    return repr(
        (
            {name: value.tolist() for name, value in module.state_dict().items()},
            {name: value for name, value in vars(module).items() if not name.startswith("_")},
            {
                name: value
                for name, value in vars(module.metric).items()
                if name in ("value", "weight", "_update_count")
            },
            [getattr(module.metric, name) for name in ("mean_value", "weight") if hasattr(module.metric, name)],
        )
    )


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_put_back_where_it_was(raises: bool) -> None:
    module = Busy()
    before, objects = described(module), [id(value) for value in vars(module).values()]
    weight = module.norm.weight.clone()
    try:
        with kept_state(module):
            module(torch.arange(12.0).reshape(4, 3)).sum().backward()
            assert described(module) != before
            if raises:
                raise KeyError
    except KeyError:
        pass
    assert described(module) == before
    assert [id(value) for value in vars(module).values()] == objects
    torch.testing.assert_close(module.norm.weight, weight)
