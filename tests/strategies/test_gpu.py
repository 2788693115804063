"""On GPUs: NCCL moves gradients and activations, events on its stream time them; stages of a pipeline share a GPU.

Nobody has run these tests on a machine with GPUs yet; ``pytest -m gpu`` does.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_multigpu import DataParallelStrategy, PipelineStrategy
from lightning_multigpu.callbacks import ProfilerReport
from tests.launch.test_hangs import HangingJob
from tests.strategies.tasks import Case, Classifier, make_strategy, make_trainer, state, train_loader
from tests.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 CUDA devices")
CASE = Case(max_epochs=2)
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]


def train(strategy: Any, ranks: int, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    module = Classifier()
    trainer = make_trainer(CASE, strategy, ranks, **{"accelerator": "gpu", **options})
    trainer.fit(module, train_loader(CASE, ranks))
    return {name: value.cpu() for name, value in state(module).items()}, trainer.strategy


def assert_close(weights: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    for name, value in reference.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-11)


Figures = list[tuple[int, float, float]]


def figures_of(strategy: Any, operation: str, group: str) -> Figures:
    """Bytes, total and exposed seconds in each step."""
    strategy.meter.flush()
    totals = [step.of(operation, group)[0] for step in strategy.meter.steps]
    return [(t.size_bytes, t.total_s, t.exposed_s) for t in totals]


def assert_timed(figures: Figures) -> None:
    assert figures
    assert all(0 <= exposed <= total and total > 0 for _, total, exposed in figures)


def on_gpus(ranks: int, **options: Any) -> tuple[dict[str, torch.Tensor], Figures, str | None]:
    weights, strategy = train(make_strategy("ring_ddp", **options), ranks)
    return weights, figures_of(strategy, "all_reduce", "data"), os.environ.get("NCCL_ALGO")


@two_gpus
@pytest.mark.parametrize("algorithm", [None, "ring", "tree"])
def test_two_gpus_train_as_one(algorithm: str | None, world2: World) -> None:
    reference, _ = train("auto", 1)
    for weights, figures, variable in world2.run(on_gpus, 2, nccl_algorithm=algorithm):
        assert_close(weights, reference)
        assert_timed(figures)
        assert len({size for size, _, _ in figures}) == 1
        assert variable is None, "the algorithm is set for the time of the run only"


def hooked() -> tuple[dict[str, torch.Tensor], Figures]:
    weights, strategy = train(make_strategy("ring_ddp", ddp_comm_hook=allreduce_hook), 2)
    return weights, figures_of(strategy, "all_reduce", "data")


@two_gpus
def test_a_hook_is_timed_on_its_stream(world2: World) -> None:
    reference, _ = train("auto", 1)
    for weights, figures in world2.run(hooked):
        assert_close(weights, reference)
        assert_timed(figures)


def local_steps(accelerator: str) -> dict[str, torch.Tensor]:
    return train(make_strategy("ring_ddp", average_every=3), 2, accelerator=accelerator)[0]


@two_gpus
def test_local_steps_are_those_of_cpus(world2: World) -> None:
    """The flags of who has optimizer state were in the host's memory, where NCCL takes nothing."""
    for weights, reference in zip(world2.run(local_steps, "gpu"), world2.run(local_steps, "cpu"), strict=True):
        assert_close(weights, reference)


def sharded(**options: Any) -> tuple[dict[str, torch.Tensor], Figures, Figures]:
    weights, strategy = train(make_strategy("ddp_sharded", **options), 2, gradient_clip_val=0.3)
    return weights, figures_of(strategy, "reduce", "shards"), figures_of(strategy, "broadcast", "shards")


@two_gpus
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.0}, {"offload_optimizer": True}], ids=str)
def test_sharded_states_over_nccl(options: dict[str, Any], world2: World) -> None:
    reference, _ = train("auto", 1, gradient_clip_val=0.3)
    for weights, reduces, broadcasts in world2.run(sharded, **options):
        assert_close(weights, reference)
        assert_timed(reduces)
        assert_timed(broadcasts)


@two_gpus
def test_dp_drives_two_gpus() -> None:
    reference, _ = train("auto", 1)
    module = Classifier()
    trainer = make_trainer(CASE, DataParallelStrategy(), 2, accelerator="gpu")
    trainer.fit(module, train_loader(CASE, 1))
    assert_close({name: value.cpu() for name, value in state(module).items()}, reference)
    for operation in ("broadcast", "scatter", "reduce"):
        assert_timed(figures_of(trainer.strategy, operation, "devices"))


def stages_on_two_gpus(schedule: str) -> tuple[dict[str, torch.Tensor], Figures]:
    strategy = PipelineStrategy(schedule=schedule, num_micro_batches=4)
    module = Classifier()
    trainer = make_trainer(CASE, strategy, 2, accelerator="gpu", use_distributed_sampler=False)
    trainer.fit(module, train_loader(CASE, 1))
    weights = {name: value.cpu() for name, value in state(module).items()}
    return weights, figures_of(strategy, "recv", "pipeline")


@two_gpus
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_over_nccl(schedule: str, world2: World) -> None:
    """torch's schedules post the messages; they wait on the stream, where the meter has to look."""
    reference, _ = train("auto", 1)
    for weights, figures in world2.run(stages_on_two_gpus, schedule):
        assert_close(weights, reference)
        assert_timed(figures)


@two_gpus
@pytest.mark.launch
def test_a_rank_that_spins_in_item_waits_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's host spins in ``.item()`` behind an all-reduce to which rank 1 never comes."""
    monkeypatch.setenv("ACCELERATOR", "gpu")
    job = HangingJob(tmp_path / "job", "popen", "behind")
    try:
        (report,) = job.reports()
        assert re.search(r"rank 0 .*in all_reduce #\d+ of group data", report, re.IGNORECASE), report
        assert "rank 1 has not come" in report
        assert "rank 1" in job.ends_when_rank_1_is_killed()
    finally:
        job.close()


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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_share_a_gpu(schedule: str, world2: World) -> None:
    """Over Gloo, which sends from the host's memory."""
    reference, _ = train("auto", 1)
    for weights in world2.run(stages_on_one_gpu, schedule):
        assert_close(weights, reference)


def test_a_profile_has_what_a_gpu_tells(tmp_path: Path) -> None:
    report = ProfilerReport(wait=1, warmup=1, active=3, print_report=False)
    options = {"callbacks": [report], "default_root_dir": tmp_path}
    trainer = make_trainer(CASE, "auto", 1, accelerator="gpu", **options)
    trainer.fit(Classifier(), train_loader(CASE, 1))
    assert report.profile is not None
    [rank] = report.profile["ranks"]
    assert rank["launches"]["kernels"] > 0
    assert rank["launches"]["busy_s"] > 0
    assert rank["limit"][0] == "GPU"
    assert any(gpu_s for *_, gpu_s in rank["operators"])
    page = (tmp_path / "report.html").read_text()
    assert "on the GPU" in page
    assert "GPU stream 0" in (tmp_path / "profile_trace.json").read_text()
