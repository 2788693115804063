"""A pipeline's schedule as a picture: a row for each rank, a box for each pass over a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from lightning_multigpu.planning.numbers import ms
from lightning_multigpu.planning.pipelines.timeline import BUSY, Interval, Timeline, span
from lightning_multigpu.report import colours

_COLOURS = {
    "forward": colours.SKY,
    "backward": colours.ORANGE,
    "weight": colours.GREEN,
    "send": colours.GREY,
    "receive": colours.LIGHT,
}
_LEFT, _WIDTH, _RIGHT, _MOST_TICKS = 70.0, 1100.0, 10.0, 12
_ROW, _GAP, _AXIS, _TITLE, _LEGEND = 22.0, 6.0, 26.0, 30.0, 34.0
_DIGIT = 6.5  # the width of one, and of the space around a number


def draw(panels: Mapping[str, Sequence[Timeline]], labels: Sequence[str]) -> str:
    """Draws the timelines under each title as an SVG document, one panel below the other on one scale of time.

    A panel begins with its first pass and ends with its last. ``labels`` name the ranks.

    Boxes have the number of their micro-batch if there is room; later stages of a rank are darker. White is idle. A
    pointer that rests on a box shows its meaning and its milliseconds.

    Raises:
        ValueError: a panel has no pass.
    """
    spans = [span(timelines) for timelines in panels.values()]
    longest_s = max(end_s - start_s for start_s, end_s in spans)
    shapes: list[str] = []
    y = 0.0
    for (title, timelines), (start_s, end_s) in zip(panels.items(), spans, strict=True):
        shapes.append(_text(10, y + 19, title, weight="bold"))
        y += _TITLE
        for label, timeline in zip(labels, timelines, strict=True):
            intervals = _within(timeline, start_s, end_s)
            shapes += [_text(4, y + 17, label), *_boxes(timelines, label, intervals, longest_s, y)]
            y += _ROW + _GAP
        shapes += _axis(longest_s, y)
        y += _AXIS
    drawn = [interval for timelines in panels.values() for timeline in timelines for interval in timeline]
    darker = "; darker: later stages of the rank" if any(i.stage >= len(labels) for i in drawn) else ""
    shapes += _legend({interval.kind for interval in drawn}, darker, y)
    width, height = f"{_LEFT + _WIDTH + _RIGHT:g}", f"{y + _LEGEND:g}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    head += 'font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *shapes, "</svg>\n"])


def _boxes(
    timelines: Sequence[Timeline],
    label: str,
    intervals: Iterator[tuple[Interval, float, float]],
    longest_s: float,
    y: float,
) -> Iterator[str]:
    """The boxes of a rank, whose intervals come with their seconds from the panel's begin."""
    num_ranks, stages = len(timelines), {i.stage for line in timelines for i in line if i.kind in BUSY}
    per_rank = math.ceil(len(stages) / num_ranks)
    for i, begin_s, stop_s in intervals:
        is_busy = i.kind in BUSY
        x, width = _LEFT + begin_s * _WIDTH / longest_s, (stop_s - begin_s) * _WIDTH / longest_s
        opacity = 0.35 + 0.65 * (1 + i.stage // num_ranks) / per_rank if is_busy and per_rank > 1 else 1.0
        meaning = f"{label}, stage {i.stage}: {i.kind}, micro-batch {i.micro_batch}, {1e3 * i.seconds:.3f} ms"
        yield (
            f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_ROW:g}" fill="{_COLOURS[i.kind]}" '
            f'fill-opacity="{opacity:.2f}" stroke="#555" stroke-width=".4"><title>{escape(meaning)}</title></rect>'
        )
        if is_busy and width >= _DIGIT * (1 + len(str(i.micro_batch))):
            yield _text(x + width / 2, y + 16, str(i.micro_batch), anchor="middle")


def _axis(end_s: float, y: float) -> Iterator[str]:
    """The scale, in steps of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(end_s / _MOST_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * _MOST_TICKS >= end_s)
    for tick in range(math.floor(end_s / step) + 1):
        at_s, anchor = tick * step, "end" if tick * step > 0.97 * end_s else "middle"
        yield _text(_LEFT + at_s * _WIDTH / end_s, y + 18, ms(at_s), anchor=anchor)


def _legend(kinds: set[str], darker: str, y: float) -> Iterator[str]:
    for place, kind in enumerate(kind for kind in _COLOURS if kind in kinds):
        x = _LEFT + 130 * place
        yield f'<rect x="{x:g}" y="{y + 6:g}" width="14" height="14" fill="{_COLOURS[kind]}"/>'
        yield _text(x + 20, y + 18, kind)
    yield _text(_LEFT + 130 * len(kinds), y + 18, f"white: idle; numbers: micro-batches{darker}")


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def _within(timeline: Timeline, start_s: float, end_s: float) -> Iterator[tuple[Interval, float, float]]:
    """The intervals of a timeline between two moments, with the begin and end of the part in between, from 0."""
    for interval in timeline:
        begin_s, stop_s = max(interval.start_s, start_s), min(interval.end_s, end_s)
        if stop_s > begin_s:
            yield interval, begin_s - start_s, stop_s - start_s
