"""The profile of a run, from what its ranks have measured, each on its own clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lightning_multigpu.communication.metering.traffic import length, merged, overlaps
from lightning_multigpu.planning.diagnosis import diagnose
from lightning_multigpu.planning.rank_figures import MemoryUse, Pushes, RankFigures
from lightning_multigpu.planning.step_phases import PHASES, Span, seconds_of
from lightning_multigpu.planning.strategy_options import StrategyOptions
from lightning_multigpu.report.document import NamedStrategy, ServersSection
from lightning_multigpu.report.profile.pipelines import timed_pipelines
from lightning_multigpu.report.profile.profile_document import (
    MeasuredRank,
    ProfileDocument,
    ProfiledOperation,
    ProfiledRank,
    ProfiledStep,
)
from lightning_multigpu.report.profile.profile_sections import MEMORY
from lightning_multigpu.report.schema import from_json


def build(
    told: Sequence[Mapping[str, Any]],
    *,
    strategy: NamedStrategy,
    versions: Mapping[str, str],
    strategy_options: StrategyOptions | None = None,
) -> ProfileDocument:
    """The document.

    Args:
        told: of each rank in rank order: a :class:`MeasuredRank` with one step at least, as JSON, beside "servers",
            which are as in :class:`ProfileDocument`.
        strategy, versions: as in :class:`ProfileDocument`.
        strategy_options: the strategy by its class, whose options remedies name.
    """
    measured = [from_json(MeasuredRank, rank, f"rank {rank.get('rank')}") for rank in told]
    origin_s = min(rank.steps[0].start_s - rank.clock_offset_s for rank in measured)
    ranks = [_with_medians(rank, origin_s + rank.clock_offset_s) for rank in measured]
    figures = [_figures(rank) for rank in ranks]
    pipelines = timed_pipelines(ranks)
    servers = told[0].get("servers") and from_json(ServersSection, told[0]["servers"])
    return ProfileDocument(
        strategy=strategy,
        versions=versions,
        origin_s=origin_s,
        step_s=max(rank.step_s for rank in ranks),
        ranks=ranks,
        operations=max((_operations(rank.steps) for rank in ranks), key=lambda found: sum(o.sent_bytes for o in found)),
        findings=diagnose(
            figures,
            pipeline=pipelines[0].figures() if pipelines else None,
            shards=[server.bytes_in + server.bytes_out for server in servers.servers] if servers else [],
            strategy=strategy_options or StrategyOptions(),
            asynchronous=bool(servers and servers.workers),  # they alone have a staleness
        ),
        pipelines=[pipeline.step() for pipeline in pipelines] or None,
        servers=servers,
    )


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median over the steps of each figure by name, phases in their order before other names."""
    names = dict.fromkeys(name for step in steps for name in step)
    order = [*(phase for phase in PHASES if phase in names), *(name for name in names if name not in PHASES)]
    return {name: median(step.get(name, 0.0) for step in steps) for name in order}


def _with_medians(rank: MeasuredRank, behind_s: float) -> ProfiledRank:
    """The rank with times from the first counted step, and its medians."""
    steps = [step.earlier(behind_s) for step in rank.steps]
    step_s = median(step.seconds for step in steps)
    phases_s = medians([seconds_of(Span(a, b, phase) for phase, a, b in step.parts) for step in steps])
    # What is long by chance in a step is another phase each time: medians alone add up to less than a step.
    scale = max(1.0, step_s / sum(phases_s.values())) if any(phases_s.values()) else 1.0
    measured = {name: value for name, value in vars(rank).items() if name != "steps"}
    return ProfiledRank(
        **measured,
        steps=steps,
        step_s=step_s,
        phases_s={phase: seconds * scale for phase, seconds in phases_s.items()},
        transfers_s=median(length(step.under_way()) for step in steps),
        waits_s=medians([_waits(step) for step in steps]),
    )


def _waits(step: ProfiledStep) -> dict[str, float]:
    """Seconds of "communication" in which gradients, or activations of split layers, were under way."""
    exposed, carried = step.waiting("communication"), dict.fromkeys(t.carries for t in step.transfers)
    return {kind: length(overlaps(step.under_way(kind), exposed)) for kind in carried if kind is not None}


def _figures(rank: ProfiledRank) -> RankFigures:
    activations = [t for step in rank.steps for t in step.transfers if t.carries == "activations"]
    activations_s = sum(length(step.under_way("activations")) for step in rank.steps)
    return RankFigures(
        rank=rank.rank,
        host=rank.host,
        node=rank.node,
        phases_s=rank.phases_s,
        callbacks_s=rank.callbacks_s,
        hidden_s=rank.hidden_s,
        waits_s=rank.waits_s,
        activations_rate=sum(t.sent_bytes for t in activations) / (activations_s or 1.0),
        pushes=_pushes(rank.steps),
        batches=round(median(step.batches for step in rank.steps)),
        data_workers=rank.data_workers,
        threads=rank.threads,
        cores=rank.cores,
        reads=tuple(rank.reads),
        memory=_memory_use(rank),
        launches=rank.launches,
    )


def _pushes(steps: Sequence[ProfiledStep]) -> Pushes | None:
    """What parameter servers of other hosts get and send; None without any."""
    of_steps = [[t for t in s.transfers if t.group == "servers" and t.operation in ("push", "pull")] for s in steps]
    pushed = [[t for t in of_step if t.operation == "push" and t.sent_bytes > t.memory_bytes] for of_step in of_steps]
    if not any(pushed):
        return None
    seconds = median(length(merged((t.start_s, t.end_s) for t in of_step)) for of_step in of_steps)
    return Pushes(seconds, median(map(len, pushed)))


def _memory_use(rank: ProfiledRank) -> MemoryUse | None:
    """The most that all processes together had in use in the run, or torch on a GPU that only it could tell of."""
    held = rank.held_bytes
    of_device = held.pop("device_peak", None)
    used = rank.whole_run.get(MEMORY)
    peak_bytes = of_device if used is None else used.largest
    if peak_bytes is None or rank.limit is None:
        return None
    return MemoryUse(rank.limit[0], peak_bytes, rank.limit[1], held)


def _operations(steps: Sequence[ProfiledStep]) -> list[ProfiledOperation]:
    """The transfers of a rank by operation and group, for a step on average."""
    found: dict[tuple[str, str, int], list[list[tuple[float, float]]]] = {}
    totals: dict[tuple[str, str, int], list[float]] = {}
    for number, step in enumerate(steps):
        for operation, group, group_size, start_s, end_s, *sizes in step.transfers:
            key = operation, group, group_size
            found.setdefault(key, [[] for _ in steps])[number].append((start_s, end_s))
            totals[key] = [a + b / len(steps) for a, b in zip(totals.get(key, [0.0] * 4), (1, *sizes), strict=True)]
    names = ("count", "size_bytes", "sent_bytes", "memory_bytes")
    return [
        ProfiledOperation(
            operation=operation,
            group=group,
            group_size=group_size,
            seconds=sum(length(merged(of_step)) for of_step in found[operation, group, group_size]) / len(steps),
            **dict(zip(names, total, strict=True)),
        )
        for (operation, group, group_size), total in totals.items()
    ]
