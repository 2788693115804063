"""Costs of stages, the best split by them, and the predicted pipeline, compared with figures worked out by hand."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_multigpu.engine.pipeline.splitting.chain import find_chain
from lightning_multigpu.planning.pipelines.stage_costs import (
    ChainFigures,
    MeasuredParts,
    PartCost,
    PipelinePlan,
    StageCosts,
)
from lightning_multigpu.planning.pipelines.timeline import HeldBytes


def costs(parts: list[PartCost], layers: list[int] | None = None, **options: Any) -> StageCosts:
    given = {"schedule": "gpipe", "num_ranks": 2, "stages_per_rank": 1, "num_micro_batches": 4, **options}
    return StageCosts(parts, [0, *(layers or [0] * (len(parts) - 2)), 0], **given)


def timed(*seconds: float) -> list[PartCost]:
    return [PartCost(second / 4, 3 * second / 4, 1000, 10) for second in seconds]


def test_a_slow_layer_has_a_stage_to_itself() -> None:
    assert costs(timed(0, 1, 1, 9, 1, 1, 0)).bounds("time") == [(0, 2), (2, 5)]
    assert costs(timed(0, 9, 1, 1, 1, 1, 0)).bounds("time") == [(0, 1), (1, 5)]


def test_what_is_outside_of_the_chain_counts_where_it_runs() -> None:
    """A head that costs as much as two layers leaves the last stage fewer of them."""
    head = costs(timed(0, 1, 1, 1, 1, 1, 1, 2))
    assert head.bounds("time") == [(0, 4), (4, 6)]
    assert (head.forward_s(4, 6), head.backward_s(4, 6)) == (1, 3)
    found = costs(timed(4, 1, 1, 1, 1, 1, 1, 0))
    assert found.bounds("time") == [(0, 1), (1, 6)]
    assert found.time_s(0, 0, 2) == 4 + 2
    assert found.time_s(1, 2, 6) == 4


def test_memory_counts_the_micro_batches_in_flight() -> None:
    parts = [PartCost(), *(PartCost(0.0, 0.0, 0, 100) for _ in range(6)), PartCost()]
    assert costs(parts).bounds("memory") == [(0, 3), (3, 6)]
    # Under 1f1b the first stage has two micro-batches in memory, and the last has one.
    assert costs(parts, schedule="1f1b").bounds("memory") == [(0, 2), (2, 6)]
    assert costs(parts, schedule="1f1b").memory_bytes(0, 0, 2) == 400
    assert costs(parts, schedule="gpipe").memory_bytes(0, 0, 2) == 800
    # What stays whatever is in flight.
    assert costs(parts, [10_000, 0, 0, 0, 0, 0]).bounds("memory") == [(0, 1), (1, 6)]


def test_what_a_stage_receives_counts_once() -> None:
    """Layer 1 keeps some of its input by itself, layer 2 more than it has received."""
    parts = [PartCost(), PartCost(output_bytes=8), PartCost(0, 0, 6, 5, 5), PartCost(0, 0, 0, 9, 9), PartCost()]
    found = costs(parts, num_micro_batches=2)
    assert found.activations_bytes(1, 1, 2) == 2 * (5 + 8 - 5)
    assert found.activations_bytes(1, 2, 3) == 2 * 9
    assert found.activations_bytes(0, 0, 2) == 2 * 5


def test_memory_counts_the_largest_layer_that_runs_again_once() -> None:
    parts = [PartCost(), *(PartCost(0, 0, 0, 1, 1, again) for again in (40, 60, 50, 0)), PartCost()]
    found = costs(parts, [0, 0, 0, 100])
    assert [found.memory_bytes(0, 0, 3), found.memory_bytes(1, 3, 4)] == [4 * 3 + 60, 4 + 100]
    looped = costs(parts, [0, 0, 0, 100], schedule="interleaved", stages_per_rank=2)
    bounds = [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert looped.rank_activations_bytes(bounds) == [(5, 50), (3, 60)]
    assert looped.largest_bytes(bounds) == 3 + 60 + 100
    uneven = [PartCost(), *(PartCost(saved_bytes=size) for size in (1, 10, 1, 1)), PartCost()]
    found = costs(uneven, schedule="interleaved", stages_per_rank=2)
    assert found.rank_activations_bytes(bounds)[1] == (30, 0), "not 2 x 10 + 1, with which it has as many in flight"


def test_a_rank_has_the_memory_of_all_its_stages() -> None:
    parts = [PartCost(), *(PartCost() for _ in range(4)), PartCost()]
    found = costs(parts, [1, 20, 300, 4000], schedule="interleaved", stages_per_rank=2)
    bounds = [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert found.largest_bytes(bounds) == 4020
    lines = found.describe(bounds, [1, 0]).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"  stage {stage} on rank {1 - stage % 2}" for stage in range(4)]


def test_parts_and_layers_must_fit() -> None:
    with pytest.raises(ValueError, match="3 parts, and bytes of 4; pass as many"):
        costs([PartCost()] * 3, [1, 1])


@pytest.mark.parametrize(("optimizer", "options"), [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adam", {})])
def test_states_that_an_optimizer_will_keep(optimizer: str, options: dict[str, Any]) -> None:
    module = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Identity())})
    chain = find_chain(module, "layers", 2)
    module["layers"][1].requires_grad_(False)
    made = getattr(torch.optim, optimizer)([p for p in module.parameters() if p.requires_grad], lr=0.1, **options)
    predicted = chain.training_bytes([made])
    sum(p.sum() for p in module.parameters()).backward()  # type: ignore[union-attr]
    made.step()
    kept = [value for state in made.state.values() for value in state.values() if value.numel() > 1]
    layer = 4 * (64 + 8)
    assert predicted == [2 * layer + sum(4 * value.numel() for value in kept), layer, 0]


class Odd(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def test_an_unknown_optimizer_counts_as_four_times_the_parameters() -> None:
    shared = nn.Linear(4, 4)
    module = nn.ModuleDict({"layers": nn.Sequential(shared, shared)})
    assert find_chain(module, "layers", 2).training_bytes([Odd(module.parameters())]) == [4 * 4 * 20, 0]


def planned(
    schedule: str, parts: list[PartCost], balance: Any, *, stages_per_rank: int = 1, num_micro_batches: int = 3
) -> PipelinePlan:
    """Two ranks; layers of 10, 20, 30 ... bytes, 5 before them, 7 behind them and 1 everywhere."""
    sizes = [5, *(10 * (1 + layer) for layer in range(len(parts) - 2)), 7]
    chain = ChainFigures(
        name="layers",
        measured=[MeasuredParts(samples=samples, parts=parts) for samples in (1, 8)],
        held=[HeldBytes(size, size, 2 * size) for size in sizes],
        everywhere=HeldBytes(1, 0, 0),
    )
    return chain.plan(schedule, 2, stages_per_rank, num_micro_batches, 8, balance)


def test_stages_are_those_of_training() -> None:
    """The first and the last stage compute what is before and after the layers."""
    parts = [PartCost(0.5, 0.25), *(PartCost(1, 2, 5) for _ in range(5)), PartCost(7, 8)]
    found = planned("interleaved", parts, [1, 2, 1, 1], stages_per_rank=2, num_micro_batches=2)
    assert [stage.parameters_bytes for stage in found.stages] == [10, 50, 40, 50]
    assert [stage.forward_s for stage in found.stages] == [1.5, 2, 1, 8]
    assert [stage.backward_s for stage in found.stages] == [2.25, 4, 2, 10]
    assert [stage.output_bytes for stage in found.stages] == [5, 5, 5, 5]
    last_rank, rank_zero = found.memory
    assert (last_rank.parameters_bytes, last_rank.gradients_bytes) == (1 + 5 + 10 + 40, 5 + 10 + 40)
    assert (rank_zero.parameters_bytes, rank_zero.optimizer_bytes) == (1 + 50 + 50 + 7, 2 * (50 + 50 + 7))
    assert found.one_device_s == 0.75 + 5 * 3 + 15


@pytest.mark.parametrize(
    ("samples", "forward_s", "saved_bytes"), [(1, 1.0, 10), (4.5, 4.5, 45), (8, 8.0, 80), (16, 16.0, 160)]
)
def test_costs_follow_the_samples_of_a_micro_batch(samples: float, forward_s: float, saved_bytes: int) -> None:
    def measured(samples: int) -> MeasuredParts:
        part = PartCost(1.0 * samples, 2.0 * samples, 4, 10 * samples)
        return MeasuredParts(samples=samples, parts=[PartCost(), part, PartCost()])

    for chosen in ([1, 8], [8]):
        chain = ChainFigures(name="layers", measured=[*map(measured, chosen)], held=[HeldBytes(0, 0, 0)] * 3)
        part = chain.parts_of(samples)[1]
        assert (part.forward_s, part.saved_bytes) == (pytest.approx(forward_s), saved_bytes)


def test_stages_that_cannot_be_are_refused() -> None:
    parts = [PartCost()] * 4
    chain = ChainFigures(
        name="layers", measured=[MeasuredParts(samples=8, parts=parts)], held=[HeldBytes(0, 0, 0)] * 4,
        recompute=[1], num_stages=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="split_points makes 4 stages, and 2 ranks with 1 each have 2"):
        chain.plan("gpipe", 2, 1, 4, 8, "parameters")
    with pytest.raises(ValueError, match="activation_checkpointing is not possible under schedule='zero_bubble'"):
        chain.plan("zero_bubble", 2, 2, 4, 8, "parameters")
