"""On GPUs: NCCL moves the gradients of ring_ddp, events on its stream time them; stages of a pipeline share a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from lightning_multigpu import PipelineStrategy
from tests.strategies.tasks import Case, Classifier, make_strategy, make_trainer, state, train_loader
from tests.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CASE = Case(max_epochs=2)


def train(strategy: Any, ranks: int) -> tuple[dict[str, torch.Tensor], Any]:
    module = Classifier()
    trainer = make_trainer(CASE, strategy, ranks, accelerator="gpu")
    trainer.fit(module, train_loader(CASE, ranks))
    return {name: value.cpu() for name, value in state(module).items()}, trainer.strategy


def on_gpus(ranks: int) -> tuple[dict[str, torch.Tensor], list[tuple[int, float, float]], str | None]:
    weights, strategy = train(make_strategy("ring_ddp"), ranks)
    strategy.meter.flush()
    totals = [step.of("all_reduce", "data")[0] for step in strategy.meter.steps]
    return weights, [(t.size_bytes, t.total_s, t.exposed_s) for t in totals], os.environ.get("NCCL_ALGO")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 CUDA devices")
def test_two_gpus_train_as_one(world2: World) -> None:
    reference, _ = train("auto", 1)
    for weights, figures, variable in world2.run(on_gpus, 2):
        for name, value in reference.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-11)
        assert all(0 <= exposed <= total and total > 0 for _, total, exposed in figures)
        assert len({size for size, _, _ in figures}) == 1
        assert variable is None, "the ring is pinned for the time of the run only"


def stages_on_one_gpu(schedule: str) -> dict[str, torch.Tensor]:
    strategy = PipelineStrategy(
        schedule=schedule,
        num_micro_batches=4,
        parallel_devices=[torch.device("cuda", 0)] * 2,
        process_group_backend="gloo",
    )
    module = Classifier()
    trainer = make_trainer(CASE, strategy, 2, accelerator="auto", devices="auto", use_distributed_sampler=False)
    trainer.fit(module, train_loader(CASE, 1))
    return {name: value.cpu() for name, value in state(module).items()}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_two_stages_share_a_gpu(schedule: str, world2: World) -> None:
    """Over Gloo, which sends from the host's memory."""
    reference, _ = train("auto", 1)
    for weights in world2.run(stages_on_one_gpu, schedule):
        for name, value in reference.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-11)
