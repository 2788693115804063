"""Calibration: measures this machine, or the hosts of a job, and makes the machine that plans are for.

::

    collectives   all_reduce, send_recv .. by size
    references    a tiny, a deep and a large model      what a step takes beyond its formula: a time for each batch,
                  under each strategy, in turn          tensor and pass, and how much longer transfers take

What a step takes beyond the formula is a weighted sum of its :class:`.Counts`. The models differ in them, so that their
steps give the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch

from lightning_multigpu.bench.collectives import collective_run
from lightning_multigpu.bench.collectives.collective_run import CollectivePlan
from lightning_multigpu.bench.collectives.implementations import IMPLEMENTATIONS
from lightning_multigpu.bench.collectives.operations import BY_NAME
from lightning_multigpu.bench.jobs.host_agents import HostAgents
from lightning_multigpu.bench.strategies import strategy_rank
from lightning_multigpu.bench.strategies.contenders import NO_COMMUNICATION, Contender, contender
from lightning_multigpu.bench.strategies.models import BenchMLP, Subject
from lightning_multigpu.bench.strategies.strategy_rank import StrategyPlan
from lightning_multigpu.bench.strategies.strategy_run import StrategyResult, StrategyRun, take_turns
from lightning_multigpu.callbacks.other_processes import Usage, share_of_others, usage
from lightning_multigpu.planning.pipelines.stage_costs import ChainFigures, MeasuredParts, PartCost
from lightning_multigpu.planning.pipelines.timeline import NOTHING, HeldBytes
from lightning_multigpu.planning.scaling.machine import (
    ALL_REDUCE,
    MESSAGE,
    QUIET,
    Link,
    Machine,
    MeasuredCollective,
    Point,
    ReferenceCost,
    World,
)
from lightning_multigpu.planning.scaling.model_profile import ModelProfile, Phases, SplitPart
from lightning_multigpu.planning.scaling.step_model import (
    RATIOS,
    Candidate,
    Counts,
    Prediction,
    predict,
)

RANK_MODULES = (collective_run.__name__, strategy_rank.__name__)
"""What the ranks of a calibration import."""
SIZES = (4 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20)
_SOME_BYTES, _SLOW_BYTES_PER_S = 8e6, 4e8
_LONGEST_CALL_S = 0.5
_ON_ONE_HOST = ("cpu_ps", "dp")
_DATA_PARALLEL = ("ring_ddp", "ddp_sharded", "sync_ps", "sharded_ps")
_REPETITIONS = 3
_TIMEOUT_S = 120.0
_ATTEMPTS = 3
SMALL = {"tiny": 6, "deep": 30}
"""Layers of the models that compute nearly nothing."""
_SMALL_WIDTH, _SMALL_BATCH, _LARGE_LAYERS = 64, 16, 6
PIPELINES = [f"pipeline_1f1b:num_micro_batches={number}" for number in (4, 16)]
_FORWARD_SHARE, _BACKWARD_SHARE, _OPTIMIZER_SHARE = 0.35, 0.6, 0.05
"""Of a step of the reference model."""
Steps = Mapping[tuple[str, str], float]
"""Model and label of a contender -> seconds of a step."""


def calibrated(
    hosts: HostAgents, device_type: str, base: Machine, tell: Callable[[str], object] = lambda what: None
) -> Machine:
    """The machine ``base``, whose measurements of other worlds stay, with those of the hosts' world.

    A collective of all agents; ``tell`` is told what is measured next. What other processes disturb is measured up to
    three times, and the least disturbed measurement counts.
    """
    placement = hosts.placement
    world = World(placement.num_nodes, placement.devices)
    gpus = range(placement.devices if device_type == "cuda" else 0)
    machine, most = base, 0.0
    for name, measure in (("collectives", with_collectives), ("reference steps", with_references)):
        tried: list[tuple[float, Machine]] = []
        while len(tried) < _ATTEMPTS and (not tried or min(share for share, _ in tried) > QUIET):
            tell(f"{name}, again: other processes are busy" if tried else name)
            before = [Usage(*each) for each in hosts.share(usage(gpus))]
            boots = {each.boot for each in before}
            shares = world.nodes > 1 and len(boots) == 1 and "" not in boots
            found = measure(hosts, device_type, replace(machine, shares_cores=shares or machine.shares_cores), world)
            after = [Usage(*each) for each in hosts.share(usage())]
            tried.append((share_of_others(before, after), found))
        share, machine = min(tried, key=lambda one: one[0])
        most = max(most, share)
    return replace(machine, disturbed={**base.disturbed, str(world): most})


def with_collectives(hosts: HostAgents, device_type: str, machine: Machine, world: World) -> Machine:
    """The machine with the times of the collectives of a world."""
    if world.size == 1:
        return machine
    found = []
    names = {
        ALL_REDUCE: "nccl" if device_type == "cuda" else "shared_memory" if world.nodes == 1 else "hierarchy",
        MESSAGE: "nccl" if device_type == "cuda" else "gloo",
    }
    for operation, name in names.items():
        points: list[Point] = []
        for sizes in (SIZES[:4], *([size] for size in SIZES[4:])):  # larger ones only where they do not take too long
            if points and sizes[-1] / points[-1].size_bytes * points[-1].seconds > _LONGEST_CALL_S:
                break
            plan = CollectivePlan(
                operations=[BY_NAME[operation]],
                implementations=[each for each in IMPLEMENTATIONS if each.name == name],
                sizes=sizes,
                device_type=device_type,
                dtype=torch.float32,
                repetitions=5,
                warm_up=1,
                timeout_s=_TIMEOUT_S,
            )
            rows = collective_run.measure(hosts, plan)
            points += [Point(row.size_bytes, row.seconds.median) for row in rows if row.seconds is not None]
        if len(points) > 1:
            found.append(MeasuredCollective(operation=operation, world=world, link=Link(points)))
    others = [each for each in machine.collectives if each.world != world]
    link = next((each.link for each in found if each.operation == MESSAGE), None)
    ends = {} if link is None else {"inside" if world.nodes == 1 else "between": link}
    return replace(machine, collectives=[*others, *found], **ends)  # type: ignore[arg-type]


def with_references(hosts: HostAgents, device_type: str, machine: Machine, world: World) -> Machine:
    """The machine with the costs that explain the steps of the reference models in a world."""
    if not 1 < world.size <= machine.cores(world):  # where ranks share cores, plans know nothing
        return machine
    width, batch_size = large_model(machine, world)
    subjects = {
        name: Subject(name, partial(BenchMLP, width=_SMALL_WIDTH, num_layers=layers), _SMALL_BATCH)
        for name, layers in SMALL.items()
    }
    subjects["large"] = Subject("large", partial(BenchMLP, width=width, num_layers=_LARGE_LAYERS), batch_size)
    names = [name for name in (*_DATA_PARALLEL, *_ON_ONE_HOST) if world.nodes == 1 or name not in _ON_ONE_HOST]
    names += [f"ring_ddp:compression={each}" for each in RATIOS if world.nodes > 1]
    every = [Contender(NO_COMMUNICATION), *map(contender, names)]
    split = contender("tensor_split")
    steps: dict[tuple[str, str], float] = {}
    for name, wanted in (  # ranks that wait for their turn take time of the cores, too
        ("large", every),
        ("tiny", every),
        ("deep", every),
        ("tiny", [*map(contender, PIPELINES), split]),
        ("deep", [contender(PIPELINES[0]), split]),
    ):
        plan = StrategyPlan(
            subject=subjects[name], device_type=device_type, repetitions=_REPETITIONS,
            steps=4 if name == "large" else 15, warm_up=1, timeout_s=_TIMEOUT_S,
        )  # fmt: skip
        rows = take_turns([StrategyRun(hosts, each, plan) for each in wanted])
        steps |= {(name, row.label): mean_s for row in rows if (mean_s := _mean_s(row)) is not None}
    found = costs(machine, world, steps, names, width, batch_size)
    return replace(machine, references=[*(each for each in machine.references if each.world != world), *found])


def _mean_s(row: StrategyResult) -> float | None:
    return None if row.step_s is None else fmean(row.rank_medians_s)


def large_model(machine: Machine, world: World) -> tuple[int, int]:
    """Width and batch of the large model, whose transfers take a good part of its step."""
    is_fast = _SOME_BYTES / machine.all_reduce_s(world, _SOME_BYTES) > _SLOW_BYTES_PER_S
    if machine.device_type == "cuda":
        return 1024, 1024
    return (1024, 64) if is_fast else (512, 256)


def costs(
    machine: Machine, world: World, steps: Steps, names: Sequence[str], width: int, batch_size: int
) -> list[ReferenceCost]:
    """The costs of data-parallel strategies ``names``, of pipelines and of split layers, where they have trained."""
    alone = {name: steps.get((name, NO_COMMUNICATION), 0.0) for name in (*SMALL, "large")}
    models = {
        name: reference_profile(_SMALL_WIDTH, layers, _SMALL_BATCH, alone[name], world.size)
        for name, layers in SMALL.items()
    }
    models["large"] = reference_profile(width, _LARGE_LAYERS, batch_size, alone["large"], world.size)
    micro = [label.partition(":")[2] for label in PIPELINES]
    of_data = [(model, "") for model in models]
    wanted: list[tuple[str, list[tuple[str, str]], list[str]]] = [
        *((name, of_data, ["fixed_s", "tensor_s", "scale"]) for name in names),
        (
            "pipeline_1f1b",
            [("tiny", micro[0]), ("tiny", micro[1]), ("deep", micro[0])],
            ["fixed_s", "tensor_s", "pass_s"],
        ),
        ("tensor_split", [("tiny", ""), ("deep", "")], ["fixed_s", "pass_s"]),
    ]
    found = []
    for strategy, cases, fields in wanted:
        rows: list[tuple[Prediction, float]] = []
        for model, option in cases:
            label = f"{strategy}:{option}" if option else strategy
            if (model, label) in steps:
                kind = contender(label)
                plain = ReferenceCost(strategy=strategy, world=world, scale=0.0)
                candidate = Candidate(strategy.partition(":")[0], kind.options)
                formula = predict(models[model], replace(machine, references=[plain]), candidate, world)
                rows.append((formula, steps[model, label]))
        if len(rows) == len(cases):
            found.append(ReferenceCost(strategy=strategy, world=world, **solved(rows, fields)))
    return found


def solved(rows: Sequence[tuple[Prediction, float]], fields: Sequence[str]) -> dict[str, float]:
    """The seconds of each count, 0 or more, that explain what steps take beyond their prediction without them.

    Where noise leaves nothing for transfers, they take as long as the formula has it.

    Args:
        rows: predictions, and the measured seconds.
        fields: those of :class:`.ReferenceCost` to find.
    """
    places = {"fixed_s": "batches", "tensor_s": "tensors", "pass_s": "passes", "scale": "transfers_s"}
    left = {each: Counts._fields.index(places[each]) for each in fields}
    seconds = torch.tensor([(step_s - formula.step_s) / step_s for formula, step_s in rows], dtype=torch.float64)
    while True:
        counts = [[formula.counts[place] / step_s for place in left.values()] for formula, step_s in rows]
        solution = torch.linalg.lstsq(torch.tensor(counts, dtype=torch.float64), seconds[:, None]).solution
        found = dict(zip(left, solution[:, 0].tolist(), strict=True))
        least = min(found, key=lambda each: found[each])
        if found[least] >= 0 or len(left) == 1:
            return {each: max(0.0, found.get(each, float(each == "scale"))) for each in fields}
        del left[least]


def reference_profile(width: int, num_layers: int, batch_size: int, step_s: float, num_ranks: int) -> ModelProfile:
    """A reference model, whose step takes ``step_s`` alone beside the other ranks; with a small one's split layers."""
    sizes = [
        parameter.nbytes for parameter in reversed(list(BenchMLP(width=width, num_layers=num_layers).parameters()))
    ]
    total, message = sum(sizes), 4 * batch_size * width
    shares = [(size, sum(sizes[: index + 1]) / total) for index, size in enumerate(sizes)]
    phases = Phases(
        forward_s=_FORWARD_SHARE * step_s, backward_s=_BACKWARD_SHARE * step_s, optimizer_s=_OPTIMIZER_SHARE * step_s
    )
    held, each_bytes = HeldBytes(total, total, 0), total // (num_layers + 1)
    layer = PartCost(phases.forward_s / (num_layers + 1), phases.backward_s / (num_layers + 1), message)
    parts = [PartCost(), *[layer] * (num_layers + 1), PartCost()]
    each = HeldBytes(each_bytes, each_bytes, 0)
    # n pairs of layers need 2n - 1 collectives: the input needs no gradient. What is small takes as long in parts.
    collectives = [("all_reduce", message)] * (2 * ((num_layers + 1) // 2) - 1)
    part = SplitPart(phases=phases, collectives=collectives, held=held, activations_bytes=0)
    return ModelProfile(
        name="reference",
        samples=batch_size,
        parameters=total // 4,
        held=held,
        activations_bytes=0,
        gradients=shares,
        phases=phases,
        splits={num_ranks: part},
        chain=ChainFigures(
            name="layers",
            measured=[MeasuredParts(samples=number, parts=parts) for number in (1, batch_size)],
            held=[NOTHING, *[each] * (num_layers + 1), NOTHING],
        ),
    )
