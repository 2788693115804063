"""Planner: predictions of step time and memory, written down first, and then measured.

::

    python -m benchmarks.planner --folder runs/planner

calibrates one host with 2 ranks, and 2 emulated hosts at three bandwidths. Then for each model and world it measures
the model alone, writes down what it predicts, and trains the model under each strategy in turn. No model here is one of
the calibration's three. In a few minutes, on models on which no formula was chosen:

    python -m benchmarks.planner --models "cnn 0.5 M" "lstm 2 M" --worlds 1x2 1gbit:2x1 --repetitions 1
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.heading import heading
from benchmarks.planner_models import ConvNet, LanguageLSTM
from lightning_multigpu.bench.jobs.host_agents import HostAgents
from lightning_multigpu.bench.jobs.placement import placement
from lightning_multigpu.bench.strategies.contenders import NO_COMMUNICATION, Contender, contender
from lightning_multigpu.bench.strategies.models import BenchGPT, BenchMLP, Subject, repeated
from lightning_multigpu.bench.strategies.strategy_rank import StrategyPlan
from lightning_multigpu.bench.strategies.strategy_run import StrategyRun, take_turns
from lightning_multigpu.commands.calibrate import read
from lightning_multigpu.commands.plans.measured_model import PlannedModule, measured_model
from lightning_multigpu.commands.plans.scaling_cli import strategy_of
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.training_memory import SavedActivations, measured_bytes
from lightning_multigpu.planning.scaling.machine import Machine, World
from lightning_multigpu.planning.scaling.model_profile import ModelProfile
from lightning_multigpu.planning.scaling.step_model import Candidate, ImpossibleError, predict

MODELS: dict[str, tuple[Any, int]] = {
    "mlp 3 M": (partial(BenchMLP, width=768, num_layers=5), 48),
    "mlp 7 M": (partial(BenchMLP, width=1280, num_layers=4), 96),
    "mlp 16 M": (partial(BenchMLP, width=2048, num_layers=4), 32),
    "gpt 1 M": (partial(BenchGPT, width=128, num_layers=4), 8),
    "gpt 3 M": (partial(BenchGPT, width=192, num_layers=6), 4),
    "gpt 8 M": (partial(BenchGPT, width=320, num_layers=6, num_heads=5), 4),
    "cnn 0.5 M": (partial(ConvNet, width=40), 32),
    "lstm 2 M": (partial(LanguageLSTM, width=256), 16),
}
BANDWIDTHS = {"200mbit": "16kb", "1gbit": "64kb", "10gbit": "64kb"}
"""Of the emulated links, and what passes at once after a pause: less than a millisecond; on real links nothing does."""
ACCUMULATED = 4
ONE_HOST = (
    *("ring_ddp", "ring_ddp:bucket_cap_mb=2", "ring_ddp x4", "ft_ddp", "ddp_sharded", "cpu_ps", "sharded_ps"),
    *("gpipe:num_micro_batches=4", "pipeline_1f1b:num_micro_batches=4", "tensor_split"),
)
HOSTS = (
    *("ring_ddp", "ring_ddp:bucket_cap_mb=1", "ring_ddp x4", "ring_ddp:compression=int8", "ring_ddp:compression=bf16"),
    *("ft_ddp", "ddp_sharded", "sharded_ps", "pipeline_1f1b:num_micro_batches=4", "tensor_split"),
)
WORLDS = [("", World(1, 2))] + [(bandwidth, World(2, 1)) for bandwidth in BANDWIDTHS]
"""On two cores; of more ranks than cores plans say nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, default=Path("runs/planner"))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--worlds", nargs="+", help="such as 1x2 1gbit:2x1; all by default")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="calibrate again where the folder has files")
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "NODES"), help=argparse.SUPPRESS)
    parser.add_argument("--picture", type=Path, help="draw measured over predicted steps there")
    parser.add_argument("--table", action="store_true", help="only print the table of the folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        model, nodes = options.measure
        rows = _measured(model, World(int(nodes), 1), options.repetitions)
        if rows is not None:
            (options.folder / "rows.json").write_text(json.dumps(rows))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.table:
        worlds = [each for each in WORLDS if not options.worlds or _label(*each) in options.worlds]
        machines = _calibrated(options.folder, worlds, again=options.again)
        for model in options.models:
            _one_model(model, worlds, machines, options)
    done = _report(options.folder)
    if options.picture:
        _draw(done, options.picture)


def _draw(done: list[dict[str, Any]], path: Path) -> None:
    """Measured over predicted steps, both in logarithms, with lines of 10 % on both sides."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xscale="log", yscale="log", xlabel="predicted step, ms", ylabel="measured step, ms")
    for world in dict.fromkeys(row["world"] for row in done):
        own = [row for row in done if row["world"] == world]
        predicted_ms = [1e3 * row["step_s"] for row in own]
        axes.plot(predicted_ms, [1e3 * row["measured"]["step_s"] for row in own], "o", markersize=4, label=world)
    ends = axes.get_xlim()
    for factor, style in ((1.0, "k-"), (1.1, "k:"), (1 / 1.1, "k:")):
        axes.plot(ends, [factor * end for end in ends], style, linewidth=1)
    axes.legend(fontsize="small", title="hosts x ranks")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _label(bandwidth: str, world: World) -> str:
    return f"{bandwidth}:{world.nodes}x{world.devices}".lstrip(":")


def _one_model(
    name: str, worlds: list[tuple[str, World]], machines: dict[str, Machine], options: argparse.Namespace
) -> None:
    """For each world: measures the model alone, predicts, writes the predictions down, and measures the steps."""
    path = options.folder / f"{name.replace(' ', '_')}.json"
    cases: list[dict[str, Any]] = []
    for bandwidth, world in worlds:
        begin_s = time.monotonic()
        profile = _profile(name, world)
        own = _predicted(profile, machines[bandwidth], bandwidth, world)
        cases += own
        path.write_text(json.dumps(cases, indent=1))
        rows = _measured_apart(name, bandwidth, world, options)
        machine = machines[bandwidth]
        pace = rows[NO_COMMUNICATION]["mean_s"] / profile.phases_of(machine.crowd(world)).step_s
        again = _predicted(_at_pace(profile, pace), machine, bandwidth, world)
        for case, paced in zip(own, again, strict=True):
            case["measured"], case["paced_s"] = rows[case["strategy"]], paced.get("step_s")
        path.write_text(json.dumps(cases, indent=1))
        print(f"{name}, {_label(bandwidth, world)}: {time.monotonic() - begin_s:.0f} s", file=sys.stderr, flush=True)


def _at_pace(profile: ModelProfile, factor: float) -> ModelProfile:
    """The profile with steps ``factor`` times as long: as the machine has them later."""

    splits = {size: replace(part, phases=part.phases.times(factor)) for size, part in profile.splits.items()}
    return replace(profile, phases=profile.phases.times(factor), splits=splits)


def _calibrated(folder: Path, worlds: list[tuple[str, World]], *, again: bool) -> dict[str, Machine]:
    """The machine for each bandwidth, "" for one host."""
    command = [sys.executable, "-m", "lightning_multigpu", "calibrate"]
    one = folder / "one_host.json"
    if again or not one.exists():
        one.unlink(missing_ok=True)
        devices = sorted({str(world.devices) for _, world in worlds} - {"1"}) or ["2"]
        subprocess.run([*command, "--devices", *devices, f"--output={one}"], check=True)
    found = {"": read(one)}
    for bandwidth in dict.fromkeys(b for b, _ in worlds if b):
        path = folder / f"{bandwidth}.json"
        if again or not path.exists():
            shutil.copy(one, path)
            for nodes in sorted({world.nodes for b, world in worlds if b == bandwidth}):
                shown = [*command, f"--num-nodes={nodes}", "--devices=1", f"--output={path}"]
                subprocess.run([*_emulate(bandwidth, nodes), *shown], check=True)
        found[bandwidth] = read(path)
    return found


def _emulate(bandwidth: str, nodes: int) -> list[str]:
    hosts = ["emulate", f"--nodes={nodes}", "--devices=1", f"--bandwidth={bandwidth}"]
    hosts += [f"--burst={BANDWIDTHS[bandwidth]}", "--"]
    return [sys.executable, "-m", "lightning_multigpu", *hosts]


class _Data(pl.LightningDataModule):
    def __init__(self, batch: Any, batch_size: int) -> None:
        super().__init__()
        self._batch, self._batch_size = batch, batch_size

    def train_dataloader(self) -> Any:
        return repeated(self._batch, self._batch_size, 1000, 1)


def _profile(name: str, world: World) -> ModelProfile:
    make, batch_size = MODELS[name]
    module = make()
    subject = PlannedModule(
        module=module,
        datamodule=_Data(module.example_batch(batch_size), batch_size),
        trainer_settings={"accelerator": "cpu"},
        callbacks=[],
        device=torch.device("cpu"),
    )
    return measured_model(subject, [world.size], [world.size])


def _predicted(profile: ModelProfile, machine: Machine, bandwidth: str, world: World) -> list[dict[str, Any]]:
    found = []
    for text in ONE_HOST if world.nodes == 1 else HOSTS:
        name, options = strategy_of(text.partition(" ")[0])
        candidate = Candidate(name, options, ACCUMULATED if text.endswith("x4") else 1)
        case: dict[str, Any] = {"model": profile.name, "strategy": text, "world": _label(bandwidth, world)}
        try:
            prediction = predict(profile, machine, candidate, world)
        except ImpossibleError as error:
            found.append({**case, "impossible": str(error)})
            continue
        case |= {
            "step_s": prediction.step_s,
            "interval_s": prediction.interval_s,
            "parts_s": prediction.parts_s,
            "samples_per_s": prediction.samples_per_s,
            "memory": {**asdict(prediction.memory), "activations_bytes": prediction.activations_bytes},
        }
        found.append(case)
    return found


def _measured_apart(name: str, bandwidth: str, world: World, options: argparse.Namespace) -> dict[str, Any]:
    if world.nodes == 1:
        return _measured(name, world, options.repetitions) or {}
    path = options.folder / "rows.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.planner", f"--folder={options.folder}"]
    command += [f"--repetitions={options.repetitions}", "--measure", name, str(world.nodes)]
    subprocess.run([*_emulate(bandwidth, world.nodes), *command], check=True)
    rows: dict[str, Any] = json.loads(path.read_text())
    return rows


def _measured(name: str, world: World, repetitions: int) -> dict[str, Any] | None:
    """Median steps of an optimizer step and memory, by strategy; None on hosts but the first.

    All strategies take turns, each between two of the step without communication. "at_pace_s" is the median of the
    ratios to that, times its median: what minutes in which the machine is slower do not change.
    """
    folder = Path(tempfile.gettempdir()).absolute() / "planner_memory"  # that hosts share
    subject = Subject(name, partial(_counting, name, folder), MODELS[name][1])
    memory: list[dict[str, int]] = []
    with HostAgents(placement(world.devices, world.nodes), threads=1) as hosts:
        others = ONE_HOST if world.nodes == 1 else HOSTS
        rows, texts = [], [NO_COMMUNICATION, *others[:4], NO_COMMUNICATION, *others[4:]]
        for text in texts * repetitions:
            k = ACCUMULATED if text.endswith("x4") else 1
            plan = StrategyPlan(
                subject=replace(subject, accumulate=k), device_type="cpu", repetitions=1,
                steps=ACCUMULATED, warm_up=k, timeout_s=300.0,
            )  # fmt: skip
            none = text == NO_COMMUNICATION
            run = StrategyRun(hosts, Contender(text) if none else contender(text.partition(" ")[0]), plan)
            for path in folder.glob("*.json") if hosts.prints else ():
                path.unlink()
            rows += take_turns([run])  # alone: ranks of others that wait for their turn slow it down
            ranks = [json.loads(path.read_text()) for path in folder.glob("*.json")] if hosts.prints else []
            memory.append(max(ranks, key=lambda kinds: sum(kinds.values()), default={}))
        if not hosts.prints:
            return None
    turns = [rows[i : i + len(texts)] for i in range(0, len(rows), len(texts))]
    paces_s = [
        statistics.fmean(s for row in turn if row.label == NO_COMMUNICATION for s in row.rank_medians_s)
        for turn in turns
    ]
    pace_s = statistics.median(paces_s)
    found: dict[str, Any] = {}
    for place, text in enumerate(texts):
        own = [turn[place] for turn in turns]
        if reasons := [row.reason for row in own if row.step_s is None]:
            found[text] = {"reason": reasons[0]}
            continue
        k = ACCUMULATED if text.endswith("x4") else 1
        steps_s = [
            statistics.median(sum(row.seconds[i : i + k]) for i in range(0, len(row.seconds) - k + 1, k)) for row in own
        ]
        ratios = [step_s / turn_s for step_s, turn_s in zip(steps_s, paces_s, strict=True)]
        found[text] = {
            "step_s": statistics.median(steps_s), "mean_s": pace_s, "at_pace_s": statistics.median(ratios) * pace_s,
            "memory": memory[place],
        }  # fmt: skip
    return found


class CountsMemory(pl.Callback):
    """Writes the bytes of each kind that a rank holds in its second optimizer step into a file of the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saved: SavedActivations | None = None
        self._counting = ExitStack()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == trainer.accumulate_grad_batches:  # the optimizer has made its states
            held = [parameter for parameter in pl_module.parameters() if not isinstance(parameter, Placeholder)]
            self._saved = SavedActivations([*held, *pl_module.buffers()])
            self._counting.enter_context(self._saved.counted())

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        if self._saved is not None:
            self._counting.close()
            held = asdict(measured_bytes(pl_module.parameters(), trainer.optimizers))
            self._folder.mkdir(exist_ok=True)
            path = self._folder / f"{trainer.global_rank}.json"
            path.write_text(json.dumps({**held, "activations_bytes": self._saved.peak_bytes}))
            self._saved = None


def _counting(name: str, folder: Path) -> pl.LightningModule:
    module: pl.LightningModule = MODELS[name][0]()
    module.configure_callbacks = lambda: [CountsMemory(folder)]  # type: ignore[method-assign]
    return module


def _report(folder: Path) -> list[dict[str, Any]]:
    """Prints the errors by strategy, in all, and of the first choices; returns the cases."""
    print(heading())
    print("# python -m benchmarks.planner; predicted first, then measured; error: (predicted - measured) / measured")
    rows = []
    for name in MODELS:
        path = folder / f"{name.replace(' ', '_')}.json"
        rows += [{**case, "model": name} for case in json.loads(path.read_text())] if path.exists() else []
    done = [row for row in rows if "step_s" in row and "step_s" in row.get("measured", {})]
    by_strategy: dict[str, list[tuple[float, float]]] = {}
    memory: list[float] = []
    inside = 0
    print("# paced: the error of the ratio to the model's step without communication, both measured in turns")
    print(f"\n{'model':9} {'world':13} {'strategy':34} {'predicted':>10} {'measured':>10}   error   paced  memory")
    for row in done:
        measured = row["measured"]
        error = row["step_s"] / measured["step_s"] - 1
        paced = row["paced_s"] / measured["at_pace_s"] - 1
        by_strategy.setdefault(row["strategy"], []).append((abs(error), abs(paced)))
        inside += row["interval_s"][0] <= measured["step_s"] <= row["interval_s"][1]
        held = sum(row["memory"].values()) / max(1, sum(measured["memory"].values())) - 1
        memory.append(abs(held))
        print(
            f"{row['model']:9} {row['world']:13} {row['strategy']:34} {1e3 * row['step_s']:8.1f}ms "
            f"{1e3 * measured['step_s']:8.1f}ms {100 * error:+6.1f}% {100 * paced:+6.1f}%  {100 * held:+5.1f}%"
        )
    if not done:
        return done
    print(f"\n{'strategy':34} {'cases':>5} {'median':>7} {'9 of 10':>8}   paced: median  9 of 10")
    for strategy, errors in [*by_strategy.items(), ("all", [e for each in by_strategy.values() for e in each])]:
        figures = []
        for kind in zip(*errors, strict=True):
            figures += [statistics.median(kind), sorted(kind)[max(0, -(-9 * len(kind) // 10) - 1)]]
        shown = "{:6.1f}% {:7.1f}%         {:6.1f}% {:7.1f}%".format(*(100 * figure for figure in figures))
        print(f"{strategy:34} {len(errors):5} {shown}")
    print(f"memory: median {100 * statistics.median(memory):.1f} %, largest {100 * max(memory):.1f} %")
    print(f"within the interval: {inside} of {len(done)}")
    _report_gains(done)
    good = worlds = 0
    for key in dict.fromkeys((row["model"], row["world"]) for row in done):
        own = [row for row in done if (row["model"], row["world"]) == key]
        first = max(own, key=lambda row: row["samples_per_s"])
        best = max(_rate(row) for row in own)
        worlds += 1
        good += _rate(first) >= 0.95 * best
    print(f"first choice within 5 % of the measured best: {good} of {worlds} models and worlds")
    return done


def _report_gains(done: list[dict[str, Any]]) -> None:
    """Samples a second of each remedy over those of ring_ddp as it is, predicted and measured."""
    plain = {(row["model"], row["world"]): row for row in done if row["strategy"] == "ring_ddp"}
    print(f"\n{'remedy':34} {'world':13} {'predicted gain':>15} {'measured':>9}   (medians over the models)")
    gains: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in done:
        before = plain.get((row["model"], row["world"]))
        if before is not None and before is not row and row["strategy"].startswith("ring_ddp"):
            gain = row["samples_per_s"] / before["samples_per_s"], _rate(row) / _rate(before)
            gains.setdefault((row["strategy"], row["world"]), []).append(gain)
    for (strategy, world), pairs in gains.items():
        predicted, measured = (statistics.median(pair[kind] for pair in pairs) for kind in (0, 1))
        print(f"{strategy:34} {world:13} {predicted:14.2f}x {measured:8.2f}x")
    print()


def _rate(row: dict[str, Any]) -> float:
    """Measured samples a second, by the predicted samples of a step."""
    return float(row["samples_per_s"] * row["step_s"] / row["measured"]["step_s"])


if __name__ == "__main__":
    main()
