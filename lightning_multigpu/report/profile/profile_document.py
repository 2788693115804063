"""The profile of a run as a JSON document, ``profile.json``, and its timeline.

Version 1, all times in seconds on the clock of rank 0, from the beginning of the first counted step of any rank::

    {
      "schema_version": 1,
      "strategy": {"name": str, "options": {option: any JSON}},   the options that are not at their default
      "versions": {software: str},
      "origin_s": number,                                         that beginning on the clock of rank 0
      "step_s": number,                                           median optimizer step of the slowest rank
      "ranks": [RANK],                                            one a rank, in rank order
      "operations": [OPERATION],                                  transfers between ranks, of the rank with the most
      "link_gbit": number or null,                                speed of the link between hosts, as it was given
      "trial": {"threads": int, "step_s": number} or null,        steps with fewer threads, where they were tried
      "servers": SERVERS,                                         only where parameter servers made the updates
      "findings": [FINDING]                                       the largest saving first, then those that save nothing
    }
    RANK = {"rank": int, "node": int, "host": str, "threads": int, "cores": int, "data_workers": int or null,
            "clock": {"offset_s": number, "error_s": number},     its clock minus that of rank 0, and the most by which
                                                                  that can be wrong
            "is_metered": bool,                                   whether its strategy measures transfers
            "step_s": number, "phases_s": {PHASE: number},        medians over its steps; where those of phases add up
                                                                  to less than a step, they are scaled up to it
            "callbacks_s": {hook: number},                        medians, of the hooks that take the most time
            "transfers_s": number,                                time with transfers under way, hidden or not; median
            "waits_s": {"gradients" or "activations": number},    the parts of "communication" in which gradients and
                                                                  weights, or activations of split layers, travel
            "operators": [[name, calls, cpu_s, gpu_s]],           of one step: those with the most time of their own
            "reads": [[line, count, share]],                      values of tensors that a line reads in a step, and
                                                                  the share of the step that it takes
            "steps": [STEP], "stages": STAGES or null,
            "memory": {KIND: int or null},                        of the rank, at the end of the window
            "limit": [place, limit_bytes],                        of the "GPU", "host" or "container" that it trains in
            "over_time": {key: [[at_s, median, largest]]},        stretches of the run, in seconds from its start
            "launches": {"kernels": int, "busy_s": number, "queued": int} or null}      of a step on a GPU
    STEP = {"start_s": number, "end_s": number, "batches": int, "parts": [[PHASE, start_s, end_s]],
            "transfers": [[operation, group, group_size, start_s, end_s, size_bytes, sent_bytes, memory_bytes]]}
    OPERATION = {"operation": str, "group": str, "group_size": int, "count": number, "size_bytes": number,
                 "sent_bytes": number, "memory_bytes": number, "seconds": number}          of a step, on average;
                                                                  seconds with one under way at least
    FINDING = {"kind": str, "saving_s": number, "step_s": number, "evidence": str, "remedy": str}

The PHASEs are :data:`lightning_multigpu.planning.step_phases.PHASES`; the parts of a step have no gaps and do not
overlap. STAGES are the fields of :class:`lightning_multigpu.planning.pipelines.timeline.StageRecord`, KINDs those of
:class:`~lightning_multigpu.planning.pipelines.timeline.StageMemory`, and "launches" those of
:class:`lightning_multigpu.planning.launch_queue.LaunchQueue`. SERVERS are as in ``multigpu_report.json``
(:mod:`lightning_multigpu.report.schema`); a worker has its "histogram" as well: [[staleness, updates]]. A key of
"over_time" is that of a monitor. "memory", "limit", "over_time", "launches" and "is_metered" may be absent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lightning_multigpu.communication.metering.traffic import length, merged, overlaps, sent_share
from lightning_multigpu.planning.diagnosis import diagnose
from lightning_multigpu.planning.launch_queue import LaunchQueue
from lightning_multigpu.planning.pipelines.pipeline_figures import PipelineFigures
from lightning_multigpu.planning.pipelines.timeline import (
    HeldBytes,
    Interval,
    StageMemory,
    StageRecord,
    StepTimeline,
    median_step,
)
from lightning_multigpu.planning.rank_figures import (
    MemoryUse,
    Pushes,
    RankFigures,
    ReadValues,
    ThreadTrial,
)
from lightning_multigpu.planning.step_phases import PHASES, Span, seconds_of
from lightning_multigpu.planning.strategy_options import StrategyOptions
from lightning_multigpu.report import document
from lightning_multigpu.report.pipeline_section import PipelineReport
from lightning_multigpu.report.profile import run_curves

FILE_NAME = "profile.json"
TRACE_NAME = "profile_trace.json"
SCHEMA_VERSION = 1
_KEPT = ("rank", "node", "host", "threads", "cores", "data_workers", "clock", "operators", "reads")
_PHASE_TRACKS = {
    "data_wait": "data loading",
    "device_transfer": "host-to-device copies",
    "forward": "compute",
    "backward": "compute",
    "optimizer": "optimizer",
    "communication": "idle: waits for transfers",
    "stage_wait": "idle: waits for other stages",
    "callbacks": "callbacks",
    "other": "Lightning's loop",
}
_WHERE_MEASURED = ("memory", "limit", "over_time", "launches")


def build(
    told: Sequence[Mapping[str, Any]],
    *,
    strategy: str,
    options: Mapping[str, Any],
    versions: Mapping[str, str],
    strategy_options: StrategyOptions | None = None,
    link_gbit: float | None = None,
) -> dict[str, Any]:
    """The document.

    Args:
        told: what each rank has measured, on its own clock, in rank order; each has at least one step.
        strategy, options, versions: as in :func:`.document.build`.
        strategy_options: the strategy by its class, whose options remedies name.
        link_gbit: Gbit/s of the link between hosts.
    """
    origin_s = min(rank["steps"][0]["start_s"] - rank["clock"]["offset_s"] for rank in told)
    ranks = [_rank(rank, origin_s + rank["clock"]["offset_s"]) for rank in told]
    figures = [_figures(rank) for rank in ranks]
    trial = told[0]["trial"]
    tried = None
    if trial is not None:
        slowest_s = max(rank["trial"]["step_s"] for rank in told if rank["trial"] is not None)
        trial = {"threads": trial["threads"], "step_s": slowest_s}
        tried = ThreadTrial(ranks[0]["threads"], max(f.step_s for f in figures), trial["threads"], slowest_s)
    servers = told[0].get("servers")
    shards = [s["bytes_in"] + s["bytes_out"] for s in servers["servers"]] if servers else []
    asynchronous = bool(servers and servers["workers"])  # they alone have a staleness
    findings = diagnose(
        figures,
        pipeline=_pipeline(ranks),
        trial=tried,
        shards=shards,
        strategy=strategy_options or StrategyOptions(),
        asynchronous=asynchronous,
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "strategy": {"name": strategy, "options": dict(options)},
        "versions": dict(versions),
        "origin_s": origin_s,
        "step_s": max(rank["step_s"] for rank in ranks),
        "ranks": ranks,
        "operations": max((_operations(rank["steps"]) for rank in ranks), key=_bytes),
        "link_gbit": link_gbit,
        "trial": trial,
        **({"servers": servers} if servers else {}),
        "findings": [asdict(finding) for finding in findings],
    }


def read(path: Path) -> dict[str, Any]:
    """Reads a document back; raises as :func:`.document.read` does."""
    return document.read(path, kind="profile", schema_version=SCHEMA_VERSION)


def by_saving(profile: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The findings that save time, and those that save none, in their order."""
    findings = profile["findings"]
    return [f for f in findings if f["saving_s"] > 0], [f for f in findings if f["saving_s"] <= 0]


def hidden_s(rank: Mapping[str, Any]) -> float:
    """Seconds of a step in which transfers were under way behind the rank's other phases; the median."""
    return median(
        length(_under_way(step)) - length(overlaps(_under_way(step), _waiting(step))) for step in rank["steps"]
    )


def _under_way(step: Mapping[str, Any]) -> list[tuple[float, float]]:
    return merged((start_s, end_s) for *_, start_s, end_s, _, _, _ in step["transfers"])


def _waiting(step: Mapping[str, Any], *phases: str) -> list[tuple[float, float]]:
    return [(a, b) for phase, a, b in step["parts"] if phase in (phases or ("communication", "stage_wait"))]


def unmeasured(profile: Mapping[str, Any]) -> str | None:
    """A sentence on transfers of gradients that are not measured; None where they are, or one rank trains."""
    if len(profile["ranks"]) == 1 or profile["ranks"][0].get("is_metered", True):
        return None
    name = profile["strategy"]["name"]
    return f'{name} does not measure its transfers, which count as backward; strategy="ring_ddp" does.'


def clock_error_s(profile: Mapping[str, Any]) -> float:
    """The largest possible error of a rank's times on the clock of rank 0; 0 where clocks were not compared."""
    return max(float(rank["clock"]["error_s"]) for rank in profile["ranks"])


def memory(profile: Mapping[str, Any]) -> dict[int, dict[str, int]]:
    """Bytes that each rank holds, by kind; of the ranks where they were measured."""
    return {rank["rank"]: held for rank in profile["ranks"] if (held := _held(rank))}


def pipelines(profile: Mapping[str, Any]) -> PipelineReport:
    """The pipelines of the run, as a :class:`~lightning_multigpu.callbacks.RunReport` has them."""
    return PipelineReport(
        [
            document.RankRecord(
                rank=rank["rank"],
                node=rank["node"],
                host=rank["host"],
                steps=len(rank["steps"]),
                metrics={},
                stages=None if rank["stages"] is None else _stages(rank["stages"]),
            )
            for rank in profile["ranks"]
        ]
    )


def trace(profile: Mapping[str, Any], operators: Sequence[Sequence[Any]] = ()) -> dict[str, Any]:
    """The timeline as Chrome's trace events: a process for each rank, and in it a track for each kind of activity.

    Transfers of one operation that overlap get further tracks: events of a track are nested or apart.

    Args:
        profile: the document.
        operators: of each rank, in rank order, on its own clock: name, thread, start and end in seconds.
    """
    events: list[dict[str, Any]] = []
    for rank, of_rank in zip(profile["ranks"], operators or [()] * len(profile["ranks"]), strict=True):
        used = {phase for step in rank["steps"] for phase, *_ in step["parts"]}
        named = dict.fromkeys(track for phase, track in _PHASE_TRACKS.items() if phase in used)
        tracks = _Tracks(rank["rank"], f"rank {rank['rank']} on {rank['host']}", named)
        behind_s = profile["origin_s"] + rank["clock"]["offset_s"]
        for step in rank["steps"]:
            for phase, start_s, end_s in step["parts"]:
                tracks.add(_PHASE_TRACKS[phase], phase, start_s, end_s)
        for step in [] if rank["stages"] is None else rank["stages"]["steps"]:
            for i in step["timeline"]:
                name, of_stage = f"{i['kind']}, micro-batch {i['micro_batch']}", f"pipeline stage {i['stage']}"
                tracks.add(of_stage, name, i["start_s"] - behind_s, i["end_s"] - behind_s)
        for operation, group, _, start_s, end_s, size_bytes, sent_bytes, _ in sorted(
            (t for step in rank["steps"] for t in step["transfers"]), key=lambda t: t[3]
        ):
            name, sizes = f"{operation} ({group})", {"size_bytes": size_bytes, "sent_bytes": sent_bytes}
            tracks.add(name, name, start_s, end_s, apart=True, args=sizes)
        for thread in sorted({thread for _, thread, *_ in of_rank}):
            kind = f"operators, thread {thread}" if thread >= 0 else f"GPU stream {-1 - thread}"
            for name, _, start_s, end_s in (event for event in of_rank if event[1] == thread):
                tracks.add(kind, name, start_s - behind_s, end_s - behind_s)
        events += tracks.events
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Tracks:
    """The tracks of a rank: those that are ``named``, and others in the order in which they get an event."""

    def __init__(self, pid: int, name: str, named: Iterable[str]) -> None:
        self.events: list[dict[str, Any]] = [_name("process_name", pid, 0, name)]
        self._pid = pid
        self._ends_s: dict[str, float] = {}
        for track in named:
            self._number(track)

    def add(self, track: str, name: str, start_s: float, end_s: float, *, apart: bool = False, **more: Any) -> None:
        """Adds an event; one that is ``apart`` goes to the first track of that name which is free again."""
        lane, count = track, 1
        while apart and self._ends_s.get(lane, start_s) > start_s:
            count += 1
            lane = f"{track}, {count}"
        number = self._number(lane)
        self._ends_s[lane] = end_s
        times_us = {"ts": round(1e6 * start_s, 3), "dur": round(1e6 * (end_s - start_s), 3)}
        self.events.append({"ph": "X", "name": name, "pid": self._pid, "tid": number, **times_us, **more})

    def _number(self, track: str) -> int:
        if track not in self._ends_s:
            self._ends_s[track] = -math.inf
            self.events.append(_name("thread_name", self._pid, len(self._ends_s), track))
        return list(self._ends_s).index(track) + 1


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _rank(told: Mapping[str, Any], origin_s: float) -> dict[str, Any]:
    """A rank with its times on the clock of rank 0, and its medians."""
    steps = [
        {
            "start_s": step["start_s"] - origin_s,
            "end_s": step["end_s"] - origin_s,
            "batches": step["batches"],
            "parts": [[phase, start_s - origin_s, end_s - origin_s] for phase, start_s, end_s in step["parts"]],
            "transfers": [[*t[:3], t[3] - origin_s, t[4] - origin_s, *t[5:]] for t in step["transfers"]],
        }
        for step in told["steps"]
    ]
    phases = [seconds_of(Span(start_s, end_s, phase) for phase, start_s, end_s in step["parts"]) for step in steps]
    callbacks = [step["callbacks_s"] for step in told["steps"]]
    step_s = median(step["end_s"] - step["start_s"] for step in steps)
    phases_s = _medians(phases)
    # What is long by chance in a step is another phase each time: medians alone add up to less than a step.
    scale = max(1.0, step_s / sum(phases_s.values())) if any(phases_s.values()) else 1.0
    return {
        **{key: told[key] for key in _KEPT},
        "step_s": step_s,
        "phases_s": {phase: seconds * scale for phase, seconds in phases_s.items()},
        "callbacks_s": _medians(callbacks),
        "transfers_s": median(length(_under_way(step)) for step in steps),
        "waits_s": _medians([_waits(step) for step in steps]),
        "steps": steps,
        "stages": told["stages"],
        **{key: told[key] for key in _WHERE_MEASURED if told.get(key)},
        "is_metered": bool(told.get("is_metered", True)),
    }


def _waits(step: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of "communication" in which gradients, or activations of split layers, were under way."""
    exposed = _waiting(step, "communication")
    found: dict[str, list[tuple[float, float]]] = {}
    for _, group, _, start_s, end_s, *_ in step["transfers"]:
        if (kind := _carried(group)) is not None:
            found.setdefault(kind, []).append((start_s, end_s))
    return {kind: length(overlaps(merged(times), exposed)) for kind, times in found.items()}


def _carried(group: str) -> str | None:
    """What a group of the meter carries, where its length follows the steps or the samples and not the batches."""
    if group in ("data", "shards", "servers", "host"):
        return "gradients"
    return "activations" if group.startswith("tensor") else None


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for step in steps for name in step)
    order = [*(phase for phase in PHASES if phase in names), *(name for name in names if name not in PHASES)]
    return {name: median(step.get(name, 0.0) for step in steps) for name in order}


def _figures(rank: Mapping[str, Any]) -> RankFigures:
    return RankFigures(
        rank=rank["rank"],
        host=rank["host"],
        node=rank["node"],
        phases_s=rank["phases_s"],
        callbacks_s=rank["callbacks_s"],
        hidden_s=hidden_s(rank),
        waits_s=rank["waits_s"],
        activations_rate=_activations_rate(rank["steps"]),
        pushes=_pushes(rank["steps"]),
        batches=round(median(step["batches"] for step in rank["steps"])),
        data_workers=rank["data_workers"],
        threads=rank["threads"],
        cores=rank["cores"],
        reads=tuple(ReadValues(line, count, share * rank["step_s"]) for line, count, share in rank["reads"]),
        memory=_memory_use(rank),
        launches=LaunchQueue(**rank["launches"]) if rank.get("launches") else None,
    )


def _activations_rate(steps: Sequence[Mapping[str, Any]]) -> float:
    """Bytes a second of the transfers of split layers; 0 without one."""
    transfers = [t for step in steps for t in step["transfers"] if _carried(t[1]) == "activations"]
    seconds = length(merged((t[3], t[4]) for t in transfers))
    return sum(t[6] for t in transfers) / seconds if seconds else 0.0


def _pushes(steps: Sequence[Mapping[str, Any]]) -> Pushes | None:
    """What parameter servers of other hosts get and send; None without any."""
    of_steps = [[t for t in step["transfers"] if t[1] == "servers" and t[0] in ("push", "pull")] for step in steps]
    pushed = [[t for t in of_step if t[0] == "push" and t[6] > t[7]] for of_step in of_steps]
    if not any(pushed):
        return None
    seconds = median(length(merged((t[3], t[4]) for t in of_step)) for of_step in of_steps)
    return Pushes(seconds, median(map(len, pushed)))


def _held(rank: Mapping[str, Any]) -> dict[str, int]:
    return {kind.removesuffix("_bytes"): n for kind, n in rank.get("memory", {}).items() if n is not None}


def _memory_use(rank: Mapping[str, Any]) -> MemoryUse | None:
    """The most that all processes together had in use in the run, or torch on a GPU that only it could tell of."""
    curve = rank.get("over_time", {}).get(run_curves.MEMORY, ())
    held = _held(rank)
    peak_bytes = run_curves.peak(curve) if curve else held.get("device_peak")
    if peak_bytes is None or "limit" not in rank:
        return None
    place, limit_bytes = rank["limit"]
    return MemoryUse(place, peak_bytes, limit_bytes, {kind: n for kind, n in held.items() if kind != "device_peak"})


def _pipeline(ranks: Sequence[Mapping[str, Any]]) -> PipelineFigures | None:
    """The median step of the first pipeline; None without one, or where no step was timed."""
    pairs = [(rank, _stages(rank["stages"])) for rank in ranks if rank["stages"] is not None]
    first = sorted((pair for pair in pairs if pair[1].pipeline == 0), key=lambda pair: pair[1].position)
    if not first:
        return None
    steps = median_step([stages.steps for _, stages in first], [rank["node"] for rank, _ in first])
    if not steps:
        return None
    stages = first[0][1]
    timelines = {rank["rank"]: step.timeline for (rank, _), step in zip(first, steps, strict=True)}
    return PipelineFigures.of(timelines, stages.schedule, stages.stages_per_rank, steps[0].num_micro_batches)


def _stages(record: Mapping[str, Any]) -> StageRecord:
    steps = tuple(
        StepTimeline(
            step["number"], step["num_micro_batches"], tuple(Interval(**interval) for interval in step["timeline"])
        )
        for step in record["steps"]
    )
    held = {"memory": StageMemory(**record["memory"]), "predicted": HeldBytes(**record["predicted"])}
    return StageRecord(**{**record, **held, "steps": steps})


def _operations(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The transfers of a rank by operation and group, for a step on average."""
    totals: dict[tuple[str, str, int], list[float]] = {}
    for step in steps:
        under_way: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
        for operation, group, group_size, start_s, end_s, *sizes in step["transfers"]:
            key = operation, group, group_size
            under_way.setdefault(key, []).append((start_s, end_s))
            total = totals.setdefault(key, [0.0] * 5)
            for index, value in enumerate((1, *sizes)):
                total[index] += value / len(steps)
        for key, intervals in under_way.items():
            totals[key][4] += length(merged(intervals)) / len(steps)
    names = ("count", "size_bytes", "sent_bytes", "memory_bytes", "seconds")
    return [
        {"operation": operation, "group": group, "group_size": group_size, **dict(zip(names, total, strict=True))}
        for (operation, group, group_size), total in totals.items()
    ]


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second of an operation while it is under way, as nccl-tests reckons them.

    Attributes:
        algbw: size of the operation over its time.
        busbw: the same, times the share of the size that each rank sends.
        share_of_peak: what a rank sends over the network, as a part of what the link can carry; None where the link's
            speed is not known, or nothing is sent over it.
    """

    algbw: float
    busbw: float
    share_of_peak: float | None

    @classmethod
    def of(cls, operation: Mapping[str, Any], profile: Mapping[str, Any]) -> Bandwidth | None:
        """That of an OPERATION; None if it took no time, or moved nothing."""
        seconds, size_bytes = operation["seconds"], operation["size_bytes"]
        if not seconds or not size_bytes:
            return None
        by_network = operation["sent_bytes"] - operation["memory_bytes"]
        link_gbit = profile.get("link_gbit")
        return cls(
            size_bytes / seconds,
            size_bytes / seconds * sent_share(operation["operation"], operation["group_size"]),
            by_network / seconds / (link_gbit * 1e9 / 8) if link_gbit and by_network else None,
        )


def _bytes(operations: Sequence[Mapping[str, Any]]) -> float:
    return sum(float(operation["sent_bytes"]) for operation in operations)
