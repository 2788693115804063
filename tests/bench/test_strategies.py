"""``bench strategies`` as a user runs it, the turns of a rank, and the arithmetic of the table."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.bench.strategies.contenders import NO_COMMUNICATION, contender
from lightning_multigpu.bench.strategies.models import BenchGPT, BenchMLP, repeated
from lightning_multigpu.bench.strategies.strategy_rank import Taken, TakesTurns
from lightning_multigpu.bench.strategies.strategy_run import StrategyResult
from lightning_multigpu.cli import main
from lightning_multigpu.commands.benches import bench_strategies
from lightning_multigpu.commands.benches.bench_strategies import as_json, lines
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.planning.pipelines.timeline import NOTHING
from lightning_multigpu.report.statistics import Spread
from lightning_multigpu.strategies.run_view import RunView
from tests.bench.models import Tiny
from tests.callbacks.training import trainer

QUICK = ("--repetitions=3", "--steps=2", "--warm-up=1")


def bench(tmp_path: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    path = tmp_path / "results.json"
    assert main(["bench", "strategies", *QUICK, *arguments, f"--json={path}"]) == status
    document = json.loads(path.read_text())
    assert isinstance(document, dict)
    return document


def test_strategies_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_strategies, "MODELS", {"tiny": "tests.bench.models.Tiny"})
    names = ["ddp", "ring_ddp:bucket_cap_mb=1", "tests.bench.models.BreaksOnRankOne", "dp"]
    document = bench(tmp_path, "--model=tiny", "--strategies", *names, status=1)
    assert document["settings"] == {
        **{"model": "tiny", "parameters": 2, "batch_size": 3, "baseline": "ddp"},
        **{"repetitions": 3, "steps": 2, "warm_up": 1, "timeout_s": 120.0},
    }
    rows = {row["strategy"]: row for row in document["results"]}
    assert list(rows) == [NO_COMMUNICATION, *names]
    broken = rows.pop(names[2])
    assert (broken["status"], broken["step_ms"], broken["ratio"]) == ("failed", None, None)
    assert broken["reason"] == "rank 1: RuntimeError: planted"
    one_process = rows.pop("dp")
    [step_ms] = one_process["rank_median_step_ms"]
    assert one_process["samples_per_s"] == pytest.approx(2 * 3 / (step_ms / 1e3)), "3 samples on each of 2 devices"
    assert one_process["metered"]["total_ms"] > 0
    silent, base = rows[NO_COMMUNICATION]["step_ms"]["median"], rows["ddp"]["step_ms"]["median"]
    for name, row in rows.items():
        step = row["step_ms"]
        assert (row["status"], step["count"]) == ("ok", 3 * 2), "repetitions times steps, on one rank"
        assert 0 < step["min"] <= step["median"] <= step["max"]
        assert step["median"] == max(row["rank_median_step_ms"])
        assert len(row["rank_median_step_ms"]) == 2
        assert row["ratio"] == pytest.approx(step["median"] / base)
        assert row["samples_per_s"] == pytest.approx(sum(3 / (ms / 1e3) for ms in row["rank_median_step_ms"]))
        if name != NO_COMMUNICATION:
            assert row["communication_cost_ms"] == pytest.approx(max(0, step["median"] - silent))
    assert rows["ddp"]["ratio"] == 1
    assert rows["ddp"]["metered"] is rows[NO_COMMUNICATION]["metered"] is None
    metered = rows["ring_ddp:bucket_cap_mb=1"]["metered"]
    # 2(N-1)/N of two float32, and the message about the next batch and a stop.
    assert metered["sent_bytes"] == 2 * 4 + 2 * 64
    assert metered["total_ms"] > 0
    assert "failed: rank 1: RuntimeError: planted" in capsys.readouterr().out


CONFIG = """
trainer: {precision: 64-true, max_epochs: 3}
model: {class_path: tests.bench.models.OwnModel, init_args: {width: 3}}
data: tests.bench.models.OwnData
"""


def test_a_users_own_model_and_data_could_not_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They had to add ``example_batch`` to their module first, and to guess how long it took, and where files went.

    Epochs of 2 batches a rank end within the turns. Under async_ps rank 0 waited there for a sleeping rank. Samples of
    a loader were not counted, so that dp, which divides a batch of 2 among 2 devices, seemed twice as fast as it was.
    """
    config = tmp_path / "mine.yaml"
    config.write_text(CONFIG)
    document = bench(tmp_path, f"--config={config}", "--strategies", "async_ps", "dp", "--timeout=30")
    settings = [document["settings"][name] for name in ("model", "parameters", "batch_size", "baseline")]
    assert settings == ["OwnModel", 6, 0, "async_ps"]
    assert [row["step_ms"]["count"] for row in document["results"]] == [6] * 3
    silent, base, dp = ({**row, "ms": row["rank_median_step_ms"]} for row in document["results"])
    for row, samples in ((silent, 2), (base, 2), (dp, 2)):
        assert row["samples_per_s"] == pytest.approx(sum(samples / (ms / 1e3) for ms in row["ms"]))
    assert dp["ratio"] == pytest.approx(2 * dp["step_ms"]["median"] / base["step_ms"]["median"])
    cost_ms = dp["step_ms"]["median"] - silent["step_ms"]["median"] / 2
    assert dp["communication_cost_ms"] == pytest.approx(max(0, cost_ms))
    assert f"--config={config}" in document["command"]
    captured = capsys.readouterr()
    assert f"# written to {tmp_path / 'results.json'}" in captured.out
    assert "\r" not in captured.err, "the bar is for terminals"


class FakeRequests:
    """Two turns; notes how often the model had trained when each was asked for."""

    def __init__(self, model: "Counting") -> None:
        self._model = model
        self.trained: list[int] = []
        self.answers: list[Taken] = []

    def next(self) -> bool | None:
        self.trained.append(self._model.steps)
        return True if len(self.trained) < 3 else None

    def answer(self, value: dict[str, Any]) -> None:
        self.answers.append(Taken(**value))


class Counting(Tiny):
    """Counts its steps; every step takes one second more on a clock that nothing else moves."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.now_s = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        self.now_s += self.steps
        return super().training_step(batch, batch_idx)


class TestTurns:
    @pytest.fixture
    def model(self, monkeypatch: pytest.MonkeyPatch) -> Counting:
        model = Counting()
        clock = "lightning_multigpu.communication.metering.clocks.HostClock.mark"
        monkeypatch.setattr(clock, lambda timeline, after=None: model.now_s)
        return model

    def test_steps_after_the_warm_up_are_timed_and_metered_and_in_between_it_stands_still(
        self, tmp_path: Path, model: Counting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        meter = Meter(clock=lambda: model.now_s)

        def step(batch: Tensor, batch_idx: int) -> Tensor:
            with meter.blocking("all_reduce", group="data", group_size=2, size_bytes=1000 * (model.steps + 1)):
                loss = Counting.training_step(model, batch, batch_idx)
            meter.end_step()
            return loss

        view = RunView(meter=meter, held_bytes=lambda: NOTHING)
        monkeypatch.setattr("lightning_multigpu.bench.strategies.strategy_rank.view_of", lambda trainer: view)
        monkeypatch.setattr(model, "training_step", step)
        requests: Any = FakeRequests(model)
        fit = trainer(tmp_path, max_epochs=-1, callbacks=[TakesTurns(requests, warm_up=1, steps=2, batch_size=7)])
        fit.fit(model, repeated(torch.ones(3, 2), 3, 20, 1))
        assert requests.trained == [0, 3, 6], "the fit went on while it was not its turn"
        first, second = requests.answers
        assert (first.seconds, second.seconds) == ([2.0, 3.0], [5.0, 6.0])
        assert (first.parameters, first.samples) == (2, 7)
        assert first.metered == {"total_ms": 2500.0, "hidden_ms": 0.0, "exposed_ms": 2500.0, "sent_bytes": 2500.0}
        assert second.metered == {"total_ms": 5500.0, "hidden_ms": 0.0, "exposed_ms": 5500.0, "sent_bytes": 5500.0}


class TestNames:
    def test_registered_names_and_classes_with_options(self) -> None:
        texts = ("ring_ddp:bucket_cap_mb=4,static_graph=true", "lightning_multigpu.RingDDPStrategy:bucket_cap_mb=2.5")
        plain, ours, path = map(contender, ("ddp", *texts))
        assert isinstance(plain.make(), DDPStrategy)
        assert not isinstance(plain.make(), RingDDPStrategy)
        made = ours.make()
        assert isinstance(made, RingDDPStrategy)
        assert (made.options["bucket_cap_mb"], made.options["static_graph"]) == (4, True)
        assert path.make().options["bucket_cap_mb"] == 2.5  # type: ignore[attr-defined]

    def test_commas_within_brackets_are_the_values(self) -> None:
        found = contender("gpipe:balance=[1, 7],num_micro_batches=2")
        assert (found.options["balance"], found.options["num_micro_batches"]) == ([1, 7], 2)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("ring_dpd", "Did you mean 'ring_ddp'?"),
            ("ring_ddp:bucket_cap=4", "RingDDPStrategy has no option 'bucket_cap'. Did you mean 'bucket_cap_mb'?"),
            ("ring_ddp:bucket_cap_mb=-1", "bucket_cap_mb=-1"),
            ("ring_ddp:bucket_cap_mb=much", "bucket_cap_mb='much' is not a number; pass a number above 0"),
            ("ring_ddp:bucket_cap_mb", "'bucket_cap_mb' is no option=value; write ring_ddp:bucket_cap_mb=4"),
            ("ring_ddp_spawn", "pass the strategy's name without that ending"),
            ("lightning_multigpu.RingDPStrategy", "is no Strategy of Lightning"),
            ("tests.bench.models.Tiny", "is no Strategy of Lightning"),
        ],
    )
    def test_wrong_ones_are_refused(self, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=r".") as raised:
            contender(text)
        assert message in str(raised.value)


class TestModels:
    @pytest.mark.parametrize("model_class", [BenchMLP, BenchGPT])
    def test_about_6_million_parameters_that_train(self, model_class: type[BenchMLP | BenchGPT]) -> None:
        model = model_class()
        assert 6.2e6 < sum(parameter.numel() for parameter in model.parameters()) < 6.6e6
        model.training_step(model.example_batch(2), 0).backward()  # type: ignore[arg-type]
        assert all(parameter.grad is not None for parameter in model.parameters())


class TestTable:
    ROWS = (
        StrategyResult(label=NO_COMMUNICATION, step_s=Spread(0.050, 0.04, 0.06, 0.03, 0.07, 6)),
        StrategyResult(label="ddp", step_s=Spread(0.090, 0.08, 0.10, 0.07, 0.2, 6)),
        StrategyResult(
            label="ring_ddp",
            step_s=Spread(0.060, 0.05, 0.07, 0.04, 0.1, 6),
            metered={"total_ms": 12.0, "hidden_ms": 9.0, "exposed_ms": 3.0, "sent_bytes": 25.2e6},
            samples_per_s=6400 / 3,
        ),
        StrategyResult(label="fsdp", reason="why"),
    )

    def test_ratios_are_to_the_baseline_and_costs_to_silence(self) -> None:
        *_, silent, _, ring, failed = lines(as_json(self.ROWS, "ddp"))
        assert silent.split() == ["no", "communication", *"50.00 40.00 60.00 0.56 - - - - - - -".split()]  # noqa: SIM905
        assert ring.split() == "ring_ddp 60.00 50.00 70.00 0.67 10.00 0.25 12.00 9.00 3.00 25.20 2133.33".split()  # noqa: SIM905
        assert failed.split() == ["fsdp", "failed:", "why"]

    def test_steps_of_other_numbers_of_samples(self) -> None:
        """A pipeline's step was set against steps of twice the samples: 0.56 of ddp at a cost of -22.85 ms."""
        samples = zip(self.ROWS, (4, 4, 2, 0), strict=True)
        rows = [replace(row, samples=number) for row, number in samples]
        _, ddp, pipeline, _ = as_json(rows, "ddp")
        assert pipeline["ratio"] == pytest.approx(60 / 45)
        assert pipeline["communication_cost_ms"] == pytest.approx(60 - 25)
        assert pipeline["communication_cost_ratio"] == pytest.approx(35 / 20)
        assert (ddp["ratio"], ddp["communication_cost_ms"]) == (1.0, pytest.approx(40))

    def test_a_cost_below_0_is_noise(self) -> None:
        rows = [replace(self.ROWS[2], label=NO_COMMUNICATION), self.ROWS[0], self.ROWS[1]]
        rows[1] = replace(rows[1], label="dp")
        dp = as_json(rows, "ddp")[1]
        assert (dp["communication_cost_ms"], dp["communication_cost_ratio"]) == (0, 0)
