"""A profile as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from lightning_multigpu.planning.step_phases import PHASES
from lightning_multigpu.report.numbers import number, size

FILE_NAME = "profile.html"

# Okabe and Ito's colours, which colour-blind people can tell apart.
_COLOURS = dict(
    zip(
        PHASES,
        ("#d55e00", "#f0e442", "#56b4e9", "#e69f00", "#cc79a7", "#d9d9d9", "#009e73", "#0072b2", "#8a8a8a"),
        strict=True,
    )
)
_STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; padding: 1rem;
       max-width: 70rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; } svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1rem; padding: 0; list-style: none; }
.legend span { display: inline-block; width: .9em; height: .9em; margin-right: .35em; border: 1px solid #555; }
li p { margin: .2rem 0; }
"""
_WIDTH, _LEFT, _ROW, _AXIS = 1000.0, 110.0, 28.0, 26.0
_LABEL = 14  # characters that fit there


def page(profile: Mapping[str, Any]) -> str:
    """The whole page: diagnosis, phases of each rank, the timeline of a step, transfers."""
    name = f"Profile of {profile['strategy']['name']}"
    ranks = profile["ranks"]
    used = [phase for phase in PHASES if any(phase in rank["phases_s"] for rank in ranks)]
    of_ranks = [(f"rank {rank['rank']}", rank["phases_s"]) for rank in ranks]
    body = [
        f"<h1>{escape(name)}</h1>",
        f"<p>{len(ranks)} ranks, {len(ranks[0]['steps'])} optimizer steps, {_ms(profile['step_s'])} a step (median of "
        f"the slowest rank). {escape(_versions(profile))}</p>",
        "<h2>What would make a step shorter</h2>",
        *_diagnosis(profile),
        "<h2>A step of each rank</h2>",
        _legend(used),
        _svg(
            "Phases of a step by rank; the table below has the numbers",
            *_bars(of_ranks),
        ),
        _table(["rank", *(_words(phase) for phase in used), "step"], _phase_rows(ranks, used)),
        "<h2>One step over all ranks</h2>",
        "<p>On the clock of rank 0; transfers between ranks below each rank's phases.</p>",
        _svg("Timeline of one step, a row for each rank", *_timeline(ranks)),
    ]
    if profile["operations"]:
        header = ["transfers in a step", "group", "ranks", "count", "sent", "through memory", "time", "a second"]
        body += ["<h2>Transfers of the rank that sends most</h2>", _table(header, _operation_rows(profile))]
    if ranks[0]["operators"]:
        header = ["operator", "calls", "on the CPU", "on the GPU"]
        rows = [[name, str(calls), _ms(cpu_s), _ms(gpu_s)] for name, calls, cpu_s, gpu_s in ranks[0]["operators"]]
        body += ["<h2>Operators of a step on rank 0, by their own time</h2>", _table(header, rows)]
    return _html(name, body)


def comparison(profiles: Mapping[str, Mapping[str, Any]]) -> str:
    """A page of several runs, by name: the step of each run's slowest rank, and what is first in its diagnosis."""
    slowest = {name: max(profile["ranks"], key=lambda rank: rank["step_s"]) for name, profile in profiles.items()}
    used = [phase for phase in PHASES if any(phase in rank["phases_s"] for rank in slowest.values())]
    rows = [
        [
            name,
            profile["strategy"]["name"],
            *(_ms(slowest[name]["phases_s"].get(phase, 0.0)) for phase in used),
            _ms(profile["step_s"]),
            profile["findings"][0]["kind"] if profile["findings"] else "nothing found",
        ]
        for name, profile in profiles.items()
    ]
    header = ["run", "strategy", *(_words(phase) for phase in used), "step", "diagnosis"]
    bars = _bars([(name, rank["phases_s"]) for name, rank in slowest.items()])
    return _html(
        "Profiles compared",
        [
            "<h1>Profiles compared</h1>",
            "<p>A step of the slowest rank of each run.</p>",
            _legend(used),
            _svg("Phases of a step by run; the table below has the numbers", *bars),
            _table(header, rows),
        ],
    )


def _html(title: str, body: Sequence[str]) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _diagnosis(profile: Mapping[str, Any]) -> list[str]:
    if not profile["findings"]:
        return ["<p>Nothing was found that would save 5 % of a step.</p>"]
    items = []
    for finding in profile["findings"]:
        share = 100 * finding["saving_s"] / profile["step_s"]
        items.append(
            f"<li><strong>{escape(finding['kind'])}</strong>: {_ms(finding['step_s'])} a step predicted, {share:.0f} % "
            f"less<p>{escape(finding['evidence'])}</p><p>{escape(finding['remedy'])}</p></li>"
        )
    return ["<ol>", *items, "</ol>"]


def _bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> tuple[float, Iterator[str]]:
    """A stacked bar of phases for each row, on one scale."""
    longest_s = max(sum(phases_s.values()) for _, phases_s in rows)

    def draw() -> Iterator[str]:
        for row, (label, phases_s) in enumerate(rows):
            at_s = 0.0
            yield _label(label, row * _ROW)
            for phase, seconds in phases_s.items():
                yield _box(phase, at_s, at_s + seconds, row * _ROW, _ROW - 6, longest_s, label)
                at_s += seconds
        yield from _axis(longest_s, len(rows) * _ROW)

    return len(rows) * _ROW + _AXIS, draw()


def _timeline(ranks: Sequence[Mapping[str, Any]]) -> tuple[float, Iterator[str]]:
    """The middle step by its length on the first rank; of a pipeline, one whose passes are recorded."""
    count = min(len(rank["steps"]) for rank in ranks)
    first = ranks[0]["steps"]
    recorded = [i for i in range(count) if any(phase == "stage_wait" for phase, *_ in first[i]["parts"])]
    lengths = sorted(recorded or range(count), key=lambda i: first[i]["end_s"] - first[i]["start_s"])
    steps = [rank["steps"][lengths[(len(lengths) - 1) // 2]] for rank in ranks]
    start_s = min(step["start_s"] for step in steps)
    span_s = max(step["end_s"] for step in steps) - start_s

    def draw() -> Iterator[str]:
        for row, (rank, step) in enumerate(zip(ranks, steps, strict=True)):
            yield _label(f"rank {rank['rank']}", row * _ROW)
            for phase, begin_s, end_s in step["parts"]:
                yield _box(
                    phase, begin_s - start_s, end_s - start_s, row * _ROW, _ROW - 12, span_s, f"rank {rank['rank']}"
                )
            for operation, group, _, begin_s, end_s, *_ in step["transfers"]:
                x, width = _place(begin_s - start_s, end_s - start_s, span_s)
                title = f"rank {rank['rank']}: {operation} ({group}), {_ms(end_s - begin_s)}"
                yield (
                    f'<rect x="{x:.2f}" y="{row * _ROW + _ROW - 11:g}" width="{width:.2f}" height="5" fill="#000">'
                    f"<title>{escape(title)}</title></rect>"
                )
        yield from _axis(span_s, len(ranks) * _ROW)

    return len(ranks) * _ROW + _AXIS, draw()


def _place(begin_s: float, end_s: float, span_s: float) -> tuple[float, float]:
    scale = (_WIDTH - _LEFT - 10) / span_s
    return _LEFT + begin_s * scale, max(0.3, (end_s - begin_s) * scale)


def _box(phase: str, begin_s: float, end_s: float, y: float, height: float, span_s: float, who: str) -> str:
    x, width = _place(begin_s, end_s, span_s)
    return (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{_COLOURS[phase]}" '
        f'stroke="#555" stroke-width=".4"><title>{escape(who)}: {_words(phase)}, {_ms(end_s - begin_s)}</title></rect>'
    )


def _label(text: str, y: float) -> str:
    shown = text if len(text) <= _LABEL else f"{text[: _LABEL - 1]}…"
    return f'<text x="4" y="{y + 15:g}">{escape(shown)}<title>{escape(text)}</title></text>'


def _axis(span_s: float, y: float) -> Iterator[str]:
    for part in range(5):
        seconds = span_s * part / 4
        x, _ = _place(seconds, seconds, span_s)
        yield f'<text x="{x:.1f}" y="{y + 14:g}" text-anchor="{"end" if part == 4 else "middle"}">{_ms(seconds)}</text>'


def _svg(meaning: str, height: float, shapes: Iterator[str]) -> str:
    return (
        f'<div class="wide"><svg role="img" aria-label="{escape(meaning)}" viewBox="0 0 {_WIDTH:g} {height:g}" '
        f'style="min-width: 34rem" font-size="13">{"".join(shapes)}</svg></div>'
    )


def _legend(phases: Sequence[str]) -> str:
    entries = "".join(f'<li><span style="background: {_COLOURS[p]}"></span>{_words(p)}</li>' for p in phases)
    return f'<ul class="legend">{entries}</ul>'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _phase_rows(ranks: Sequence[Mapping[str, Any]], phases: Sequence[str]) -> list[list[str]]:
    return [
        [f"{rank['rank']} ({rank['host']})", *(_ms(rank["phases_s"].get(p, 0.0)) for p in phases), _ms(rank["step_s"])]
        for rank in ranks
    ]


def _operation_rows(profile: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            operation["operation"],
            operation["group"],
            str(operation["group_size"]),
            number(operation["count"]),
            size(operation["sent_bytes"]),
            size(operation["memory_bytes"]),
            _ms(operation["seconds"]),
            size(operation["sent_bytes"] / operation["seconds"]) if operation["seconds"] else "-",
        ]
        for operation in sorted(profile["operations"], key=lambda operation: -operation["seconds"])
    ]


def _words(phase: str) -> str:
    return phase.replace("_", " ")


def _ms(seconds: float) -> str:
    return f"{number(1e3 * seconds)} ms"


def _versions(profile: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in profile["versions"].items())
