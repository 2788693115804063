"""The contents of a report, for the terminal and for the page: its verdict, the tree of a step, and its sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_multigpu.communication.metering.traffic import sent_share
from lightning_multigpu.planning.numbers import BYTES, ms, number, size
from lightning_multigpu.planning.pipelines.timeline import bubble, usage
from lightning_multigpu.report import colours
from lightning_multigpu.report.diagnosis import Finding
from lightning_multigpu.report.document import Profile, RunDocument
from lightning_multigpu.report.rank_figures import PHASES, RankFigures

SPLIT_LAYERS = "split layers: "
"""The beginning of the purposes of collectives inside layers that are split over ranks."""
SAMPLES, STEP, EXPOSED = "throughput/samples_per_sec", "throughput/step_ms", "communication/exposed_ms"
_RUN_FIGURES = {
    SAMPLES: ("throughput", "samples/s"),
    "throughput/tokens_per_sec": ("", "tokens/s"),
    "throughput/mfu": ("model FLOPs utilization", "share"),
    STEP: ("step time", "ms"),
    "communication/all_reduce_ms": ("all-reduce time per step", "ms"),
    "communication/total_ms": ("all communication per step", "ms"),
    EXPOSED: ("exposed communication per step", "ms"),
    "communication/sent_bytes": ("sent per step and rank", "bytes"),
    "communication/memory_bytes": ("of that through shared memory", "bytes"),
    "communication/busbw_gb_per_sec": ("bus bandwidth of the all-reduce", "GB/s"),
    "device/process_rss_bytes": ("main memory of the largest process", "bytes"),
}
_OF_DEVICE = {
    # On a CPU the memory in use is that of all programs of the host, which tells nothing about the run.
    "cpu": {"device/utilization_percent": ("use of a rank's own cores", "%")},
    "cuda": {
        "device/utilization_percent": ("GPU utilization", "%"),
        "device/memory_used_bytes": ("memory in use of a GPU, all processes", "bytes"),
        "device/power_watts": ("power of all GPUs", "W"),
    },
}
PHASE_COLOURS = {
    "data_wait": colours.VERMILION,
    "device_transfer": colours.YELLOW,
    "forward": colours.SKY,
    "backward": colours.ORANGE,
    "communication": colours.PURPLE,
    "stage_wait": colours.LIGHT,
    "optimizer": colours.GREEN,
    "callbacks": colours.BLUE,
    "other": colours.GREY,
}
_MEMORY_COLOURS = {
    "parameters": colours.BLUE,
    "gradients": colours.ORANGE,
    "optimizer": colours.GREEN,
    "activations": colours.SKY,
}
_SMALLEST_PART = 0.01
"""The share of a step from which on a part of a phase is in the tree."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a report: a table of a header and rows, and ``note`` below it.

    On the page there is a stacked bar for each label of ``bars``, with parts by name in their ``colours``, or
    ``figure``, an SVG document.
    """

    title: str
    table: Sequence[Sequence[str]] = ()
    note: str = ""
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    colours: Mapping[str, str] = field(default_factory=dict)
    figure: str = ""


class TreeRow(NamedTuple):
    """A part of a step: its depth in the tree, seconds, share of the step, and "" or the finding that it causes."""

    depth: int
    name: str
    seconds: float
    share: float
    cause: str


def words(name: str) -> str:
    """``data_wait`` as two words."""
    return name.replace("_", " ")


def title(report: RunDocument) -> str:
    world, profile = report.world, report.profile
    many = ", ".join(
        [
            f"{_many(world.size, 'rank')} on {_many(world.nodes, 'node')}",
            _many(report.steps, "optimizer step"),
            *([] if profile is None else [f"{ms(profile.step_s)} a step (median of {profile.shown.steps})"]),
        ]
    )
    return f"{report.strategy['name']}: {many}"


def verdict(report: RunDocument) -> list[str]:
    """What limits a step, the remedy and the step with it; without a profile, what communication costs."""
    if (profile := report.profile) is None:
        return _cost_of_communication(report)
    rank = profile.shown
    if not profile.findings:
        largest = max(rank.phases_s, key=lambda phase: rank.phases_s[phase])
        return [
            f"No remedy is known that would save 5 % of a step; its largest part is {words(largest)}, "
            f"{_part(rank, rank.phases_s[largest])}."
        ]
    first = profile.findings[0]
    names = " and ".join(words(phase) for phase in first.phases if phase in rank.phases_s)
    # Reads of values lie within several phases, and several ranks may share what a remedy saves.
    seconds = max(first.saving_s, rank.of(*first.phases))
    limits = f"{first.kind}: {names}" if names and names != first.kind else first.kind
    return [f"The step is limited by {limits}, {_part(rank, seconds)}.", first.remedy, saving(profile, first)]


def _cost_of_communication(report: RunDocument) -> list[str]:
    metrics = report.aggregate.metrics
    if not {EXPOSED, STEP} <= metrics.keys():
        return []
    exposed_ms, step_ms = (metrics[key]["mean"] for key in (EXPOSED, STEP))
    return [
        f"A step takes {number(step_ms)} ms: ranks wait for communication for {100 * exposed_ms / step_ms:.1f} % of "
        "their time. ProfilerReport tells what would make it shorter."
    ]


def saving(profile: Profile, finding: Finding) -> str:
    """What the remedy of a finding gives."""
    return f"{ms(finding.step_s)} a step predicted ({100 * finding.saving_s / profile.step_s:.0f} % less)"


def _part(rank: RankFigures, seconds: float) -> str:
    return f"{ms(seconds)} of the {ms(rank.step_s)} of rank {rank.rank}, {100 * seconds / rank.step_s:.0f} %"


def step_tree(profile: Profile) -> list[TreeRow]:
    """The step of the rank that the verdict is about, its phases and what is known of their parts; marks the cause."""
    rank, cause = profile.shown, profile.findings[0] if profile.findings else None
    inside = {"communication": rank.waits_s, "callbacks": rank.callbacks_s}

    def row(depth: int, name: str, seconds: float, *, is_cause: bool = False) -> TreeRow:
        return TreeRow(depth, name, seconds, seconds / rank.step_s, cause.kind if is_cause and cause else "")

    found = [row(0, f"step of rank {rank.rank}", rank.step_s)]
    for phase, seconds in rank.phases_s.items():
        found.append(row(1, words(phase), seconds, is_cause=cause is not None and phase in cause.phases))
        parts = inside.get(phase, {}).items()
        found += [row(2, part, part_s) for part, part_s in parts if part_s >= _SMALLEST_PART * rank.step_s]
    if cause is not None and not any(each.cause for each in found):
        found.append(row(1, f"{cause.kind}, within the phases", cause.saving_s, is_cause=True))
    return found


def sections(report: RunDocument) -> Iterator[Section]:
    """All that was measured."""
    if report.profile is not None:
        yield from _phases(report.profile)
        yield from _schedule(report.profile)
        yield from _transfers(report.profile, report.strategy["name"])
    for of_run in (_whole_run, _memory, _staleness, _members):
        yield from of_run(report)


def _members(report: RunDocument) -> Iterator[Section]:
    if not (changes := report.member_changes):
        return
    rows = [
        [str(each.step), *(", ".join(map(str, ranks)) for ranks in (each.lost, each.joined)), str(each.members)]
        for each in changes
    ]
    lost_s = sum(each.seconds for each in changes)
    yield Section(
        title="Ranks that were lost, or came in",
        table=[
            ["step", "lost", "came in", "go on", "seconds"],
            *([*row, f"{each.seconds:.1f}"] for row, each in zip(rows, changes, strict=True)),
        ],
        note=f"the others stood for {lost_s:.1f} s in all",
    )


def _phases(profile: Profile) -> Iterator[Section]:
    used = [phase for phase in PHASES if any(phase in rank.phases_s for rank in profile.ranks)]
    rows = []
    for rank in profile.ranks:
        times_s = [*(rank.of(phase) for phase in used), rank.step_s, rank.hidden_s]
        rows.append([f"{rank.rank} ({rank.host})", *(number(1e3 * seconds) for seconds in times_s)])
    yield Section(
        title="A step of each rank, in ms",
        table=[["rank", *map(words, used), "step, ms", "hidden transfers"], *rows],
        note="Communication is what nothing hides; hidden transfers run beside the other phases.",
        bars={f"rank {rank.rank}": rank.phases_s for rank in profile.ranks},
        colours={phase: PHASE_COLOURS[phase] for phase in used},
    )


def _schedule(profile: Profile) -> Iterator[Section]:
    """A section for each pipeline; the first one has the picture."""
    for index, step in enumerate(profile.pipelines):
        used, number_of = usage(step.timelines), "" if len(profile.pipelines) == 1 else f" in pipeline {index}"
        kinds = [kind for kind in used[0].seconds if any(rank.seconds[kind] for rank in used)]
        yield Section(
            title=f"A step of {step.schedule}{number_of} with {step.num_micro_batches} micro-batches, in ms",
            table=[
                ["rank", *kinds, "idle", "bubble"],
                *(
                    [
                        str(rank),
                        *(number(1e3 * seconds) for seconds in (*(of.seconds[kind] for kind in kinds), of.idle_s)),
                        f"{100 * of.bubble:.1f} %",
                    ]
                    for rank, of in zip(step.ranks, used, strict=True)
                ),
            ],
            note=f"of {ms(used[0].wall_s)} the ranks do not work for {100 * bubble(step.timelines):.1f} %; in theory "
            f"{100 * bubble(step.theory):.1f} %\n"
            "from the first pass to the last: the rest of a step is loading, hooks and the optimizer",
            figure=step.picture() if index == 0 else "",
        )


def _transfers(profile: Profile, strategy: str) -> Iterator[Section]:
    rows = []
    busiest = max(profile.ranks, key=lambda rank: sum(each.sent_bytes for each in rank.transfers))
    for each in sorted(busiest.transfers, key=lambda each: -each.seconds):
        algbw = each.size_bytes / each.seconds if each.seconds else 0.0
        rates = (algbw, algbw * sent_share(each.operation, each.group_size))
        rows.append(
            [
                f"{each.operation} ({each.group}, {each.group_size} ranks)",
                f"{round(each.count, 1):g}",
                size(each.sent_bytes),
                size(each.memory_bytes),
                f"{number(1e3 * each.seconds)} ms",
                *(f"{size(rate)}/s" if rate else "-" for rate in rates),
            ]
        )
    note = "algbw: size over the time in which a transfer is under way; busbw: of what each rank sends" if rows else ""
    if len(profile.ranks) > 1 and not profile.ranks[0].is_metered:
        note = f'{strategy} does not measure its transfers, which count as backward; strategy="ring_ddp" does.'
    if rows or note:
        header = ["transfers", "count", "sent", "through memory", "time", "algbw", "busbw"]
        yield Section(
            title="Transfers in a step, of the rank that sends most", table=[header, *rows] if rows else (), note=note
        )


def _memory(report: RunDocument) -> Iterator[Section]:
    held = {rank.rank: rank.kinds_bytes for rank in report.memory or ()}
    if kinds := dict.fromkeys(kind for of_rank in held.values() for kind in of_rank):
        rows = [[str(r), *(size(of_rank[k]) if k in of_rank else "" for k in kinds)] for r, of_rank in held.items()]
        yield Section(
            title="Memory that each rank holds",
            table=[["rank", *map(words, kinds)], *rows],
            bars={f"rank {r}": {k: n for k, n in h.items() if k in _MEMORY_COLOURS} for r, h in held.items()},
            colours={kind: colour for kind, colour in _MEMORY_COLOURS.items() if kind in kinds},
        )


def _whole_run(report: RunDocument) -> Iterator[Section]:
    rows = []
    for key, (name, unit) in {**_RUN_FIGURES, **_OF_DEVICE[report.hardware["device"]]}.items():
        if (statistics := report.aggregate.metrics.get(key)) is not None:
            scales = BYTES if unit == "bytes" else ()
            unit, factor = next((each for each in scales if abs(statistics["median"]) >= each[1]), (unit, 1.0))
            rows.append([name, *(number(statistics[each] / factor) for each in ("median", "mean", "p95")), unit])
    if rows:
        yield Section(
            title="Over the whole run",
            table=[["", "median", "mean", "p95", "unit"], *rows],
            note=_purposes(report.communication_ms or {}),
        )


def _purposes(purposes: Mapping[str, float]) -> str:
    """The parts of communication by purpose, the longest first; those inside split layers together."""
    inside = {name: each for name, each in purposes.items() if name.startswith(SPLIT_LAYERS)}
    purposes = {name: each for name, each in purposes.items() if name not in inside}
    if inside:
        worst = max(inside, key=lambda name: inside[name])
        most = f"inside split layers (most for {worst.removeprefix(SPLIT_LAYERS)}: {number(inside[worst])})"
        purposes[most] = sum(inside.values())
    parts = sorted(purposes.items(), key=lambda part: -part[1])
    together = ", ".join(f"{purpose} {number(each)}" for purpose, each in parts)
    return f"all communication, means in ms: {together}" if parts else ""


def _staleness(report: RunDocument) -> Iterator[Section]:
    rows = [
        [str(each) for each in (w["rank"], w["updates"], *(w["staleness"][key] for key in ("median", "p95", "max")))]
        for w in (report.parameter_servers or {}).get("workers", ())
    ]
    if rows:
        yield Section(
            title="Staleness of updates",
            table=[["rank", "updates", "median", "95 % at most", "largest"], *rows],
            note="updates that other ranks made between a rank's pull of the weights and its update",
        )


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
