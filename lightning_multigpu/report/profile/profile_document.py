"""The profile of a run as a document, ``profile.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from lightning_multigpu.communication.metering.traffic import length, merged, overlaps, sent_share
from lightning_multigpu.planning.diagnosis import Finding
from lightning_multigpu.planning.pipelines.timeline import StageRecord
from lightning_multigpu.planning.rank_figures import LaunchQueue, ReadValues
from lightning_multigpu.report import document
from lightning_multigpu.report.document import NamedStrategy, ServersSection
from lightning_multigpu.report.schema import Absent, ReportError, from_json

FILE_NAME = "profile.json"
SCHEMA_VERSION = 1


class PhaseInterval(NamedTuple):
    """A part of a step, ``[phase, start_s, end_s]``.

    The phase is one of :data:`lightning_multigpu.planning.step_phases.PHASES`.
    """

    phase: str
    start_s: float
    end_s: float


class ProfiledTransfer(NamedTuple):
    """A transfer between ranks, as the meter has it.

    ``[operation, group, group_size, start_s, end_s, size_bytes, sent_bytes, memory_bytes]``
    """

    operation: str
    group: str
    group_size: int
    start_s: float
    end_s: float
    size_bytes: float
    sent_bytes: float
    memory_bytes: float

    @property
    def carries(self) -> str | None:
        """What a group of the meter carries, where its length follows the steps or the samples, not the batches."""
        if self.group in ("data", "shards", "servers", "host"):
            return "gradients"
        return "activations" if self.group.startswith("tensor") else None


class OperatorTime(NamedTuple):
    """An operator, ``[name, calls, cpu_s, gpu_s]``: its seconds are without those of operators within it."""

    name: str
    calls: float
    cpu_s: float
    gpu_s: float


class RunFigure(NamedTuple):
    """A figure over the whole run, ``[median, last, largest]``."""

    median: float
    last: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class ProfiledStep:
    """An optimizer step of a rank; its parts have no gaps and do not overlap."""

    start_s: float
    end_s: float
    batches: int
    parts: Sequence[PhaseInterval]
    transfers: Sequence[ProfiledTransfer]

    def earlier(self, by_s: float) -> ProfiledStep:
        """The step on a clock that is behind."""
        return ProfiledStep(
            start_s=self.start_s - by_s,
            end_s=self.end_s - by_s,
            batches=self.batches,
            parts=[PhaseInterval(phase, start_s - by_s, end_s - by_s) for phase, start_s, end_s in self.parts],
            transfers=[t._replace(start_s=t.start_s - by_s, end_s=t.end_s - by_s) for t in self.transfers],
        )

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def under_way(self, carries: str | None = None) -> list[tuple[float, float]]:
        """When transfers were under way, of all kinds or of one."""
        return merged((t.start_s, t.end_s) for t in self.transfers if carries in (None, t.carries))

    def waiting(self, *phases: str) -> list[tuple[float, float]]:
        """When the rank was in these phases."""
        return [(start_s, end_s) for phase, start_s, end_s in self.parts if phase in phases]


@dataclass(frozen=True, kw_only=True)
class MeasuredRank:
    """What a rank has measured.

    Attributes:
        threads: intra-op threads.
        cores: cores that the processes of its host may use.
        data_workers: worker processes of its DataLoader; null if unknown.
        clock_offset_s: the clock of its times minus the clock of its host, in seconds.
        callbacks_s: seconds of a step by hook, medians, of the hooks that take the most time.
        operators: of one step: those with the most time of their own.
        reads: functions that wait for values of tensors, in a step.
        steps: the counted steps.
        stages: a pipeline's record; null without one.
        is_metered: whether its strategy measures transfers.
        memory: bytes at the end of the window by kind, the fields of
            :class:`lightning_multigpu.planning.pipelines.timeline.StageMemory`.
        limit: "GPU", "host" or "container" that it trains in, and its bytes.
        whole_run: figures of the whole run, by the key of a monitor.
        launches: of a step on a GPU.
        trace: the file of torch's profiler with the operators of a step, on the rank's host.
    """

    rank: int
    node: int
    host: str
    threads: int
    cores: int
    data_workers: int | None
    clock_offset_s: float
    callbacks_s: Mapping[str, float]
    operators: Sequence[OperatorTime]
    reads: Sequence[ReadValues]
    steps: Sequence[ProfiledStep]
    stages: StageRecord | None
    is_metered: bool = True
    memory: Absent[Mapping[str, int | None]] = None
    limit: Absent[tuple[str, int]] = None
    whole_run: Mapping[str, RunFigure] = field(default_factory=dict)
    launches: Absent[LaunchQueue] = None
    trace: Absent[str] = None

    @property
    def held_bytes(self) -> dict[str, int]:
        """The bytes that it holds by kind: "parameters", ...; empty if they were not measured."""
        return {kind.removesuffix("_bytes"): n for kind, n in (self.memory or {}).items() if n is not None}


@dataclass(frozen=True, kw_only=True)
class ProfiledRank(MeasuredRank):
    """A rank with its medians over its steps.

    Attributes:
        phases_s: by phase; where medians of phases add up to less than a step, they are scaled up to it.
        transfers_s: time with transfers under way, hidden or not.
        waits_s: the parts of "communication" in which "gradients" and weights travel, or "activations" of split layers.
    """

    step_s: float
    phases_s: Mapping[str, float]
    transfers_s: float
    waits_s: Mapping[str, float]

    @property
    def hidden_s(self) -> float:
        """Seconds of a step in which transfers were under way behind the rank's other phases; the median."""
        waits = ("communication", "stage_wait")
        return median(
            length(step.under_way()) - length(overlaps(step.under_way(), step.waiting(*waits))) for step in self.steps
        )


@dataclass(frozen=True, kw_only=True)
class ProfiledOperation:
    """The transfers of a step by operation and group, on average; seconds with one under way at least."""

    operation: str
    group: str
    group_size: int
    count: float
    size_bytes: float
    sent_bytes: float
    memory_bytes: float
    seconds: float

    @property
    def algbw(self) -> float:
        """Bytes a second while it is under way, as nccl-tests reckons them: size over time; 0 if it has no time."""
        return self.size_bytes / self.seconds if self.seconds else 0.0

    @property
    def busbw(self) -> float:
        """:attr:`algbw` times the share of the size that each rank sends; 0 of one that sends nothing, as a pull."""
        return self.algbw * sent_share(self.operation, self.group_size) if self.algbw else 0.0


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """A rank of a pipeline in one step.

    Attributes:
        seconds: in "forward", "backward" and "weight" passes, in "send" and "receive", and "idle"; together ``wall_s``
            of the step.
        bubble: 1 - busy / wall, where forward, backward and weight passes are busy.
    """

    rank: int
    seconds: Mapping[str, float]
    bubble: float


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """A pipeline's step with the median wall time among the newest nine that ran all micro-batches together.

    On GPUs one step in 16 is timed.

    Attributes:
        wall_s: from the first pass of any rank of the pipeline to the last.
        bubble: the mean of the ranks' bubbles.
        theoretical_bubble: that of equal stages, whose messages take no time, see
            :func:`lightning_multigpu.planning.pipelines.timeline.theoretical`.
        ranks: by position.
    """

    schedule: str
    num_micro_batches: int
    wall_s: float
    bubble: float
    theoretical_bubble: float
    ranks: Sequence[PipelineRank]


@dataclass(frozen=True, kw_only=True)
class ProfileDocument:
    """``profile.json``, version 1. Times are in seconds by the clocks of the hosts, from the first counted step.

    Attributes:
        strategy, versions: as in ``multigpu_report.json``.
        origin_s: that beginning, since 1970.
        step_s: median optimizer step of the slowest rank.
        ranks: one a rank, in rank order.
        operations: transfers between ranks, of the rank that sends most.
        findings: the largest saving first, then those that save nothing.
        pipelines: side by side; only where the model was split into stages and a step was timed.
        servers: only where parameter servers made the updates.
    """

    schema_version: int = SCHEMA_VERSION
    strategy: NamedStrategy
    versions: Mapping[str, str]
    origin_s: float
    step_s: float
    ranks: Sequence[ProfiledRank]
    operations: Sequence[ProfiledOperation]
    findings: Sequence[Finding]
    pipelines: Absent[Sequence[PipelineStep]] = None
    servers: Absent[ServersSection] = None

    def __post_init__(self) -> None:
        if not self.step_s > 0 or not self.ranks or not all(rank.steps for rank in self.ranks):
            raise ReportError("the document has no step of some rank")

    @property
    def slowest(self) -> ProfiledRank:
        """The rank with the longest step."""
        return max(self.ranks, key=lambda rank: rank.step_s)

    @property
    def savings(self) -> list[Finding]:
        """The findings that save time."""
        return [finding for finding in self.findings if finding.saving_s > 0]

    @property
    def limits(self) -> list[Finding]:
        """The findings that save no time: limits that the run is near to."""
        return [finding for finding in self.findings if finding.saving_s <= 0]

    @property
    def unmeasured(self) -> str | None:
        """A sentence on transfers of gradients that are not measured; None where they are, or one rank trains."""
        if len(self.ranks) == 1 or self.ranks[0].is_metered:
            return None
        return (
            f'{self.strategy.name} does not measure its transfers, which count as backward; strategy="ring_ddp" does.'
        )


def read(path: Path) -> ProfileDocument:
    """Reads a profile back; raises as :func:`.document.read` does, or that the document does not follow the schema."""
    return from_json(ProfileDocument, document.read(path, kind="profile", schema_version=SCHEMA_VERSION))
