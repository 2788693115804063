"""The code in remedies: the options exist, and the strategy of the run takes them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from torch.utils.data import DataLoader

import lightning_multigpu
from lightning_multigpu import STRATEGIES, HybridStrategy, ParameterServerStrategy, PipelineStrategy, ShardedStrategy
from lightning_multigpu.callbacks.strategy_identity import strategy_options
from lightning_multigpu.planning.diagnosis import diagnose
from lightning_multigpu.planning.pipelines.pipeline_figures import PipelineFigures
from lightning_multigpu.planning.rank_figures import LaunchQueue, RankFigures, ReadValues
from tests.strategies.tasks import make_strategy

WORK = {"data_wait": 0.03, "forward": 0.02, "backward": 0.02, "communication": 0.2, "callbacks": 0.02, "other": 0.03}


def remedies(strategy: Any, *, num_nodes: int = 2) -> dict[str, str]:
    """By kind: all that a run can be told."""
    options = strategy_options(strategy)
    staged = options.class_name in ("PipelineStrategy", "HybridStrategy")
    split = options.class_name in ("TensorSplitStrategy", "HybridStrategy")
    served = options.class_name == "ParameterServerStrategy"
    of_ranks = [
        RankFigures(
            rank=rank, host="a", node=rank % num_nodes, phases_s={**WORK, "forward": 0.02 + 0.03 * rank},
            callbacks_s={"Slow.on_train_batch_end": 0.02}, hidden_s=0.1, data_workers=0, parameters_bytes=9,
            waits_s={"gradients": 0.1, **({"activations": 0.1} if split else {})}, activations_rate=1e12,
            reads=(ReadValues("train.py(7): f", 9, 0.02),),
            launches=LaunchQueue(9, 0.001, 0),
        )
        for rank in range(2)
    ]  # fmt: skip
    stages = PipelineFigures(
        wall_s=0.2, bubble=0.5, num_micro_batches=2, more_micro_batches=8, with_more_s=0.1, balanced_s=0.1,
        passes_s=0.1, busy_s={0: 0.1, 1: 0.05},
    )  # fmt: skip
    findings = diagnose(
        of_ranks, pipeline=stages if staged else None, shards=[9, 1] if served else [], strategy=options
    )
    return {finding.kind: finding.remedy for finding in findings}


def calls(text: str) -> Iterator[str]:
    """Calls such as ``RingDDPStrategy(compression="bf16")`` in a text."""
    for match in re.finditer(r"\b(\w+Strategy|Trainer|DataLoader)\(", text):
        depth = 0
        for end in range(match.end() - 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if not depth:
                yield text[match.start() : end + 1]
                break


class _Trainer:
    def __init__(self, **options: Any) -> None:
        assert options.keys() <= inspect.signature(L.Trainer.__init__).parameters.keys()


ONE_OF_EACH = [make_strategy(name) for name in {row.class_path: row.name for row in STRATEGIES}.values()]
CHOSEN = [
    SingleDeviceStrategy(),
    DDPStrategy(),
    make_strategy("ring_ddp", compression="int8"),
    ShardedStrategy(bucket_cap_mb=2, start_method="popen"),
    PipelineStrategy(balance="time", activation_checkpointing=True),
    PipelineStrategy(split_points=["layers.2"]),
    HybridStrategy(balance="time", compression="bf16"),
    ParameterServerStrategy(num_servers=2),
]


@pytest.mark.parametrize("strategy", [*ONE_OF_EACH, *CHOSEN], ids=lambda strategy: type(strategy).__name__)
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_the_strategy_of_the_run_takes_the_options_that_remedies_name(strategy: Any, num_nodes: int) -> None:
    names: dict[str, Any] = {name: getattr(lightning_multigpu, name) for name in lightning_multigpu.__all__}
    names |= {"Trainer": _Trainer, "DataLoader": lambda **options: DataLoader([], **options)}
    for remedy in remedies(strategy, num_nodes=num_nodes).values():
        for call in calls(remedy):
            made = eval(call, names)
            if call.partition("(")[0].endswith("Strategy"):
                assert type(made) is type(strategy), call
                fixed = strategy_options(strategy).fixed
                changed = call.partition("(")[2]
                assert all(made.options.get(k, v) == v for k, v in fixed.items() if f"{k}=" not in changed), call
        for name in re.findall(r'strategy="(\w+)"', remedy):
            assert name in StrategyRegistry
            assert name != strategy_options(strategy).class_name


def test_the_right_option_for_each_strategy() -> None:
    found = {row.name: remedies(make_strategy(row.name)) for row in STRATEGIES}
    compressed = {name: re.findall(r'\w+Strategy\([^)]*"bf16"\)', of["communication"]) for name, of in found.items()}
    assert {name for name, of in compressed.items() if of} == {
        "ring_ddp", "ring_ddp_spawn", "hybrid"
    }  # fmt: skip
    for name in ("ring_ddp", "hybrid"):
        assert "bf16" not in remedies(make_strategy(name), num_nodes=1)["communication"], "no host is far away"
    assert "accumulate" in found["cpu_ps"]["communication"]
    assert "HybridStrategy(num_micro_batches=" in found["hybrid"]["pipeline bubble"]
    assert 'PipelineStrategy(schedule="1f1b", num_micro_batches=' in found["pipeline_1f1b"]["pipeline bubble"]
    assert 'HybridStrategy(balance="time")' in found["hybrid"]["imbalance of stages"]
    assert "num_servers=1" in found["sync_ps"]["imbalance of shards"]
    assert "layer.compile()" in found["ring_ddp"]["launch-bound"]
    assert "layer.compile()" not in found["dp"]["launch-bound"], "it cannot copy compiled layers"
    measured = HybridStrategy(balance="time")
    assert 'balance="time" cannot divide a layer' in remedies(measured)["imbalance of stages"]
    assert "Strategy(" not in " ".join(remedies(DDPStrategy()).values()), "of options of its class nothing is known"
