"""Calibration: costs that are found again from steps that were predicted with them, and a short real run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_multigpu.bench import calibration, kernels
from lightning_multigpu.bench.jobs.host_agents import HostAgents
from lightning_multigpu.bench.jobs.placement import placement
from lightning_multigpu.bench.strategies.contenders import NO_COMMUNICATION
from lightning_multigpu.bench.strategies.strategy_run import StrategyResult
from lightning_multigpu.commands.calibrate import this_machine
from lightning_multigpu.planning.pipelines.schedule_order import schedule_orders, step_time
from lightning_multigpu.planning.scaling.links import Link
from lightning_multigpu.planning.scaling.machine_model import (
    FROM_OWNERS,
    OF_ACTIVATIONS,
    TO_OWNER,
    Coding,
    Machine,
    MeasuredCollective,
    ReferenceCost,
    World,
)
from lightning_multigpu.planning.scaling.step_model import Candidate, predict
from lightning_multigpu.report.statistics import Spread

HOSTS, ONE_HOST = World(2, 1), World(1, 2)
ALONE = {"tiny": 1e-3, "deep": 4e-3, "large": 50e-3}
LAYERS = {"tiny": (64, 6), "deep": (64, 30), "large": (512, 6)}
TENSOR_S = 2e-5


def rows(machine: Machine, world: World, label: str, strategy: str, **options: Any) -> dict[Any, StrategyResult]:
    """The steps that the machine's costs give."""
    found = {}
    for subject, alone_s in ALONE.items():
        width, layers = LAYERS[subject]
        profile = calibration.reference_profile(width, layers, alone_s / machine.slowdown_of(machine.crowd(world)))
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
    name = cost.strategy
    steps |= rows(true, world, name, name)
    steps |= rows(true, world, calibration.SMALL_BUCKETS[name], name, bucket_cap_mb=0.01)
    return calibration.Fit(machine, world, {**steps, **further}, 512, 64, [name]).machine()


def machine(world: World) -> Machine:
    link = MeasuredCollective(operation="all_reduce", world=world, link=Link(1e-4, 5e-9))
    return Machine(
        name="m", device_type="cpu", devices=2, inside=Link(1e-5, 1e-9), between=Link(1e-4, 1e-8), collectives=[link]
    )


def test_costs_of_one_host_are_found_again() -> None:
    true = ReferenceCost(
        strategy="ring_ddp", world=ONE_HOST, fixed_s=3e-3, scale=1.7, busy=1.0, tensor_s=2e-5, bucket_s=4e-5
    )
    found = found_again(machine(ONE_HOST), ONE_HOST, true).reference("ring_ddp", ONE_HOST)
    assert found.scale == pytest.approx(1.7, rel=0.02)
    assert found.tensor_s == pytest.approx(2e-5, rel=0.1)
    assert found.bucket_s == pytest.approx(4e-5, rel=0.1)
    assert found.fixed_s == pytest.approx(3e-3, rel=0.05)


@pytest.mark.parametrize(("busy", "slowing"), [(0.6, 0.0), (1.0, 0.3)])
def test_between_hosts_the_share_that_does_not_hide_is_found_again(busy: float, slowing: float) -> None:
    true = ReferenceCost(strategy="ring_ddp", world=HOSTS, fixed_s=2e-3, busy=busy, slowing=slowing)
    found = found_again(machine(HOSTS), HOSTS, true).reference("ring_ddp", HOSTS)
    assert (found.busy, found.slowing, found.scale) == pytest.approx((busy, slowing, 1.0), abs=0.05)


@pytest.mark.parametrize("message_s", [3e-4, -5e-5])
def test_the_time_of_a_message_to_an_owner_is_found_again(message_s: float) -> None:
    """Less than that of one alone, where several travel at once."""
    true = ReferenceCost(strategy="ddp_sharded", world=ONE_HOST, fixed_s=2e-3, busy=1.0, bucket_s=message_s)
    found = found_again(machine(ONE_HOST), ONE_HOST, true).reference("ddp_sharded", ONE_HOST)
    assert found.bucket_s == pytest.approx(message_s, rel=0.02)
    assert found.fixed_s == pytest.approx(2e-3, rel=0.02)


def test_less_of_a_compressed_transfer_hides() -> None:
    name = "ring_ddp:compression=int8"
    coding = Coding(name="int8", ratio=4.0, s_per_byte=1e-9)
    hosts = replace(machine(HOSTS), codings=[coding])
    true = ReferenceCost(strategy=name, world=HOSTS, fixed_s=2e-3, busy=0.9)
    further = rows(replace(hosts, references=[true]), HOSTS, name, "ring_ddp", compression="int8")
    found = found_again(hosts, HOSTS, ReferenceCost(strategy="ring_ddp", world=HOSTS, fixed_s=2e-3, busy=0.6), further)
    assert found.reference(name, HOSTS).busy == pytest.approx(0.9, abs=0.05)
    assert found.reference("ring_ddp", HOSTS).busy == pytest.approx(0.6, abs=0.05)
    assert found.reference("ring_ddp:compression=bf16", HOSTS) == found.reference("ring_ddp", HOSTS)


@pytest.mark.parametrize(("pass_s", "scale"), [(2e-3, 1.0), (0.0, 0.5)])
def test_the_time_of_a_pass_or_of_its_messages_is_found_again(pass_s: float, scale: float) -> None:
    size, world = 2, World(2, 1)
    hosts = replace(machine(world), shares_cores=True)
    steps = tiny_pipelines(size, pass_s, scale)
    found = found_again(hosts, world, ReferenceCost(strategy="ring_ddp", world=world), steps)
    cost = found.reference("pipeline_1f1b", world)
    assert (cost.pass_s, cost.scale, cost.fixed_s) == pytest.approx((pass_s, scale, 5e-3), abs=1e-6)
    assert cost.tensor_s == pytest.approx(TENSOR_S)


def tiny_pipelines(size: int, pass_s: float, scale: float) -> dict[Any, StrategyResult]:
    """The steps of the tiny and the deep model, with 5 ms and a time for each of their 14 and 62 tensors."""
    steps = {}
    for number in (4, 16):
        label = f"pipeline_1f1b:num_micro_batches={number}"
        messages_s = [scale * 1e-4 + 1e-8 * 16 * 64 * 4 / number] * (size - 1)
        orders = schedule_orders("1f1b", size, 1, number)
        step_s = ALONE["tiny"] + 5e-3 + step_time(orders, [pass_s] * size, [pass_s] * size, messages_s)
        steps["tiny", label] = row(label, step_s + number * 14 * TENSOR_S, 0.0)
        # Each pass of the deep model takes longer; two ranks compute at once.
        deeper_s = (number + size - 1) / size * (ALONE["deep"] - ALONE["tiny"])
        steps["deep", label] = row(label, step_s + deeper_s + number * 62 * TENSOR_S, 0.0)
    return steps


def test_kernels_are_measured_with_as_many_ranks_as_cores_at_most() -> None:
    """With four ranks on two cores a byte took twice as long to compress, and plans counted that twice."""
    names = (f"matmul {kernels.MATMUL_SIZES[-1]}", "stream")
    names += tuple(f"{figure} {coding}" for figure in ("ratio", "coding") for coding in kernels.CODINGS)

    class Hosts:
        def start(self, *_: Any, **__: Any) -> Hosts:
            return self

        def turn(self, crowd: int) -> list[dict[str, Any]]:
            return [{"boot": "", "seconds": dict.fromkeys(names, float(crowd))}] * crowd

        def end(self) -> None: ...

    found = calibration.with_kernels(Hosts(), "cpu", machine(World(1, 4)), World(1, 4))  # type: ignore[arg-type]
    assert {coding.s_per_byte for coding in found.codings} == {2 / kernels.CODED_BYTES}
    assert found.slowdown == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize(
    ("world", "operation", "link", "pass_s", "scale", "slowing"),
    [
        (HOSTS, OF_ACTIVATIONS, Link(9e-3, 1e-7), -1e-3, 0.5, 0.0),  # alone a collective takes longer
        (ONE_HOST, "all_reduce", Link(1e-4, 1e-9), 0.0, 1.0, 0.2),
    ],
)
def test_the_time_of_split_layers_and_of_their_collectives_is_found_again(
    world: World, operation: str, link: Link, pass_s: float, scale: float, slowing: float
) -> None:
    """The tiny and the large model have 5 collectives, the deep one 29."""
    alone = MeasuredCollective(operation=operation, world=world, link=link)
    others = machine(world).collectives if world == HOSTS else []
    large_s = ALONE["tiny"] + (ALONE["large"] - ALONE["tiny"]) / 2 + slowing * 0.95 * 25e-3
    steps = {
        (subject, "tensor_split"): row(
            "tensor_split", computing_s + 3e-3 + number * (scale * link.seconds(size) + pass_s), 0.0
        )
        for subject, number, size, computing_s in (
            ("tiny", 5, 4 * 16 * 64, ALONE["tiny"]),
            ("deep", 29, 4 * 16 * 64, ALONE["deep"]),
            ("large", 5, 4 * 64 * 512, large_s),
        )
    }
    measured = replace(machine(world), collectives=[*others, alone])
    found = found_again(measured, world, ReferenceCost(strategy="ring_ddp", world=world), steps)
    cost = found.reference("tensor_split", world)
    assert (cost.pass_s, cost.scale, cost.fixed_s) == pytest.approx((pass_s, scale, 3e-3), abs=1e-9)
    assert cost.slowing == pytest.approx(slowing, abs=1e-9)


@pytest.mark.parametrize("world", [ONE_HOST, HOSTS])
def test_every_strategy_that_trains_in_a_world_gets_a_cost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(runs: Any) -> list[StrategyResult]:
        return [row(run.contender.label, ALONE[run.plan.subject.name] + 1e-2, 50.0) for run in runs]

    monkeypatch.setattr(calibration, "take_turns", steps)
    found = calibration.with_references(None, "cpu", machine(world), world)  # type: ignore[arg-type]
    wanted = {"ring_ddp", "ddp_sharded", "sync_ps", "sharded_ps", "pipeline_1f1b", "tensor_split"}
    assert {each.strategy for each in found.references} == wanted | ({"cpu_ps", "dp"} if world == ONE_HOST else set())
    assert {each.world for each in found.references} == {world}


def test_what_others_disturb_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another process the slowdown of two ranks was 1.83 instead of 1.1, and nobody knew."""
    others = iter([0.4, 0.01, 0.3, 0.2, 0.5, 0.0])  # kernels twice, collectives three times, reference steps once
    told: list[str] = []
    measured: dict[str, list[float]] = {"with_kernels": [], "with_collectives": [], "with_references": []}
    hosts = SimpleNamespace(placement=SimpleNamespace(devices=2, num_nodes=1), share=lambda value: [value])
    for name, shares in measured.items():

        def measure(hosts: Any, device: str, machine: Machine, world: World, shares: Any = shares) -> Machine:
            shares.append(next(others))
            monkeypatch.setattr(calibration, "share_of_others", lambda before, after: shares[-1])
            return replace(machine, slowdown={**machine.slowdown, len(machine.slowdown): shares[-1]})

        monkeypatch.setattr(calibration, name, measure)
    found = calibration.calibrated(hosts, "cpu", machine(ONE_HOST), told.append)  # type: ignore[arg-type]
    assert [len(shares) for shares in measured.values()] == [2, 3, 1]
    assert list(found.slowdown.values()) == [0.01, 0.2, 0.0], "the least disturbed ones count"
    assert found.disturbed == {"1 x 2": 0.2}
    assert told.count("kernels, again: other processes are busy") == 1


@pytest.mark.launch
def test_kernels_and_collectives_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SIZES", (4 << 10, 64 << 10))
    monkeypatch.setattr(calibration, "with_references", lambda hosts, device_type, machine, world: machine)
    with HostAgents(placement(2, 1), threads=1) as hosts:
        found = calibration.calibrated(hosts, "cpu", this_machine("cpu"))
    assert set(found.slowdown) == {1, 2}
    assert found.flops_per_s["float32"] > 0
    assert {coding.name: round(coding.ratio) for coding in found.codings} == {"bf16": 2, "int8": 4}
    assert {(each.operation, each.world) for each in found.collectives} == {
        ("all_reduce", ONE_HOST),
        ("send_recv", ONE_HOST),
        (TO_OWNER, ONE_HOST),
        (FROM_OWNERS, ONE_HOST),
    }
    assert not found.shares_cores
    assert 0 <= found.disturbed["1 x 2"] <= 1
    assert found.versions["torch"] == torch.__version__
