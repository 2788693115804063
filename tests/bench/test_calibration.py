"""Calibration: costs that are found again from steps that were predicted with them, and a short real run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

from lightning_multigpu.bench.calibration import calibration
from lightning_multigpu.bench.jobs.host_agents import HostAgents
from lightning_multigpu.bench.jobs.placement import placement
from lightning_multigpu.bench.spread import Spread
from lightning_multigpu.bench.strategies.contenders import NO_COMMUNICATION
from lightning_multigpu.bench.strategies.strategy_run import StrategyResult
from lightning_multigpu.commands.calibrate import this_machine
from lightning_multigpu.planning.scaling.links import Link
from lightning_multigpu.planning.scaling.machine_model import (
    FROM_OWNERS,
    OF_ACTIVATIONS,
    TO_OWNER,
    Machine,
    MeasuredCollective,
    ReferenceCost,
    World,
)
from lightning_multigpu.planning.scaling.step_model import Candidate, predict

HOSTS, ONE_HOST = World(2, 1), World(1, 2)
ALONE = {"tiny": 1e-3, "deep": 4e-3, "large": 50e-3}
LAYERS = {"tiny": (64, 6), "deep": (64, 30), "large": (512, 6)}


def rows(machine: Machine, world: World, label: str, strategy: str, **options: Any) -> dict[Any, StrategyResult]:
    """The steps that the machine's costs give."""
    found = {}
    for subject, alone_s in ALONE.items():
        width, layers = LAYERS[subject]
        profile = calibration._profile(width, layers, alone_s, machine.crowd(world))
        step_s = predict(profile, machine, Candidate(strategy, options), world).step_s
        found[subject, label] = row(label, step_s, sent_bytes=100.0)
    return found


def row(label: str, step_s: float, sent_bytes: float) -> StrategyResult:
    return StrategyResult(
        label=label,
        step_s=Spread.of([step_s]),
        rank_medians_s=[step_s, step_s],
        metered={"sent_bytes": sent_bytes},
    )


def found_again(
    machine: Machine, world: World, cost: ReferenceCost, further: Mapping[Any, StrategyResult] = MappingProxyType({})
) -> Machine:
    true = Machine(**{**vars(machine), "references": [cost]})
    steps = {(subject, NO_COMMUNICATION): row("", alone_s, 0.0) for subject, alone_s in ALONE.items()}
    steps |= rows(true, world, "ring_ddp", "ring_ddp")
    steps |= rows(true, world, calibration._SMALL_BUCKETS, "ring_ddp", bucket_cap_mb=0.01)
    return calibration._Fit(machine, world, {**steps, **further}, 512, ["ring_ddp"]).machine()


def machine(world: World) -> Machine:
    link = MeasuredCollective(operation="all_reduce", world=world, link=Link(1e-4, 5e-9))
    return Machine(
        name="m", device_type="cpu", devices=2, inside=Link(1e-5, 1e-9), between=Link(1e-4, 1e-8), collectives=[link]
    )


def test_costs_of_one_host_are_found_again() -> None:
    true = ReferenceCost(
        strategy="ring_ddp", world=ONE_HOST, fixed_s=3e-3, scale=1.7, busy=1.0, tensor_s=2e-5, bucket_s=4e-5
    )
    [found] = [
        each for each in found_again(machine(ONE_HOST), ONE_HOST, true).references if each.strategy == "ring_ddp"
    ]
    assert found.scale == pytest.approx(1.7, rel=0.02)
    assert found.tensor_s == pytest.approx(2e-5, rel=0.1)
    assert found.bucket_s == pytest.approx(4e-5, rel=0.1)
    assert found.fixed_s == pytest.approx(3e-3, rel=0.05)


def test_between_hosts_the_share_that_does_not_hide_is_found_again() -> None:
    true = ReferenceCost(strategy="ring_ddp", world=HOSTS, fixed_s=2e-3, busy=0.6)
    found = found_again(machine(HOSTS), HOSTS, true)
    assert found.reference("ring_ddp", HOSTS).busy == pytest.approx(0.6, abs=0.05)
    assert found.reference("ring_ddp", HOSTS).scale == 1.0


@pytest.mark.parametrize(("size", "passes"), [(2, (10, 34)), (4, (16, 64))])
def test_the_fixed_time_of_a_pass_is_found_again(size: int, passes: tuple[int, int]) -> None:
    """2 (M + P - 1) passes of a rank follow each other; 4 ranks on 2 cores take as long as half of all 2 M P passes."""
    world = World(size, 1)
    labels = [f"pipeline_1f1b:num_micro_batches={number}" for number in (4, 16)]
    steps = {
        ("tiny", label): row(label, ALONE["tiny"] + 5e-3 + 2e-3 * number, 0.0)
        for label, number in zip(labels, passes, strict=True)
    }
    hosts = replace(machine(world), shares_cores=True)
    cost = found_again(hosts, world, ReferenceCost(strategy="ring_ddp", world=world), steps)
    found = cost.reference("pipeline_1f1b", world)
    assert (found.pass_s, found.fixed_s) == pytest.approx((2e-3, 5e-3))


def test_the_time_of_a_split_layers_collective_is_found_again() -> None:
    """The tiny model has 5 collectives, the deep one 29; alone one takes longer than in a step."""
    alone = MeasuredCollective(operation=OF_ACTIVATIONS, world=HOSTS, link=Link(9e-3, 0.0))
    hosts = replace(machine(HOSTS), collectives=[*machine(HOSTS).collectives, alone])
    steps = {
        (subject, "tensor_split"): row("tensor_split", ALONE[subject] + 3e-3 + 4e-3 * number, 0.0)
        for subject, number in (("tiny", 5), ("deep", 29))
    }
    found = found_again(hosts, HOSTS, ReferenceCost(strategy="ring_ddp", world=HOSTS), steps)
    cost = found.reference("tensor_split", HOSTS)
    assert (cost.pass_s, cost.fixed_s) == pytest.approx((-5e-3, 3e-3))


def test_a_strategy_that_failed_has_no_cost() -> None:
    steps = {(subject, NO_COMMUNICATION): row("", alone_s, 0.0) for subject, alone_s in ALONE.items()}
    steps["tiny", "ring_ddp"] = StrategyResult(label="ring_ddp", status="failed", reason="it raised")
    assert not calibration._Fit(machine(ONE_HOST), ONE_HOST, steps, 512, ["ring_ddp"]).machine().references


@pytest.mark.parametrize("world", [ONE_HOST, HOSTS])
def test_every_strategy_that_trains_in_a_world_gets_a_cost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(runs: Any) -> list[StrategyResult]:
        return [row(run.contender.label, ALONE[run.plan.subject.name] + 1e-2, 50.0) for run in runs]

    monkeypatch.setattr(calibration, "take_turns", steps)
    found = calibration._with_references(None, "cpu", machine(world), world)  # type: ignore[arg-type]
    wanted = {"ring_ddp", "ddp_sharded", "sync_ps", "sharded_ps", "pipeline_1f1b", "tensor_split"}
    assert {each.strategy for each in found.references} == wanted | ({"cpu_ps", "dp"} if world == ONE_HOST else set())
    assert {each.world for each in found.references} == {world}


@pytest.mark.launch
def test_kernels_and_collectives_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SIZES", (4 << 10, 64 << 10, 512 << 10, 1 << 20, 2 << 20))
    monkeypatch.setattr(calibration, "_with_references", lambda hosts, device_type, machine, world: machine)
    with HostAgents(placement(2, 1), threads=1) as hosts:
        found = calibration.calibrated(hosts, "cpu", this_machine("cpu"))
    assert set(found.slowdown) == {1, 2}
    assert found.flops_per_s["float32"] > 0
    assert {coding.name: round(coding.ratio) for coding in found.codings} == {"fp16": 2, "bf16": 2, "int8": 4}
    assert {(each.operation, each.world) for each in found.collectives} == {
        ("all_reduce", ONE_HOST),
        ("send_recv", ONE_HOST),
        (TO_OWNER, ONE_HOST),
        (FROM_OWNERS, ONE_HOST),
    }
    assert not found.shares_cores
    assert found.versions["torch"] == torch.__version__
