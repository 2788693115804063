"""The options in remedies, which the strategy of the run takes; and the name and options under which it is reported."""

import re
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_multigpu import STRATEGIES, HybridStrategy, PipelineStrategy, RingDDPStrategy
from lightning_multigpu.callbacks.run_report import identify
from lightning_multigpu.report.diagnosis import diagnose
from lightning_multigpu.report.pipelines import PipelineFigures
from lightning_multigpu.report.rank_figures import LaunchQueue, RankFigures, ReadValues
from tests.strategies.tasks import make_strategy

WORK = {"data_wait": 0.03, "forward": 0.02, "backward": 0.02, "communication": 0.2, "callbacks": 0.02, "other": 0.03}
OTHERS = (
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "log_every_n_steps",
    "enable_progress_bar",
    "accumulate_grad_batches",
)
"""Options of the loader and of the Trainer."""


def remedies(strategy: Any, *, num_nodes: int = 2) -> dict[str, str]:
    """By kind: all that a run can be told."""
    options = getattr(strategy, "options", {})
    of_ranks = [
        RankFigures(
            rank=rank, host="a", node=rank % num_nodes, phases_s={**WORK, "forward": 0.02 + 0.03 * rank},
            callbacks_s={"Slow.on_train_batch_end": 0.02}, hidden_s=0.1, data_workers=0, parameters_bytes=9,
            waits_s={"gradients": 0.1, **({"activations": 0.1} if "plan" in options else {})}, activations_rate=1e12,
            reads=(ReadValues("train.py(7): f", 9, 0.02),),
            launches=LaunchQueue(9, 0.001, 0),
        )
        for rank in range(2)
    ]  # fmt: skip
    stages = PipelineFigures(
        wall_s=0.2, bubble=0.5, num_micro_batches=2, more_micro_batches=8, with_more_s=0.1, balanced_s=0.1,
        passes_s=0.1, busy_s={0: 0.1, 1: 0.05},
    )  # fmt: skip
    findings = diagnose(of_ranks, pipeline=stages if "schedule" in options else None, options=options)
    return {finding.kind: finding.remedy for finding in findings}


@pytest.mark.parametrize("name", [row.name for row in STRATEGIES])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_the_strategy_of_the_run_takes_the_options_that_remedies_name(name: str, num_nodes: int) -> None:
    for remedy in remedies(make_strategy(name), num_nodes=num_nodes).values():
        for option, value in re.findall(r"(\w+)=(\w+|\"\w+\")(?!\w)", remedy):
            if option == "strategy":
                assert value.strip('"') in StrategyRegistry
            elif option not in OTHERS:
                assert option in make_strategy(name, **{option: eval(value)}).options


def test_the_right_option_for_each_strategy() -> None:
    found = {row.name: remedies(make_strategy(row.name)) for row in STRATEGIES}
    compressed = {name for name, of in found.items() if 'compression="bf16"' in of["communication"]}
    assert compressed == {"ring_ddp", "ring_ddp_spawn", "hybrid", "ft_ddp"}
    for name in ("ring_ddp", "hybrid"):
        assert "bf16" not in remedies(make_strategy(name), num_nodes=1)["communication"], "no host is far away"
    assert "accumulate" in found["cpu_ps"]["communication"]
    assert "num_micro_batches=8" in found["pipeline_1f1b"]["pipeline bubble"]
    assert 'balance="time"' in found["hybrid"]["imbalance of stages"]
    measured, cut = HybridStrategy(balance="time"), PipelineStrategy(split_points=["layers.2"])
    assert 'balance="time" cannot divide a layer' in remedies(measured)["imbalance of stages"]
    assert "Move split_points" in remedies(cut)["imbalance of stages"]
    for options in ({"average_every": 4}, {"compression": "int8"}):
        assert "bf16" not in remedies(make_strategy("ring_ddp", **options))["communication"]
    assert not re.search("compression|balance=", " ".join(remedies(DDPStrategy()).values())), "of DDP nothing is known"


@pytest.mark.parametrize("name", [*(row.name for row in STRATEGIES), "ddp", "fsdp", "single_device"])
def test_a_registered_name_is_found_again(name: str) -> None:
    options = {"device": "cpu"} if name == "single_device" else {}
    assert identify(StrategyRegistry[name]["strategy"](**StrategyRegistry[name]["init_params"], **options)) == (
        name,
        {},
    )


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"bucket_cap_mb": 1}, {"bucket_cap_mb": 1}),
        ({"broadcast_buffers": True, "uneven_inputs": "join"}, {"uneven_inputs": "join"}),
        (
            {"loss_reduction": fp16_compress_hook},
            {"loss_reduction": f"{fp16_compress_hook.__module__}.fp16_compress_hook"},
        ),
    ],
)
def test_options_that_somebody_chose(options: dict[str, Any], shown: dict[str, Any]) -> None:
    assert identify(RingDDPStrategy(**options)) == ("ring_ddp", shown)
