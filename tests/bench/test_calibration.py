"""Calibration: costs that are found again from steps that were predicted with them, and a short real run."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_multigpu.bench import calibration
from lightning_multigpu.bench.jobs.host_agents import HostAgents
from lightning_multigpu.bench.jobs.placement import placement
from lightning_multigpu.bench.strategies.contenders import NO_COMMUNICATION
from lightning_multigpu.bench.strategies.strategy_run import StrategyResult
from lightning_multigpu.callbacks.other_processes import Usage
from lightning_multigpu.commands.calibrate import this_machine
from lightning_multigpu.planning.scaling.machine import (
    ALL_REDUCE,
    MESSAGE,
    Link,
    Machine,
    MeasuredCollective,
    ReferenceCost,
    World,
)
from lightning_multigpu.planning.scaling.step_model import Candidate, predict
from lightning_multigpu.report.statistics import Spread

HOSTS, ONE_HOST = World(2, 1), World(1, 2)
ALONE = {"tiny": 1e-3, "deep": 4e-3, "large": 50e-3}
MODELS = {"tiny": (64, 6, 16), "deep": (64, 30, 16), "large": (512, 6, 64)}


def machine(world: World, device_type: str = "cpu") -> Machine:
    link = MeasuredCollective(operation=ALL_REDUCE, world=world, link=Link.straight(1e-4, 5e-9))
    inside, between = Link.straight(1e-5, 1e-9), Link.straight(1e-4, 1e-8)
    return Machine(
        name="m", device_type=device_type, devices=2, inside=inside, between=between, collectives=[link],
    )  # fmt: skip


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("world", [ONE_HOST, HOSTS])
@pytest.mark.parametrize(
    ("strategy", "options", "cost"),
    [
        ("ring_ddp", {}, {"fixed_s": 3e-3, "tensor_s": 2e-5, "scale": 1.7}),
        ("ring_ddp", {}, {"fixed_s": 3e-3, "tensor_s": 0.0, "scale": 0.6}),
        ("ddp_sharded", {}, {"fixed_s": 2e-3, "tensor_s": 5e-5, "scale": 0.9}),
        ("sharded_ps", {}, {"fixed_s": 2e-3, "tensor_s": 5e-5, "scale": 0.9}),
        ("ring_ddp:compression=int8", {"compression": "int8"}, {"fixed_s": 2e-3, "tensor_s": 1e-5, "scale": 2.5}),
        ("pipeline_1f1b", {}, {"fixed_s": 5e-3, "tensor_s": 2e-5, "pass_s": 2e-4}),
        ("tensor_split", {}, {"fixed_s": 3e-3, "pass_s": 4e-4}),
    ],
)
def test_costs_are_found_again(
    strategy: str, options: dict[str, Any], cost: dict[str, float], world: World, device_type: str
) -> None:
    world = HOSTS if options else world  # gradients are compressed between hosts
    true = ReferenceCost(strategy=strategy, world=world, **cost)
    base = machine(world, device_type)
    steps = {(name, NO_COMMUNICATION): seconds for name, seconds in ALONE.items()}
    labels = calibration.PIPELINES if strategy == "pipeline_1f1b" else [strategy]
    for name, sizes in MODELS.items():
        profile = calibration.reference_profile(*sizes, ALONE[name], world.size)
        for label in labels:
            numbers = {"num_micro_batches": int(label.partition("=")[2])} if len(labels) > 1 else options
            candidate = Candidate(strategy.partition(":")[0], numbers)
            steps[name, label] = predict(profile, replace(base, references=[true]), candidate, world).step_s
    [found] = calibration.costs(base, world, steps, [strategy][: "scale" in cost], 512, 64)
    for name, value in cost.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize(("extra", "scale_at_least"), [((5e-3, 4e-3, 40e-3), 0.5), ((5e-3, 4e-3, -2e-3), 1.0)])
def test_a_cost_is_never_negative(extra: tuple[float, ...], scale_at_least: float) -> None:
    """Where noise makes the deep model faster than the tiny one, no tensor gives time back; no transfer is free."""
    steps = {(name, NO_COMMUNICATION): seconds for name, seconds in ALONE.items()}
    steps |= {(name, "ring_ddp"): ALONE[name] + more for name, more in zip(ALONE, extra, strict=True)}
    [found] = calibration.costs(machine(HOSTS), HOSTS, steps, ["ring_ddp"], 512, 64)
    assert found.tensor_s == 0
    assert 0 <= found.fixed_s < 5e-3
    assert found.scale >= scale_at_least


def row(label: str, step_s: float) -> StrategyResult:
    return StrategyResult(label=label, step_s=Spread.of([step_s]), rank_medians_s=[step_s, step_s])


@pytest.mark.parametrize("world", [ONE_HOST, HOSTS])
def test_every_strategy_that_trains_in_a_world_gets_a_cost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(runs: Any) -> list[StrategyResult]:
        return [row(run.contender.label, ALONE[run.plan.subject.name] + 1e-2) for run in runs]

    monkeypatch.setattr(calibration, "take_turns", steps)
    found = calibration.with_references(None, "cpu", machine(world), world)  # type: ignore[arg-type]
    wanted = {"ring_ddp", "ddp_sharded", "sync_ps", "sharded_ps", "pipeline_1f1b", "tensor_split"}
    compressed = {f"ring_ddp:compression={name}" for name in ("bf16", "int8")}
    wanted |= {"cpu_ps", "dp"} if world == ONE_HOST else compressed
    assert {each.strategy for each in found.references} == wanted
    assert {each.world for each in found.references} == {world}


def test_what_others_disturb_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another process a calibration was wrong by 1.8 x, and nobody knew."""
    others = iter([0.4, 0.01, 0.3, 0.2, 0.5])  # collectives twice, reference steps three times
    told: list[str] = []
    measured: dict[str, list[float]] = {"with_collectives": [], "with_references": []}
    boots = {1: [["a"]], 2: [["a"], ["a"]]}

    def share(nodes: int, value: Usage) -> list[Any]:
        return [value._replace(boot=boot) for [boot] in boots[nodes]]

    for name, shares in measured.items():

        def measure(hosts: Any, device: str, machine: Machine, world: World, shares: Any = shares) -> Machine:
            shares.append(next(others))
            monkeypatch.setattr(calibration, "share_of_others", lambda before, after: shares[-1])
            cost = ReferenceCost(strategy="ring_ddp", world=world, fixed_s=shares[-1])
            return replace(machine, references=[*machine.references, cost])

        monkeypatch.setattr(calibration, name, measure)
    hosts = SimpleNamespace(placement=SimpleNamespace(devices=2, num_nodes=1), share=lambda value: share(1, value))
    found = calibration.calibrated(hosts, "cpu", machine(ONE_HOST), told.append)  # type: ignore[arg-type]
    assert [len(shares) for shares in measured.values()] == [2, 3]
    assert [cost.fixed_s for cost in found.references] == [0.01, 0.2], "the least disturbed ones count"
    assert (found.disturbed, found.shares_cores) == ({"1 x 2": 0.2}, False)
    assert told.count("collectives, again: other processes are busy") == 1
    others = iter([0.0, 0.0])
    hosts = SimpleNamespace(placement=SimpleNamespace(devices=1, num_nodes=2), share=lambda value: share(2, value))
    found = calibration.calibrated(hosts, "cpu", found)  # type: ignore[arg-type]
    assert (found.disturbed, found.shares_cores) == ({"1 x 2": 0.2, "2 x 1": 0.0}, True)


@pytest.mark.launch
def test_collectives_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SIZES", (4 << 10, 64 << 10))
    monkeypatch.setattr(calibration, "with_references", lambda hosts, device_type, machine, world: machine)
    with HostAgents(placement(2, 1), threads=1) as hosts:
        found = calibration.calibrated(hosts, "cpu", this_machine("cpu"))
    operations = {each.operation for each in found.collectives}
    assert operations == {ALL_REDUCE, MESSAGE}
    assert {each.world for each in found.collectives} == {ONE_HOST}
    assert not found.shares_cores
    assert 0 <= found.disturbed["1 x 2"] <= 1
    assert found.versions["torch"] == torch.__version__
