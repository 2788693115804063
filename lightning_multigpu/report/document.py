"""The report of one run as a document, ``multigpu_report.json``: built, written to a file, and read back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_multigpu.planning.pipelines.timeline import StageRecord
from lightning_multigpu.planning.split_plan import SplitPlan
from lightning_multigpu.report.diagnosis import Finding, diagnose
from lightning_multigpu.report.pipelines import TimedPipeline, timed_pipelines
from lightning_multigpu.report.rank_figures import RankFigures
from lightning_multigpu.report.schema import ReportError, from_json
from lightning_multigpu.report.statistics import Aggregation, Statistics, aggregate_ranks

FILE_NAME = "multigpu_report.json"
SCHEMA_VERSION = 2
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The module: "package.Class", and the number of its parameters."""

    class_: str
    parameters: int
    trainable_parameters: int


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What ran, and on what.

    Attributes:
        date: start of the fit, "2026-11-22T12:00:00Z".
        wall_s: seconds of the fit, validation included.
        hardware: of the host of rank 0: "device" ("cpu" or "cuda"), "threads_per_rank", "processor", "cores",
            "usable_cores", "memory_bytes", "gpus" (names, under "cuda") and "system".
    """

    date: str
    wall_s: float
    model: TrainedModel
    precision: str
    hardware: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReportedWorld:
    """Ranks, nodes, and the host name of each node in their order."""

    size: int
    nodes: int
    hosts: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class RunMetrics:
    """Statistics of figures by key.

    A key is ``group/figure_unit`` with the groups ``throughput``, ``communication``, ``parameter_server`` and
    ``device``. A figure that has no meaning in a run is absent; numbers are finite.

    The statistics are ``median``, ``p95``, ``mean`` and ``last``. The first three are over all optimizer steps of the
    fit but the first, which pays for allocations and kernel tuning (over the first if there is no other), for
    ``device/`` keys over all samples. The mean of a rate is total over total time. ``p95`` is the value that 95 % of
    the steps stay below, so for rates it is the fast end. Median and ``p95`` are of the newest 65,536 steps at most. Of
    all ranks together, each statistic is the sum, maximum or mean of the ranks that have the figure, as
    ``lightning_multigpu.callbacks.KEYS`` says.
    """

    metrics: Mapping[str, Statistics]


@dataclass(frozen=True, kw_only=True)
class ReportedRank(RunMetrics):
    """A rank with its host."""

    rank: int
    host: str


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """Bytes that a rank held at the end of training.

    Attributes:
        gradients_bytes: with the buffers in which gradients travel.
        optimizer_bytes: without states in the host's memory, or on servers.
        activations_bytes: the most that autograd kept for backward in a step, if ProfilerReport was asked for it.
        device_peak_bytes: on GPUs, the most that torch had allocated.
    """

    rank: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int | None = None
    device_peak_bytes: int | None = None

    @property
    def kinds_bytes(self) -> dict[str, int]:
        """The bytes by kind: "parameters", ..., "device_peak"."""
        kinds = {name.removesuffix("_bytes"): held for name, held in vars(self).items() if name.endswith("_bytes")}
        return {kind: held for kind, held in kinds.items() if held is not None}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Profiled optimizer steps, and what would make them shorter.

    Attributes:
        step_s: median optimizer step, in seconds, of the rank with the longest one.
        ranks: one a rank, in rank order.
        findings: the largest saving first.
        pipelines: side by side; those of which a step was timed.
    """

    step_s: float
    ranks: Sequence[RankFigures]
    findings: Sequence[Finding]
    pipelines: Sequence[TimedPipeline] = ()

    def __post_init__(self) -> None:
        ranks = {rank.rank for rank in self.ranks}
        if not self.step_s > 0 or not all(rank.step_s > 0 for rank in self.ranks):
            raise ReportError("the profile has no step of some rank")
        if not ranks or not ranks.issuperset(finding.rank for finding in self.findings):
            raise ReportError("the profile has a finding of a rank that it lacks")

    @property
    def shown(self) -> RankFigures:
        """The rank of the first finding; without any, the one that computes for longest."""
        if self.findings:
            return next(rank for rank in self.ranks if rank.rank == self.findings[0].rank)
        return max(self.ranks, key=lambda rank: rank.own_s)


@dataclass(frozen=True, kw_only=True)
class MemberChange:
    """A change of the ranks that train together under ``ft_ddp``.

    Attributes:
        step: optimizer steps done.
        time_s: seconds since the epoch.
        lost, joined: ranks; a rank that was started again may be in both.
        members: ranks that go on.
        seconds: from the failed sum, or the meeting, until they go on.
    """

    step: int
    time_s: float
    lost: Sequence[int]
    joined: Sequence[int]
    members: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RunDocument(RunFacts):
    """``multigpu_report.json``, version 2.

    Attributes:
        strategy: "name", to pass to ``Trainer(strategy=...)``, and "options", those that are not at their default.
        versions: of the software, by name.
        steps: optimizer steps of the fit; under ``async_ps`` the sum of the ranks' steps.
        ranks: one a rank, in rank order.
        aggregate: the figures of all ranks together.
        global_batch: samples of an optimizer step with full batches, all ranks together; absent where the samples of a
            batch are not known, and under ``async_ps``.
        communication_ms: the parts of ``communication/total_ms`` by purpose, means over the steps but the first and
            over the ranks; parts that overlap in time add up to more than the total. Only where a meter measured.
        memory: one a rank.
        parameter_servers: only where servers made the updates: "servers", each with "server" and the "weights_bytes" of
            its shards; and under ``async_ps`` "workers", each with "rank", "updates", and the "median", "p95" and "max"
            of its "staleness": the updates that other ranks made between its pull of the weights and its update. A
            rank that was lost is in "workers" and not in ``ranks``.
        tensor_split: only where layers were split over ranks.
        member_changes: ranks that were lost, or came in; only where there are any.
        profile: only of a ProfilerReport.
    """

    schema_version: int = SCHEMA_VERSION
    strategy: Mapping[str, Any]
    world: ReportedWorld
    versions: Mapping[str, str]
    steps: int
    ranks: Sequence[ReportedRank]
    aggregate: RunMetrics
    global_batch: int | None = None
    communication_ms: Mapping[str, float] | None = None
    memory: Sequence[HeldMemory] | None = None
    parameter_servers: Mapping[str, Any] | None = None
    tensor_split: SplitPlan | None = None
    member_changes: Sequence[MemberChange] | None = None
    profile: Profile | None = None


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The part of one rank in a report: its place and its measurements."""

    rank: int
    node: int
    host: str
    steps: int
    metrics: Mapping[str, Statistics]
    step_samples: int | None = None
    """The most samples that it has trained on in one optimizer step; None where that is not known."""
    communication_ms: Mapping[str, float] = field(default_factory=dict)
    """Its communication in a step by purpose, in ms."""
    memory: HeldMemory | None = None
    """The memory that it held at the end of training."""
    profiled: RankFigures | None = None
    stages: StageRecord | None = None
    """The stages of a pipeline that it had, where they were recorded."""


def build(
    records: Sequence[RankRecord],
    facts: RunFacts,
    *,
    strategy: Mapping[str, Any],
    versions: Mapping[str, str],
    aggregations: Mapping[str, Aggregation],
    parameter_servers: Mapping[str, Any] | None = None,
    tensor_split: SplitPlan | None = None,
    member_changes: Sequence[MemberChange] | None = None,
    all_options: Mapping[str, Any] = MappingProxyType({}),
) -> RunDocument:
    """The report of a run, from one record a rank in any order, and other fields of :class:`RunDocument`.

    ``aggregations`` say how each key's values become the run's; the keys of the report come in this order.
    ``all_options`` are the strategy's, which remedies may change. There is a profile if each rank has profiled a step.
    """
    in_order = sorted(records, key=lambda record: record.rank)
    ranks = [record.rank for record in in_order]
    is_asynchronous = bool(parameter_servers and parameter_servers["workers"])  # then ranks may be lost
    hosts: dict[int, str] = {}
    for record in in_order:
        hosts.setdefault(record.node, record.host)
    samples = [record.step_samples for record in in_order if record.step_samples is not None]
    purposes = dict.fromkeys(purpose for record in in_order for purpose in record.communication_ms)
    held = [record.memory for record in in_order if record.memory is not None]
    return RunDocument(
        **vars(facts),
        strategy=strategy,
        world=ReportedWorld(size=len(ranks), nodes=len(hosts), hosts=[hosts[node] for node in sorted(hosts)]),
        versions=versions,
        steps=(sum if is_asynchronous else max)(record.steps for record in in_order),
        ranks=[
            ReportedRank(
                rank=r.rank, host=r.host, metrics={key: r.metrics[key] for key in aggregations if key in r.metrics}
            )
            for r in in_order
        ],
        aggregate=RunMetrics(metrics=aggregate_ranks([record.metrics for record in in_order], aggregations)),
        global_batch=sum(samples) if not is_asynchronous and len(samples) == len(ranks) else None,
        communication_ms={
            purpose: sum(record.communication_ms.get(purpose, 0.0) for record in in_order) / len(in_order)
            for purpose in purposes
        }
        or None,
        memory=held if len(held) == len(ranks) else None,
        parameter_servers=parameter_servers,
        tensor_split=tensor_split,
        member_changes=member_changes or None,
        profile=_profile(in_order, is_asynchronous, all_options),
    )


def _profile(records: Sequence[RankRecord], is_asynchronous: bool, options: Mapping[str, Any]) -> Profile | None:
    ranks = [record.profiled for record in records if record.profiled is not None and record.profiled.steps]
    if len(ranks) < len(records):
        return None
    pipelines = timed_pipelines([(each.rank, each.node, each.stages) for each in records if each.stages is not None])
    pipeline = pipelines[0].figures() if pipelines else None
    findings = diagnose(ranks, pipeline=pipeline, options=options, asynchronous=is_asynchronous)
    step_s = max(rank.step_s for rank in ranks)
    return Profile(step_s=step_s, ranks=ranks, findings=findings, pipelines=pipelines)


def encoded(report: Mapping[str, Any]) -> bytes:
    """The file of a document. Raises ``ValueError`` where a number is not finite."""
    return (json.dumps(report, indent=2, allow_nan=False) + "\n").encode()


def write(report: Mapping[str, Any], path: Path) -> None:
    """Writes a document as :func:`write_bytes` does."""
    write_bytes(encoded(report), path)


def write_bytes(contents: bytes, path: Path) -> None:
    """Writes a file atomically: readers see the old file or the new one, never a part of it.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    with open(temporary, "xb") as file:  # with the rights that the umask leaves, and no link is followed
        try:
            file.write(contents)
            file.flush()
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def read(path: Path) -> RunDocument:
    """Reads a document back.

    Control characters in its texts, which may come from a stranger and be meant for a terminal, are replaced.

    Raises:
        ReportError: it is no JSON, of another version, or does not follow the schema.
        OSError: there is no such file, or it cannot be read.
    """
    try:
        found = _printable(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:  # no text, no JSON, a number or a depth beyond Python's limits
        raise ReportError(f"the report is no JSON: {error}") from error
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION:
        raise ReportError(f"schema_version={version!r:.80}: only version {SCHEMA_VERSION} can be read")
    return from_json(RunDocument, found)


def _printable(value: Any) -> Any:
    """What JSON has read, without control characters in its texts and keys other than tabs and ends of lines."""
    if isinstance(value, str):
        return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return {_printable(key): _printable(item) for key, item in value.items()} if isinstance(value, dict) else value
