"""The name and the options under which a strategy appears in a report."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.callbacks.strategy_identity import identify
from lightning_multigpu.registry import STRATEGIES


@pytest.mark.parametrize("name", [*(row.name for row in STRATEGIES), "ddp", "ddp_spawn", "ddp_notebook"])
def test_a_registered_name_is_found_again(name: str) -> None:
    found, options = identify(StrategyRegistry.get(name))
    # Lightning has two names for the strategy that forks.
    assert found == {"ddp_notebook": "ddp_fork"}.get(name, name)
    assert options == {}


def test_the_name_that_fixes_most_of_the_options_wins() -> None:
    assert identify(DDPStrategy(find_unused_parameters=True)) == ("ddp_find_unused_parameters_true", {})
    assert identify(DDPStrategy(find_unused_parameters=True, start_method="spawn", bucket_cap_mb=5)) == (
        "ddp_spawn_find_unused_parameters_true",
        {"bucket_cap_mb": 5},
    )


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"bucket_cap_mb": 1}, {"bucket_cap_mb": 1}),
        ({"broadcast_buffers": True, "uneven_inputs": "join"}, {"uneven_inputs": "join"}),
        ({"timeout": timedelta(minutes=1)}, {"timeout": 60.0}),
        (
            {"ddp_comm_hook": fp16_compress_hook},
            {"ddp_comm_hook": f"{fp16_compress_hook.__module__}.fp16_compress_hook"},
        ),
        ({"static_graph": True, "failure_timeout_s": 15.0}, {"static_graph": True}),
    ],
)
def test_options_that_somebody_chose(options: dict[str, Any], shown: dict[str, Any]) -> None:
    assert identify(RingDDPStrategy(**options)) == ("ring_ddp", shown)
    json.dumps(shown)
