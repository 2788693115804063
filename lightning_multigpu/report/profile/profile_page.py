"""A profile as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from lightning_multigpu.planning.numbers import ms, number, size
from lightning_multigpu.planning.step_phases import PHASES
from lightning_multigpu.report.profile import page_figures, profile_document, profile_text, run_curves
from lightning_multigpu.report.profile.page_figures import Rows, bars, legend, plot, table, words

FILE_NAME = "report.html"

_COLOURS = dict(
    zip(
        PHASES,
        (
            page_figures.VERMILION,
            page_figures.YELLOW,
            page_figures.SKY,
            page_figures.ORANGE,
            page_figures.PURPLE,
            page_figures.LIGHT,
            page_figures.GREEN,
            page_figures.BLUE,
            page_figures.GREY,
        ),
        strict=True,
    )
)
_MEMORY_COLOURS = {
    "parameters": page_figures.BLUE,
    "gradients": page_figures.ORANGE,
    "optimizer": page_figures.GREEN,
    "activations": page_figures.SKY,
}
_STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; padding: 1rem;
       max-width: 84rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; }
.wide { overflow-x: auto; } svg { width: 100%; height: auto; display: block; } .schedule svg { min-width: 60rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1rem; padding: 0; list-style: none; }
.legend span { display: inline-block; width: .9em; height: .9em; margin-right: .35em; border: 1px solid #555; }
li p { margin: .2rem 0; }
@media (max-width: 44rem) { svg.fits { font-size: 22px; } }
"""
_MOST_BARS = 16


def page(profile: Mapping[str, Any]) -> str:
    """The whole page: diagnosis, phases of each rank, the timeline of a step, and what else was measured."""
    name = f"Profile of {profile['strategy']['name']}"
    ranks = profile["ranks"]
    versions = ", ".join(f"{name} {version}" for name, version in profile["versions"].items())
    title = (
        f"<h1>{escape(name)}</h1>",
        f"<p>{len(ranks)} rank{'s' * (len(ranks) > 1)}, {len(ranks[0]['steps'])} optimizer steps, "
        f"{ms(profile['step_s'])} a step: the median of these steps, of the slowest rank. {escape(versions)}</p>",
    )
    sections = (_diagnosis, _phases, _timeline, _schedule, _transfers, _memory, _over_time, _staleness, _operators)
    return _html(name, [*title, *(line for section in sections for line in section(profile))])


def comparison(profiles: Mapping[str, Mapping[str, Any]]) -> str:
    """A page of several runs, by name: the step of each run's slowest rank, samples a second, the first finding."""
    slowest = {name: max(profile["ranks"], key=lambda rank: rank["step_s"]) for name, profile in profiles.items()}
    used = [phase for phase in PHASES if any(phase in rank["phases_s"] for rank in slowest.values())]
    # What the runs are compared for stands first: a phone shows three columns.
    rows = [
        [
            name,
            run_curves.samples_a_second(profile),
            ms(profile["step_s"]),
            profile["findings"][0]["kind"] if profile["findings"] else "nothing found",
            *(ms(slowest[name]["phases_s"].get(phase, 0.0)) for phase in used),
            profile["strategy"]["name"],
        ]
        for name, profile in profiles.items()
    ]
    of_runs = [(name, rank["phases_s"]) for name, rank in slowest.items()]
    rates = [(name, {"samples": rate}) for name, p in profiles.items() if (rate := run_curves.rate(p))]
    fastest = "Samples a second of each run; the table above has the numbers"
    return _html(
        "Profiles compared",
        [
            "<h1>Profiles compared</h1>",
            "<p>A step of the slowest rank of each run. It has more samples under some strategies than under others: "
            "samples a second, those of the whole run, tell which is faster.</p>",
            legend({phase: _COLOURS[phase] for phase in used}),
            bars("Phases of a step by run; the table below has the numbers", of_runs, _COLOURS, ms),
            table(["run", "samples/s", "step", "diagnosis", *map(words, used), "strategy"], rows),
            *(
                ["<h2>Samples a second</h2>", bars(fastest, rates, {"samples": page_figures.BLUE}, number)]
                if rates
                else []
            ),
        ],
    )


def _html(title: str, body: Sequence[str]) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _diagnosis(profile: Mapping[str, Any]) -> Iterator[str]:
    savings, limits = profile_document.by_saving(profile)
    yield "<h2>What would make a step shorter</h2>"
    if not savings:
        yield "<p>Nothing was found that would save 5 % of a step.</p>"
    else:
        yield "<ol>"
        for finding in savings:
            share = 100 * finding["saving_s"] / profile["step_s"]
            yield _finding(finding, f": {ms(finding['step_s'])} a step predicted, {share:.0f} % less")
        yield "</ol>"
    if limits:
        yield "<h2>Near a limit</h2><ul>"
        yield from (_finding(finding, "") for finding in limits)
        yield "</ul>"


def _finding(finding: Mapping[str, Any], prediction: str) -> str:
    return (
        f"<li><strong>{escape(finding['kind'])}</strong>{prediction}<p>{escape(finding['evidence'])}</p>"
        f"<p>{escape(finding['remedy'])}</p></li>"
    )


def _phases(profile: Mapping[str, Any]) -> Iterator[str]:
    ranks = profile["ranks"]
    used = [phase for phase in PHASES if any(phase in rank["phases_s"] for rank in ranks)]
    of_ranks = [(f"rank {rank['rank']}", rank["phases_s"]) for rank in ranks]
    rows = [
        [
            f"{rank['rank']} ({rank['host']})",
            *(ms(rank["phases_s"].get(p, 0.0)) for p in used),
            ms(rank["step_s"]),
            ms(profile_document.hidden_s(rank)),
        ]
        for rank in ranks
    ]
    yield "<h2>A step of each rank</h2>"
    yield legend({phase: _COLOURS[phase] for phase in used})
    yield bars("Phases of a step by rank; the table below has the numbers", of_ranks, _COLOURS, ms)
    yield table(["rank", *map(words, used), "step", "hidden transfers"], rows)
    yield "<p>Communication is what nothing hides; hidden transfers run beside the other phases.</p>"


def _timeline(profile: Mapping[str, Any]) -> Iterator[str]:
    """The middle step by its length on the first rank; of a pipeline, one whose passes are recorded."""
    ranks = profile["ranks"]
    count = min(len(rank["steps"]) for rank in ranks)
    first = ranks[0]["steps"]
    recorded = [i for i in range(count) if any(phase == "stage_wait" for phase, *_ in first[i]["parts"])]
    lengths = sorted(recorded or range(count), key=lambda i: first[i]["end_s"] - first[i]["start_s"])
    steps = [rank["steps"][lengths[(len(lengths) - 1) // 2]] for rank in ranks]
    start_s = min(step["start_s"] for step in steps)
    span_s = max(step["end_s"] for step in steps) - start_s
    figure = Rows("Timeline of one step, a row for each rank", span_s, ms)
    for rank, step in zip(ranks, steps, strict=True):
        who = f"rank {rank['rank']}"
        figure.row(who)
        for phase, begin_s, end_s in step["parts"]:
            title = f"{who}: {words(phase)}, {ms(end_s - begin_s)}"
            figure.box(begin_s - start_s, end_s - start_s, _COLOURS[phase], title, height=16)
        for operation, group, _, begin_s, end_s, *_ in sorted(step["transfers"], key=lambda t: float(t[3])):
            title = f"{who}: {operation} ({group}), {ms(end_s - begin_s)}"
            figure.box(begin_s - start_s, end_s - start_s, "#000", title, top=17, height=5)
    yield f"<h2>One step over all ranks: {ms(span_s)}</h2>"
    error_s = profile_document.clock_error_s(profile)
    error = f", to within {ms(error_s)}" if error_s else ""
    yield (
        f"<p>On the clock of rank 0{error}, from the start of the first rank to the end of the last, which "
        "may be longer than a rank's step. Transfers between ranks below each rank's phases.</p>"
    )
    yield figure.html()


def _schedule(profile: Mapping[str, Any]) -> Iterator[str]:
    drawn = profile_document.pipelines(profile).picture()
    if drawn is not None:
        meaning = (
            "Schedule of a step of the pipeline, in theory above, as measured below: passes of each rank over time"
        )
        yield "<h2>The pipeline's schedule</h2>"
        yield f'<div class="wide schedule" role="img" aria-label="{meaning}">{drawn.decode()}</div>'


def _transfers(profile: Mapping[str, Any]) -> Iterator[str]:
    rows = profile_text.transfers(profile)
    if rows:
        header, *lines = rows
        yield "<h2>Transfers of the rank that sends most</h2>"
        yield "<p>Bytes a second while a transfer is under way: algbw of its size, busbw of what each rank sends.</p>"
        yield table(header, lines)
    if note := profile_document.unmeasured(profile):
        yield f"<p>{escape(note)}</p>"


def _memory(profile: Mapping[str, Any]) -> Iterator[str]:
    held = profile_document.memory(profile)
    kinds = dict.fromkeys(kind for of_rank in held.values() for kind in of_rank)
    stacked = [
        (f"rank {rank}", {kind: of_rank[kind] for kind in _MEMORY_COLOURS if kind in of_rank})
        for rank, of_rank in held.items()
    ]
    if any(sum(parts.values()) for _, parts in stacked):
        rows = [[str(rank), *(size(held[rank][k]) if k in held[rank] else "-" for k in kinds)] for rank in held]
        yield "<h2>Memory that each rank holds</h2>"
        yield legend({kind: colour for kind, colour in _MEMORY_COLOURS.items() if kind in kinds})
        yield bars("Memory of each rank by kind; the table below has the numbers", stacked, _MEMORY_COLOURS, size)
        yield table(["rank", *map(words, kinds)], rows)


def _over_time(profile: Mapping[str, Any]) -> Iterator[str]:
    found = {key: curves for key in run_curves.KEYS if (curves := run_curves.curves(profile, key))}
    if found:
        yield "<h2>Over the whole run</h2><p>A line for each rank; seconds from the start of training.</p>"
        ranks = dict.fromkeys(rank for curves in found.values() for rank in curves)
        if len(ranks) <= len(page_figures.LINES):
            yield legend({f"rank {rank}": colour for rank, colour in zip(ranks, page_figures.LINES, strict=False)})
    for key, curves in found.items():
        title, show = run_curves.KEYS[key]
        rows = [[str(rank), *map(show, run_curves.course(curve))] for rank, curve in curves.items()]
        lines = {
            f"rank {rank}: median {show(run_curves.course(curve)[1])}": [(at_s, value) for at_s, value, _ in curve]
            for rank, curve in curves.items()
        }
        end_s = max(curve[-1][0] for curve in curves.values())
        yield f"<h3>{title[0].upper()}{title[1:]}</h3>"
        yield plot(f"{title} over the run; the table below has medians", lines, end_s, show)
        yield table(["rank", "first tenth", "whole run", "last tenth"], rows)


def _staleness(profile: Mapping[str, Any]) -> Iterator[str]:
    workers = profile.get("servers", {}).get("workers", ())
    if not workers:
        return
    counts: Counter[int] = Counter()
    for worker in workers:
        counts.update(dict(worker["histogram"]))
    width = max(counts) // _MOST_BARS + 1
    rows = []
    for low in range(0, max(counts) + 1, width):
        label = str(low) if width == 1 else f"{low} to {low + width - 1}"
        rows.append((label, {"updates": float(sum(counts[n] for n in range(low, low + width)))}))
    yield "<h2>Staleness of updates</h2>"
    yield "<p>The number of updates that other ranks made between a rank's pull of the weights and its update.</p>"
    yield bars("Updates by their staleness", rows, {"updates": page_figures.BLUE}, number)
    found = [(worker["rank"], worker["updates"], *worker["staleness"].values()) for worker in workers]
    yield table(["rank", "updates", "median", "95 % at most", "largest"], [list(map(str, row)) for row in found])


def _operators(profile: Mapping[str, Any]) -> Iterator[str]:
    operators = profile["ranks"][0]["operators"]
    if operators:
        yield "<h2>Operators of a step on rank 0, by their own time</h2>"
        columns = 4 if any(gpu_s for *_, gpu_s in operators) else 3  # no GPU, no column
        rows = [[name, f"{round(calls, 1):g}", ms(cpu_s), ms(gpu_s)] for name, calls, cpu_s, gpu_s in operators]
        header = ["operator", "calls", "on the CPU", "on the GPU"]
        yield table(header[:columns], [row[:columns] for row in rows])
