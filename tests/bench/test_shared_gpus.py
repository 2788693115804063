"""Benches on hosts with fewer GPUs than ranks: the command refused, or did not say that its times are no forecast."""

from datetime import timedelta

import lightning.fabric.accelerators.cuda
import lightning.pytorch.accelerators.cuda
import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import ParallelStrategy

from lightning_multigpu.bench.collectives.collective_run import group_of
from lightning_multigpu.bench.jobs.placement import placement
from lightning_multigpu.bench.jobs.rank_process import Seat
from lightning_multigpu.bench.strategies.contenders import Contender, contender
from lightning_multigpu.bench.strategies.models import BenchMLP, Subject
from lightning_multigpu.bench.strategies.strategy_rank import StrategyPlan, make_trainer
from lightning_multigpu.commands.benches.bench_options import header, header_lines
from lightning_multigpu.job.shared_gpus import SHARING_VARIABLE, rank_devices, sharing_note

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with one GPU, as far as anybody asks who starts nothing on it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    for module in (lightning.fabric.accelerators.cuda, lightning.pytorch.accelerators.cuda):
        monkeypatch.setattr(module, "num_cuda_devices", lambda: 1)
    for name in ("LOCAL_RANK", "NODE_RANK"):
        monkeypatch.setenv(name, "0")  # a rank sets its own
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)


@pytest.fixture(params=["1", "0"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The back end that NCCL leaves to ranks that share a GPU; None for the default, NCCL."""
    monkeypatch.setenv(SHARING_VARIABLE, request.param)
    return None if request.param == "1" else "gloo"


def seat(local_rank: int, ranks: int) -> Seat:
    where = placement(ranks, environment={})
    return Seat(placement=where, local_rank=local_rank)


def strategy_of(given: Contender, local_rank: int = 1, ranks: int = 2) -> ParallelStrategy:
    plan = StrategyPlan(
        subject=Subject("mlp", BenchMLP, 1), device_type="cuda", repetitions=1, steps=1, warm_up=0, timeout_s=1.0
    )
    return make_trainer(given, plan, ranks, seat(local_rank, ranks), []).strategy  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["ddp", "ring_ddp", "pipeline_1f1b"])
def test_strategies_were_refused(name: str, backend: str | None) -> None:
    strategy = strategy_of(contender(name))
    assert strategy.parallel_devices == [GPU, GPU]
    assert strategy.root_device == GPU
    assert strategy.process_group_backend == backend  # type: ignore[attr-defined]


@pytest.mark.usefixtures("backend")
def test_a_back_end_that_the_user_has_chosen() -> None:
    strategy = strategy_of(contender("ring_ddp:process_group_backend=gloo"))
    assert strategy.process_group_backend == "gloo"  # type: ignore[attr-defined]


def test_one_rank_has_the_gpu_for_itself() -> None:
    strategy = strategy_of(contender("ddp"), 0, 1)
    assert strategy.root_device == GPU
    assert strategy.process_group_backend is None  # type: ignore[attr-defined]


def test_ranks_take_gpus_in_turn() -> None:
    assert [device.index for device in rank_devices("cuda", 5, 2)] == [0, 1, 0, 1, 0]
    assert {device.type for device in rank_devices("cpu", 5, 0)} == {"cpu"}


def test_the_output_says_that_ranks_share() -> None:
    head = header(placement(3, environment={}), threads=1, device_type="cuda", command="bench")
    assert head["note"] == sharing_note(3, 1)
    assert header_lines(head)[-1] == (
        "# 3 ranks share 1 GPU, its time and its memory: these times are no forecast of ranks with a GPU each"
    )
    assert header(placement(1, environment={}), threads=1, device_type="cuda", command="")["note"] is None
    assert header(placement(3, environment={}), threads=1, device_type="cpu", command="")["note"] is None


def test_nccl_that_refuses_says_why() -> None:
    """Its own message, of an invalid usage, named no reason."""
    with pytest.raises(RuntimeError, match=r"share a GPU over NCCL from version 2\.31 on, where \w+=1 is set"):
        group_of("nccl", [GPU, GPU], GPU, timedelta(seconds=1))
