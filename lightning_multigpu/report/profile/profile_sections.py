"""The verdict, the tree of the step and the sections of a profile, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_multigpu.planning.diagnosis import Finding
from lightning_multigpu.planning.numbers import ms, number, size
from lightning_multigpu.planning.step_phases import PHASES
from lightning_multigpu.report import figures
from lightning_multigpu.report.figures import SvgFigure, bars, words
from lightning_multigpu.report.profile.pipelines import timed_pipelines
from lightning_multigpu.report.profile.profile_document import ProfileDocument

SAMPLES, UTILIZATION, MEMORY, PROCESS = (
    "throughput/samples_per_sec",
    "device/utilization_percent",
    "device/memory_used_bytes",
    "device/process_rss_bytes",
)
RUN_FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    SAMPLES: ("samples a second", number),
    UTILIZATION: ("utilization", lambda percent: f"{percent:.0f} %"),
    MEMORY: ("memory of the GPU or host, all programs", size),
    PROCESS: ("main memory of the rank's process", size),
}
"""Key of the monitor's figure -> what it is called, and its value as text."""
PHASE_COLOURS = {
    "data_wait": figures.VERMILION,
    "device_transfer": figures.YELLOW,
    "forward": figures.SKY,
    "backward": figures.ORANGE,
    "communication": figures.PURPLE,
    "stage_wait": figures.LIGHT,
    "optimizer": figures.GREEN,
    "callbacks": figures.BLUE,
    "other": figures.GREY,
}
_MEMORY_COLOURS = {
    "parameters": figures.BLUE,
    "gradients": figures.ORANGE,
    "optimizer": figures.GREEN,
    "activations": figures.SKY,
}
_SMALLEST_SHARE = 0.01
"""The share of a step from which on a part of a phase is in the tree."""


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A part of a report: an SVG figure with its colours by name, and a table of a header and rows.

    ``lead`` is a paragraph above the figure, on the page; ``note`` is a sentence below.
    """

    title: str
    lead: str = ""
    legend: Mapping[str, str] = field(default_factory=dict)
    figure: str = ""
    table: Sequence[Sequence[str]] = ()
    note: str = ""


class TreeRow(NamedTuple):
    """A part of a step: its depth in the tree, seconds, share of the step, and "" or the finding that it causes."""

    depth: int
    name: str
    seconds: float
    share: float
    cause: str


def title(profile: ProfileDocument) -> str:
    """The strategy, the ranks, and the length of a step."""
    steps, ranks = len(profile.ranks[0].steps), len(profile.ranks)
    return (
        f"Profile of {profile.strategy.name}: {ranks} rank{'s' * (ranks > 1)}, {steps} optimizer "
        f"step{'s' * (steps > 1)}, {ms(profile.step_s)} a step (medians)"
    )


def verdict(profile: ProfileDocument) -> list[str]:
    """What limits the step and its share of it, the remedy, and the step that is predicted with the remedy."""
    phases_s = profile.slowest.phases_s
    if not profile.savings:
        largest = max(phases_s, key=lambda phase: phases_s[phase])
        return [
            f"No remedy is known that would save 5 % of a step; its largest part is {words(largest)}, "
            f"{_part(profile, phases_s[largest])}."
        ]
    first = profile.savings[0]
    names = " and ".join(words(phase) for phase in first.phases if phase in phases_s)
    # Another rank may have more of the phase, and reads of values lie within several phases.
    seconds = max(first.saving_s, sum(phases_s.get(phase, 0.0) for phase in first.phases))
    limits = f"{first.kind}: {names}" if names and names != first.kind else first.kind
    return [f"The step is limited by {limits}, {_part(profile, seconds)}.", first.remedy, saving(profile, first)]


def saving(profile: ProfileDocument, finding: Finding) -> str:
    """What the remedy of a finding gives."""
    return f"{ms(finding.step_s)} a step predicted ({100 * finding.saving_s / profile.step_s:.0f} % less)"


def _part(profile: ProfileDocument, seconds: float) -> str:
    return f"{ms(seconds)} of {ms(profile.step_s)}, {100 * seconds / profile.step_s:.0f} %"


def step_tree(profile: ProfileDocument) -> list[TreeRow]:
    """The step of the slowest rank, its phases, and what is known of what a phase consists of; the cause is marked."""
    rank, cause = profile.slowest, profile.savings[0] if profile.savings else None
    inside = {"communication": rank.waits_s, "callbacks": rank.callbacks_s}

    def row(depth: int, name: str, seconds: float, *, is_cause: bool = False) -> TreeRow:
        return TreeRow(depth, name, seconds, seconds / rank.step_s, cause.kind if is_cause and cause else "")

    found = [row(0, f"step of rank {rank.rank}", rank.step_s)]
    for phase, seconds in rank.phases_s.items():
        found.append(row(1, words(phase), seconds, is_cause=cause is not None and phase in cause.phases))
        parts = inside.get(phase, {}).items()
        found += [row(2, part, part_s) for part, part_s in parts if part_s >= _SMALLEST_SHARE * rank.step_s]
    if cause is not None and not any(each.cause for each in found):
        found.append(row(1, f"{cause.kind}, within the phases", cause.saving_s, is_cause=True))
    return found


def sections(profile: ProfileDocument) -> Iterator[ReportSection]:
    """All that was measured."""
    for of_kind in (_phases, _timeline, _transfers, _schedule, _memory, _whole_run, _staleness, _operators):
        yield from of_kind(profile)


def _phases(profile: ProfileDocument) -> Iterator[ReportSection]:
    ranks = profile.ranks
    used = [phase for phase in PHASES if any(phase in rank.phases_s for rank in ranks)]
    rows = []
    for rank in ranks:
        times_s = [*(rank.phases_s.get(phase, 0.0) for phase in used), rank.step_s, rank.hidden_s]
        rows.append([f"{rank.rank} ({rank.host})", *(number(1e3 * seconds) for seconds in times_s)])
    yield ReportSection(
        title="A step of each rank, in ms",
        legend={phase: PHASE_COLOURS[phase] for phase in used},
        figure=bars(
            "Phases of a step by rank; the table below has the numbers",
            [(f"rank {rank.rank}", rank.phases_s) for rank in ranks],
            PHASE_COLOURS,
            ms,
        ),
        table=[["rank", *map(words, used), "step, ms", "hidden transfers"], *rows],
        note="Communication is what nothing hides; hidden transfers run beside the other phases.",
    )


def _timeline(profile: ProfileDocument) -> Iterator[ReportSection]:
    """The middle step by its length on the first rank; of a pipeline, one whose passes are recorded."""
    ranks = profile.ranks
    count = min(len(rank.steps) for rank in ranks)
    first = ranks[0].steps
    recorded = [i for i in range(count) if first[i].waiting("stage_wait")]
    lengths = sorted(recorded or range(count), key=lambda i: first[i].seconds)
    steps = [rank.steps[lengths[(len(lengths) - 1) // 2]] for rank in ranks]
    start_s = min(step.start_s for step in steps)
    span_s = max(step.end_s for step in steps) - start_s
    figure = SvgFigure(span_s, ms)
    for rank, step in zip(ranks, steps, strict=True):
        who = f"rank {rank.rank}"
        figure.row(who)
        for phase, begin_s, end_s in step.parts:
            meaning = f"{who}: {words(phase)}, {ms(end_s - begin_s)}"
            figure.box(begin_s - start_s, end_s - start_s, PHASE_COLOURS[phase], meaning, height=16)
        for t in sorted(step.transfers, key=lambda t: t.start_s):
            meaning = f"{who}: {t.operation} ({t.group}), {ms(t.end_s - t.start_s)}"
            figure.box(t.start_s - start_s, t.end_s - start_s, "#000", meaning, top=17, height=5)
    figure.axis()
    yield ReportSection(
        title=f"One step over all ranks: {ms(span_s)}",
        lead="By the clocks of the hosts, from the start of the first rank to the end of the last, which may be "
        "longer than a rank's step. Transfers between ranks below each rank's phases.",
        figure=figure.part_of_page("Timeline of one step, a row for each rank"),
    )


def _schedule(profile: ProfileDocument) -> Iterator[ReportSection]:
    """A section for each pipeline; the first one has the picture."""
    drawn = [pipeline.picture() for pipeline in timed_pipelines(profile.ranks)[:1]]
    meaning = "Schedule of a step of the pipeline, in theory above, as measured below: passes of each rank over time"
    for index, step in enumerate(profile.pipelines or ()):
        kinds = [kind for kind in step.ranks[0].seconds if any(rank.seconds[kind] for rank in step.ranks)]
        number_of = "" if len(profile.pipelines or ()) == 1 else f" in pipeline {index}"
        yield ReportSection(
            title=f"A step of {step.schedule}{number_of} with {step.num_micro_batches} micro-batches, in ms",
            figure="".join(
                f'<div class="wide schedule" role="img" aria-label="{meaning}">{picture}</div>' for picture in drawn
            ),
            table=[
                ["rank", *kinds, "bubble"],
                *(
                    [
                        str(rank.rank),
                        *(number(1e3 * rank.seconds[kind]) for kind in kinds),
                        f"{100 * rank.bubble:.1f} %",
                    ]
                    for rank in step.ranks
                ),
            ],
            note=f"of {ms(step.wall_s)} the ranks do not work for {100 * step.bubble:.1f} %; in theory "
            f"{100 * step.theoretical_bubble:.1f} %\n"
            "from the first pass to the last: the rest of a step is loading, hooks and the optimizer",
        )
        drawn = []


def _transfers(profile: ProfileDocument) -> Iterator[ReportSection]:
    header = ["transfers", "count", "sent", "through memory", "time", "algbw", "busbw"]
    rows = []
    for operation in sorted(profile.operations, key=lambda operation: -operation.seconds):
        rows.append(
            [
                f"{operation.operation} ({operation.group}, {operation.group_size} ranks)",
                f"{round(operation.count, 1):g}",
                size(operation.sent_bytes),
                size(operation.memory_bytes),
                f"{number(1e3 * operation.seconds)} ms",
                *(f"{size(rate)}/s" if rate else "-" for rate in (operation.algbw, operation.busbw)),
            ]
        )
    note = profile.unmeasured or ""
    if rows or note:
        yield ReportSection(
            title="Transfers in a step, of the rank that sends most",
            lead="Bytes a second while a transfer is under way: algbw of its size, busbw of what each rank sends.",
            table=[header, *rows] if rows else (),
            note=note,
        )


def _memory(profile: ProfileDocument) -> Iterator[ReportSection]:
    held = {rank.rank: rank.held_bytes for rank in profile.ranks if rank.held_bytes}
    kinds = dict.fromkeys(kind for of_rank in held.values() for kind in of_rank)
    if held:
        stacked = [(f"rank {r}", {k: float(n) for k, n in h.items() if k in _MEMORY_COLOURS}) for r, h in held.items()]
        meaning = "Memory of each rank by kind; the table below has the numbers"
        yield ReportSection(
            title="Memory that each rank holds",
            legend={kind: colour for kind, colour in _MEMORY_COLOURS.items() if kind in kinds},
            figure=bars(meaning, stacked, _MEMORY_COLOURS, size),
            table=[
                ["rank", *map(words, kinds)],
                *([str(r), *(size(of_rank[k]) if k in of_rank else "-" for k in kinds)] for r, of_rank in held.items()),
            ],
        )


def _whole_run(profile: ProfileDocument) -> Iterator[ReportSection]:
    rows = []
    for key, (name, show) in RUN_FIGURES.items():
        if of_ranks := [rank.whole_run[key] for rank in profile.ranks if key in rank.whole_run]:
            add = sum if key == SAMPLES else max
            rows.append([name, *(show(add(column)) for column in zip(*of_ranks, strict=True))])
    if rows:
        yield ReportSection(
            title="Over the whole run",
            table=[["", "median", "last", "largest"], *rows],
            note="Samples are those of all ranks together, the rest is that of the rank with the most.",
        )


def _staleness(profile: ProfileDocument) -> Iterator[ReportSection]:
    found = [
        (w.rank, w.updates, w.staleness.median, w.staleness.p95, w.staleness.max)
        for w in (profile.servers.workers if profile.servers else ())
    ]
    if found:
        yield ReportSection(
            title="Staleness of updates",
            lead="The number of updates that other ranks made between a rank's pull of the weights and its update.",
            table=[["rank", "updates", "median", "95 % at most", "largest"], *(list(map(str, row)) for row in found)],
        )


def _operators(profile: ProfileDocument) -> Iterator[ReportSection]:
    operators = profile.ranks[0].operators
    if operators:
        shown = 4 if any(each.gpu_s for each in operators) else 3  # no GPU, no column
        rows = [["operator", "calls", "on the CPU", "on the GPU"]]
        rows += [[name, f"{round(calls, 1):g}", ms(cpu_s), ms(gpu_s)] for name, calls, cpu_s, gpu_s in operators]
        traces = [f"{rank.trace} (rank {rank.rank} on {rank.host})" for rank in profile.ranks if rank.trace is not None]
        yield ReportSection(
            title="Operators of a step on rank 0, by their own time",
            table=[row[:shown] for row in rows],
            note="\n".join(traces and ["Their timelines; https://ui.perfetto.dev opens several at once:", *traces]),
        )


def comparison(profiles: Mapping[str, ProfileDocument]) -> list[list[str]]:
    """A header, and a row for each run: samples a second, step of its slowest rank, first finding, and phases.

    Steps have more samples under some strategies than under others: samples a second tell which is faster.
    """
    used = [phase for phase in PHASES if any(phase in profile.slowest.phases_s for profile in profiles.values())]
    # What the runs are compared for is first: a phone shows three columns.
    rows = [["run", "samples/s", "step", "diagnosis", *map(words, used), "strategy"]]
    for name, profile in profiles.items():
        found = _rate(profile)
        phases_s = profile.slowest.phases_s
        rows.append(
            [
                name,
                "-" if found is None else number(found),
                ms(profile.step_s),
                profile.findings[0].kind if profile.findings else "nothing found",
                *(ms(phases_s.get(phase, 0.0)) for phase in used),
                profile.strategy.name,
            ]
        )
    return rows


def _rate(profile: ProfileDocument) -> float | None:
    """Samples a second: the median over the whole run, of all ranks together; None where it was not measured."""
    rates = [rank.whole_run[SAMPLES].median for rank in profile.ranks if SAMPLES in rank.whole_run]
    return sum(rates) if rates else None


def fastest(profiles: Mapping[str, ProfileDocument]) -> list[str]:
    """The verdict of a comparison, by the names of the runs; empty where fewer than two have the figure."""
    rates = {name: found for name, profile in profiles.items() if (found := _rate(profile))}
    if len(rates) < 2:
        return []
    first, second, *_ = sorted(rates, key=lambda name: -rates[name])
    times = rates[first] / rates[second]
    return [f"{first} is fastest: {number(rates[first])} samples/s, {times:.2f} times those of {second}."]
