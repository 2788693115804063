"""Faults that need a run of their own kind: the profile names it first, or nothing is wrong.

How large a fault must be is in planning/test_diagnosis.py. What only a GPU can have is made from the trace of one:
``launch-bound`` was never seen on a CPU, where operators are not queued.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_multigpu.callbacks import ProfilerReport, probes
from lightning_multigpu.callbacks.profile.operator_trace import OperatorTrace
from lightning_multigpu.engine.parameter_server.rooms import Room
from lightning_multigpu.engine.pipeline.stages.stage_messages import HostMessages
from lightning_multigpu.report.profile import profile_text
from tests.report.profiles import built, loaded, told
from tests.strategies.tasks import make_strategy
from tests.world import World

STEPS = 40


class Net(L.LightningModule):
    """Linear layers; a step sleeps for ``step_s``, so that nothing else takes a part of it that counts."""

    def __init__(self, width: int = 4, num_layers: int = 1, step_s: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
        self.step_s = step_s

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.step_s:  # a sleep of 0 s gives the core away
            time.sleep(self.step_s)
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def profile_of(module: L.LightningModule, batch: Tensor, strategy: Any = "auto", *, max_steps: int = STEPS) -> Any:
    """The profile on rank 0; None elsewhere. Batches lie ready."""
    report = ProfilerReport(wait=2, warmup=1, active=max_steps - 5, print_report=False, write_files=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=1 if strategy == "auto" else 2, strategy=strategy, max_steps=max_steps,
        max_epochs=-1, logger=False, enable_checkpointing=False, callbacks=[report], enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader([batch] * max_steps, batch_size=None))  # type: ignore[arg-type]
    return report.profile


def first(profile: Any) -> dict[str, Any]:
    assert profile["findings"], profile_text.text(loaded(profile))
    found: dict[str, Any] = profile["findings"][0]
    return found


def test_small_batches() -> None:
    samples, width = 32, 128
    profile = profile_of(Net(width), torch.ones(samples, width))
    found = first(profile)
    assert found["kind"] == "small batches", profile_text.text(loaded(profile))
    assert "Lightning's loop takes" in found["evidence"]
    assert "Use larger batches" in found["remedy"]
    assert profile_of(Net(width, step_s=0.1), torch.ones(samples, width), max_steps=12)["findings"] == []


def test_small_micro_batches(world2: World) -> None:
    """Each message costs 160 ms / ``num_micro_batches``, more than all else that a loaded machine adds to a step."""
    num_micro_batches = 8

    def fit() -> Any:
        send = HostMessages.send

        def slowly(messages: HostMessages, *args: Any) -> Any:
            time.sleep(0.16 / num_micro_batches)
            return send(messages, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostMessages, "send", slowly)
            strategy = make_strategy("gpipe", num_micro_batches=num_micro_batches)
            return profile_of(Net(4, 2), torch.ones(num_micro_batches, 4), strategy, max_steps=12)

    profile, _ = world2.run(fit)
    found = first(profile)
    assert found["kind"] == "small micro-batches", profile_text.text(loaded(profile))
    assert f"the passes of {num_micro_batches} micro-batches explain" in found["evidence"]
    assert "batches of twice the size" in found["remedy"]


def test_a_server_with_everything(world2: World) -> None:
    """Half as many bytes would save half of the wait, and even shares 2/3 of it."""

    def fit(optimizer_split: str | None) -> Any:
        push = Room.push

        def slowly(room: Room, *, is_whole: bool) -> None:
            time.sleep(0.1)
            push(room, is_whole=is_whole)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Room, "push", slowly)
            strategy = make_strategy("sync_ps", num_servers=3, optimizer_split=optimizer_split)
            return profile_of(Net(128, 4), torch.ones(2, 128), strategy, max_steps=8)

    profile, _ = world2.run(lambda: fit("nothing"))
    found = first(profile)
    assert found["kind"] == "imbalance of shards", profile_text.text(loaded(profile))
    assert "server 0 moves 100 % of the bytes, 3.00 times its share" in found["evidence"]
    assert 'Leave optimizer_split="nothing" out' in found["remedy"]
    even, _ = world2.run(lambda: fit(None))
    assert "imbalance of shards" not in [finding["kind"] for finding in even["findings"]]


def test_memory_near_the_limit_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of control groups are the kernel's way to say it; these have the memory that the host has in use."""

    def limited(share: float) -> None:
        used_bytes = psutil.virtual_memory().total // 10
        group = tmp_path / "groups" / "job"
        group.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup").write_text("0::/job\n")
        (group / "memory.max").write_text(f"{round(used_bytes / share)}\n")
        (group / "memory.current").write_text(f"{used_bytes + 1000}\n")
        (group / "memory.stat").write_text("inactive_file 1000\n")

    monkeypatch.setattr(probes.host_memory, "__defaults__", (tmp_path / "cgroup", tmp_path / "groups"))
    limited(0.91)
    profile = profile_of(Net(step_s=0.1), torch.ones(2, 4), max_steps=12)
    [found] = profile["findings"]
    assert (found["kind"], found["saving_s"]) == ("memory near the limit", 0.0)
    assert "the container of rank 0" in found["evidence"]
    assert "Use smaller batches" in found["remedy"]
    assert "Memory near the limit:" in profile_text.text(loaded(profile))
    limited(0.85)
    assert profile_of(Net(step_s=0.1), torch.ones(2, 4), max_steps=12)["findings"] == []


def test_a_gpu_that_waits_for_launches() -> None:
    """The trace of a step of 900 launches, 100 us apart, whose kernels take less time than that; and one of more."""

    def profile(kernel_us: float) -> dict[str, Any]:
        written = []
        for number in range(900):
            launched_us, free_us = 100.0 * number, kernel_us * number
            for name, category, start_us, length_us in (
                ("cudaLaunchKernel", "cuda_runtime", launched_us, 3.0),
                ("gemm", "kernel", max(launched_us + 5, free_us), kernel_us),
            ):
                event = {"ph": "X", "name": name, "cat": category, "tid": category, "ts": start_us, "dur": length_us}
                written.append({**event, "args": {"correlation": number}})
        trace = OperatorTrace(time.perf_counter)
        trace._read(written, 12, 0.0)
        assert trace.launches is not None
        rank = told(0, data_wait=0.0, forward=0.03, backward=0.055, optimizer=0.005, communication=0.0)
        rank["launches"] = vars(trace.launches)
        return built([rank], "ring_ddp")

    found = first(profile(40))
    assert found["kind"] == "launch-bound"
    assert found["saving_s"] == pytest.approx(0.09 - 900e-6 * 40)
    assert "launches 900 kernels and is not ahead of the GPU" in found["evidence"]
    assert "layer.compile()" in found["remedy"]
    assert profile(130)["findings"] == [], "the host is ahead"
