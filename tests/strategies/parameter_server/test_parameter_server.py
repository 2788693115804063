"""Optimizers on the host and on servers: what they do beyond the contract of every strategy."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from torch import Tensor, nn

from lightning_multigpu import ParameterServerStrategy
from lightning_multigpu.callbacks import CommunicationMonitor, RunReport, ThroughputMonitor
from lightning_multigpu.job import failure_watch
from lightning_multigpu.strategies.parameter_server.cpu_parameter_server import CPUParameterServerStrategy
from tests.modules import Normalised
from tests.report.examples import assert_follows_schema
from tests.strategies.tasks import Case, Classifier, assert_trains_alike, dataset, fit_module, state
from tests.world import World

PARAMETER_BYTES = (16 * 6 + 16 + 3 * 16 + 3) * 8
CASE = Case(optimizer="adamw", max_epochs=1)


both = pytest.mark.parametrize("name", ["cpu_ps", "sync_ps"])


def fit(module: L.LightningModule, name: str | None, case: Case = CASE, **options: Any) -> L.Trainer:
    return fit_module(module, name, 1 if name is None else 2, case, **options)


def traffic(name: str) -> list[dict[Any, Any]]:
    trainer = fit(Classifier("adamw"), name, callbacks=[CommunicationMonitor()])
    strategy: Any = trainer.strategy
    strategy.meter.flush()
    assert trainer.callback_metrics["parameter_server/push_ms"] > 0
    assert trainer.callback_metrics["parameter_server/pull_ms"] > 0
    return [
        {(t.operation, t.group): (t.size_bytes, t.sent_bytes, t.memory_bytes) for t in step.operations}
        for step in strategy.meter.steps
    ]


@pytest.mark.parametrize(("name", "group"), [("cpu_ps", "host"), ("sharded_ps", "servers")])
def test_gradients_and_weights_travel_once_a_step_and_over_no_socket(world2: World, name: str, group: str) -> None:
    for steps in world2.run(traffic, name):
        for operations in steps[1:]:
            assert operations.pop(("push", group)) == (PARAMETER_BYTES, PARAMETER_BYTES, PARAMETER_BYTES)
            assert operations.pop(("pull", group)) == (PARAMETER_BYTES, 0, 0)
            # What is left are the few bytes by which ranks agree on a batch, on the end of training and on what is
            # logged: a row of 64 bytes a rank for each of these. The small model's gradients are more than all of them.
            assert sum(sent for _, sent, _ in operations.values()) < PARAMETER_BYTES


def told_of_servers(name: str, directory: str) -> dict[str, Any]:
    report = RunReport()
    callbacks: list[Callback] = [ThroughputMonitor(), CommunicationMonitor(), report]
    trainer = fit(Classifier("adamw"), name, callbacks=callbacks, log_every_n_steps=2, default_root_dir=directory)
    return {"report": report.report, "logged": {key: float(value) for key, value in trainer.callback_metrics.items()}}


@pytest.mark.parametrize("name", ["sharded_ps", "async_ps"])
def test_figures_of_the_servers_are_logged_and_reported(world2: World, tmp_path: Path, name: str) -> None:
    """Under async_ps rank 1 failed at the end of a fit with a RunReport, and rank 0 reported itself alone."""
    first, second = world2.run(told_of_servers, name, str(tmp_path))
    report, logged = first["report"], first["logged"]
    assert_follows_schema(report)
    assert json.loads((tmp_path / "multigpu_report.json").read_text()) == report
    held = {"parameters_bytes": PARAMETER_BYTES, "gradients_bytes": PARAMETER_BYTES, "optimizer_bytes": 0}
    assert report["memory"] == [{"rank": rank, **held} for rank in range(2)], "states are on the servers"
    servers, workers = report["parameter_servers"]["servers"], report["parameter_servers"]["workers"]
    assert sum(server["weights_bytes"] for server in servers) == PARAMETER_BYTES
    parts = [rank["metrics"]["throughput/samples_per_sec"]["mean"] for rank in report["ranks"]]
    assert report["aggregate"]["metrics"]["throughput/samples_per_sec"]["mean"] == pytest.approx(sum(parts))
    if name == "async_ps":
        assert len(servers) == 1
        assert [worker["rank"] for worker in workers] == [0, 1]
        assert sum(worker["updates"] for worker in workers) == report["steps"]
        assert logged["parameter_server/staleness_median"] <= logged["parameter_server/staleness_p95"]
        assert logged["parameter_server/staleness_p95"] <= logged["parameter_server/staleness_max"]
        assert second["report"] is None
    else:
        assert len(servers) == 2
        assert workers == []
        assert second["report"] == report


def statistics(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's mean of its batches, and the buffers at the end."""
    module, own = Normalised(), torch.zeros(6, dtype=torch.float64)

    def see(_: Any, inputs: tuple[Tensor, ...]) -> None:
        own.mul_(0.9).add_(0.1 * inputs[0].mean(0))

    module.normalise.register_forward_pre_hook(see)
    fit(module, name)
    return own, dict(module.normalise.named_buffers())


@both
def test_statistics_of_the_ranks_are_averaged_at_the_end(world2: World, name: str) -> None:
    (first, buffers), (second, others) = world2.run(statistics, name)
    torch.testing.assert_close(buffers["running_mean"], (first + second) / 2, rtol=1e-9, atol=1e-12)
    assert torch.equal(buffers["running_mean"], others["running_mean"])
    assert buffers["num_batches_tracked"] == 7


def test_one_device_trains_with_its_optimizer_elsewhere() -> None:
    case = replace(CASE, max_epochs=2, trainer={"gradient_clip_val": 0.1})
    with contextlib.closing(World(1)) as world:
        assert_trains_alike(world, lambda: Classifier("adamw"), ("cpu_ps", "sync_ps", "async_ps"), case)


def test_several_hosts_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"num_nodes=2: cpu_ps trains on the devices of one host.*'sync_ps'"):
        L.Trainer(strategy="cpu_ps", num_nodes=2, devices=2, accelerator="cpu", logger=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_servers": 0}, "num_servers="),
        ({"num_servers": "node"}, "num_servers="),
        ({"servers": ["10.0.0.5:7000"]}, "servers="),
        ({"mode": "asynchronous"}, "mode='asynchronous' is not one of the choices"),
        ({"max_staleness": 3}, "max_staleness=3: with mode='sync' no gradients are stale"),
        ({"mode": "async", "max_staleness": -1}, "max_staleness=-1"),
        ({"mode": "async", "uneven_inputs": "join"}, "uneven_inputs='join': with mode='async' no rank waits"),
        ({"mode": "async", "check_replicas_every_n_steps": 5}, "check_replicas_every_n_steps=5: with mode='async'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParameterServerStrategy(**options)


class Fails(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and not self.trainer.strategy.is_global_zero:
            raise ValueError("the second rank is spoilt")


@both
@pytest.mark.filterwarnings("ignore:.*is not written")
def test_the_rank_that_fails_is_named_and_not_the_server(world2: World, name: str) -> None:
    """A checkpoint at the exception would read states that are lost, and hide it."""
    # The second rank waits for a third of the time whether the first one raises the same.
    case, words = replace(CASE, strategy={"failure_timeout_s": 6.0}), "the second rank is spoilt"
    saves = LambdaCallback(on_exception=lambda trainer, *_: trainer.save_checkpoint("never.ckpt"))
    for error in world2.run_raising(ValueError, words, lambda: fit(Fails(), name, case, callbacks=[saves])):
        assert "rank 1" in "".join(error.__notes__)


class Interrupted(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if batch_idx == 3 and strategy.is_global_zero:
            strategy._processes[0]._process.kill()


def test_a_server_that_is_killed_ends_the_run_and_is_named(world2: World) -> None:
    def interrupted() -> None:
        with mock.patch.object(failure_watch, "_SETTLE_S", 0.5):  # for a rank that knows the cause
            fit(Interrupted(), "sync_ps")

    words = r"parameter server 0 of 1 \(127.0.0.1\) has ended"
    world2.run_raising(RuntimeError, words, interrupted)


def in_16_bits(name: str | None, precision: str, optimizer: str) -> dict[str, Any]:
    module, (x, y) = Classifier(optimizer), dataset(CASE.num_samples).tensors
    before = nn.functional.cross_entropy(module(x), y)
    fit(module, name, Case(optimizer=optimizer, precision=precision, max_epochs=3), gradient_clip_val=1.0)
    weights = state(module)
    after = nn.functional.cross_entropy(module.float()(x), y)
    return {"weights": weights, "loss": (after / before).item()}


# The last digit of a weight of 2 is worth 2^-6 in bfloat16 and 2^-9 in float16: four times that after 21 steps. AdamW
# does not train in float16 on one device either: its eps of 1e-8 is 0 there.
@pytest.mark.parametrize(
    ("precision", "optimizer", "difference"), [("bf16-true", "adamw", 2**-4), ("16-true", "sgd", 2**-7)]
)
def test_weights_of_16_bits_are_updated_as_on_one_device(
    world2: World, precision: str, optimizer: str, difference: float
) -> None:
    reference = in_16_bits(None, precision, optimizer)["weights"]
    for name in ("cpu_ps", "sync_ps"):
        for result in world2.run(in_16_bits, name, precision, optimizer):
            for key, value in reference.items():
                torch.testing.assert_close(result["weights"][key], value, rtol=0, atol=difference)
    for result in world2.run(in_16_bits, "async_ps", precision, optimizer):
        assert result["weights"]["layers.0.weight"].dtype == reference["layers.0.weight"].dtype
        assert result["loss"] < 0.5


class _CUDA:
    """Locks each range of memory, or refuses; an error stays until a launch finds it."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.locked: list[int] = []
        self.left_error = False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  # the name in CUDA
        self.left_error = self.status != 0
        self.locked += [] if self.status else [address]
        return self.status

    def launch(self, *_: Any, **__: Any) -> Any:
        if self.left_error:
            self.left_error = False
            raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")
        return torch.zeros(())


def _strategy(cuda: _CUDA, monkeypatch: pytest.MonkeyPatch, *, moves: bool) -> Any:
    strategy: Any = CPUParameterServerStrategy(parallel_devices=[torch.device("cuda", 0)] * 2)
    strategy.cluster_environment = SimpleNamespace(local_rank=lambda: 0, global_rank=lambda: 0, node_rank=lambda: 0)
    strategy._ranks = SimpleNamespace(world_size=2, move=lambda flat, key: None, has_moved=lambda flat: moves)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
    monkeypatch.setattr(torch, "ones", cuda.launch)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    return strategy


def test_only_memory_that_ranks_share_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other memory is torch's own: two small tensors of the heap lie in one page, which CUDA locks once."""
    cuda = _CUDA(0)
    shared = _strategy(cuda, monkeypatch, moves=True)._reserve(8, torch.float32)
    assert cuda.locked == [shared.data_ptr()]
    _strategy(cuda, monkeypatch, moves=False)._reserve(8, torch.float32)
    assert cuda.locked == [shared.data_ptr()]


def test_memory_that_cannot_be_locked_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _CUDA(712)
    strategy = _strategy(cuda, monkeypatch, moves=True)
    with pytest.warns(UserWarning, match=r"cannot be locked \(ulimit -l\)"):
        strategy._reserve(8, torch.float32)
    assert not cuda.left_error, "the next kernel of the user's step would have raised it"
    strategy._undo.close()  # there is nothing to unlock
