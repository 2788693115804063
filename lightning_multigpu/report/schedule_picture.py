"""A pipeline's schedule as a picture: a row for each rank, a box for each pass over a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_multigpu.planning.numbers import ms
from lightning_multigpu.planning.pipelines.timeline import BUSY, Interval, Timeline, span
from lightning_multigpu.report import figures

_COLOURS = {
    "forward": figures.SKY,
    "backward": figures.ORANGE,
    "weight": figures.GREEN,
    "send": figures.GREY,
    "receive": figures.LIGHT,
}
_LEFT, _WIDTH, _MOST_TICKS = 70, 1100, 12


@dataclass(frozen=True)
class Panel:
    """A picture of the timelines of some ranks in one step, under a title; ``labels`` name the ranks."""

    title: str
    labels: Sequence[str]
    timelines: Sequence[Timeline]


def draw(panels: Sequence[Panel]) -> str:
    """Draws panels as an SVG document, one below the other on one scale of time, each from its first pass to its last.

    Boxes have the number of their micro-batch if there is room; later stages of a rank are darker. White is idle. A
    pointer that rests on a box shows its meaning and its milliseconds.

    Raises:
        ValueError: a panel has no pass.
    """
    spans = [span(panel.timelines) for panel in panels]
    figure = figures.SvgFigure(max(end_s - start_s for start_s, end_s in spans), ms, left=_LEFT, width=_WIDTH)
    for panel, (start_s, end_s) in zip(panels, spans, strict=True):
        num_ranks, stages = len(panel.timelines), {i.stage for line in panel.timelines for i in line if i.kind in BUSY}
        per_rank = math.ceil(len(stages) / num_ranks)
        figure.title(panel.title)
        for label, timeline in zip(panel.labels, panel.timelines, strict=True):
            figure.row(label)
            for i, begin_s, stop_s in _within(timeline, start_s, end_s):
                is_busy = i.kind in BUSY
                figure.box(
                    begin_s - start_s,
                    stop_s - start_s,
                    _COLOURS[i.kind],
                    f"{label}, stage {i.stage}: {i.kind}, micro-batch {i.micro_batch}, {1e3 * i.seconds:.3f} ms",
                    opacity=0.35 + 0.65 * (1 + i.stage // num_ranks) / per_rank if is_busy and per_rank > 1 else 1.0,
                    text=str(i.micro_batch) if is_busy else "",
                )
        figure.axis(_MOST_TICKS)
    several = any(i.stage >= len(panel.timelines) for panel in panels for line in panel.timelines for i in line)
    darker = "; darker: later stages of the rank" if several else ""
    figure.legend({kind: _COLOURS[kind] for kind in _kinds(panels)}, f"white: idle; numbers: micro-batches{darker}")
    return figure.document()


def _kinds(panels: Sequence[Panel]) -> list[str]:
    found = {i.kind for panel in panels for timeline in panel.timelines for i in timeline}
    return [kind for kind in _COLOURS if kind in found]


def _within(timeline: Timeline, start_s: float, end_s: float) -> Iterator[tuple[Interval, float, float]]:
    """The intervals of a timeline between two moments, with their parts in between."""
    for interval in timeline:
        begin_s, stop_s = max(interval.start_s, start_s), min(interval.end_s, end_s)
        if stop_s > begin_s:
            yield interval, begin_s, stop_s
