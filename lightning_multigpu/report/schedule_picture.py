"""A pipeline's schedule as a picture: a row for each rank, a box for each pass over a micro-batch."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.sax.saxutils import escape

from lightning_multigpu.planning.pipelines.timeline import BUSY, Interval, Timeline, span

FILE_STEM = "pipeline_schedule"
FORMATS = ("svg", "png", "pdf")

# Okabe and Ito's colours, which colour-blind people can tell apart.
_COLOURS = {
    "forward": "#56b4e9",
    "backward": "#e69f00",
    "weight": "#009e73",
    "send": "#8a8a8a",
    "receive": "#d9d9d9",
}
_LEFT, _WIDTH, _RIGHT = 70, 1100, 20
_ROW, _GAP, _TITLE, _AXIS = 26, 4, 30, 34
_LEGEND = 34
_DIGIT = 6.5  # the width of one, and of the space around a number


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
    wall_s = max(end_s - start_s for start_s, end_s in spans)
    body: list[str] = []
    top = 0.0
    for panel, (start_s, end_s) in zip(panels, spans, strict=True):
        body += _panel(panel, start_s, end_s, top, _WIDTH / wall_s)
        top += _TITLE + len(panel.labels) * (_ROW + _GAP) + _AXIS
    kinds = [k for k in _COLOURS if any(i.kind == k for panel in panels for line in panel.timelines for i in line)]
    several = any(i.stage >= len(panel.timelines) for panel in panels for line in panel.timelines for i in line)
    body += _legend(kinds, top, "; darker: later stages of the rank" if several else "")
    width, height = _LEFT + _WIDTH + _RIGHT, top + _LEGEND
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" '
        f'viewBox="0 0 {width} {height:g}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height:g}" fill="white"/>', *body, "</svg>", ""])


def check_picture(path: Path, option: str) -> None:
    """Checks that :func:`picture` can draw into a file of that name.

    Raises:
        ValueError: the name's ending is none of :data:`FORMATS`, or it needs matplotlib, which is not installed.
    """
    if path.suffix.removeprefix(".") not in FORMATS:
        raise ValueError(f"{option}={path}: a picture's name ends in one of {', '.join(FORMATS)}")
    if path.suffix != ".svg" and find_spec("matplotlib") is None:
        raise ValueError(
            f"{option}={path} needs matplotlib, which is not installed; pip install 'lightning-multigpu[plot]', or let "
            "the name end in .svg"
        )


def picture(panels: Sequence[Panel], suffix: str) -> bytes:
    """The contents of a file with that suffix: what :func:`draw` draws, ".png" and ".pdf" by matplotlib."""
    if suffix == ".svg":
        return draw(panels).encode()
    heights = [1 + len(panel.labels) for panel in panels]
    size = (12, 0.6 + 0.45 * sum(heights))
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), height_ratios=heights, squeeze=False, sharex=True)
    for (axis,), panel in zip(axes, panels, strict=True):
        start_s, end_s = span(panel.timelines)
        for row, timeline in enumerate(panel.timelines):
            for interval in timeline:
                begin_s, stop_s = max(interval.start_s, start_s), min(interval.end_s, end_s)
                if stop_s > begin_s:
                    box = (1e3 * (begin_s - start_s), 1e3 * (stop_s - begin_s))
                    edge = "white" if interval.kind in BUSY else "none"
                    axis.broken_barh([box], (row - 0.45, 0.9), facecolors=_COLOURS[interval.kind], edgecolors=edge)
        axis.set_yticks(range(len(panel.labels)), panel.labels)
        axis.invert_yaxis()
        axis.set_title(panel.title, loc="left", fontsize=10)
    kinds = [kind for kind in _COLOURS if any(i.kind == kind for p in panels for line in p.timelines for i in line)]
    patch = importlib.import_module("matplotlib.patches").Patch
    colours = [patch(color=_COLOURS[kind]) for kind in kinds]
    figure.legend(colours, kinds, ncols=len(kinds), loc="outside lower center")
    axes[-1][0].set_xlabel("ms; white: idle")
    contents = io.BytesIO()
    figure.savefig(contents, format=suffix.removeprefix("."), dpi=120)
    return contents.getvalue()


def _panel(panel: Panel, start_s: float, end_s: float, top: float, scale: float) -> Iterator[str]:
    """``scale``: pixels a second."""
    yield _text(10, top + 19, panel.title, weight="bold")
    stages = sorted({i.stage for timeline in panel.timelines for i in timeline if i.kind in BUSY})
    per_rank = math.ceil(len(stages) / len(panel.timelines))
    for row, (label, timeline) in enumerate(zip(panel.labels, panel.timelines, strict=True)):
        y = top + _TITLE + row * (_ROW + _GAP)
        yield _text(10, y + 17, label)
        for interval in timeline:
            begin_s, stop_s = max(interval.start_s, start_s), min(interval.end_s, end_s)
            if stop_s > begin_s:
                local = interval.stage // len(panel.timelines)
                opacity = (1 + local) / per_rank if interval.kind in BUSY and per_rank > 1 else 1.0
                x, width = _LEFT + (begin_s - start_s) * scale, (stop_s - begin_s) * scale
                yield _box(interval, label, x, y, width, 0.35 + 0.65 * opacity)
    yield from _axis((end_s - start_s), top + _TITLE + len(panel.labels) * (_ROW + _GAP), scale)


def _box(interval: Interval, label: str, x: float, y: float, width: float, opacity: float) -> str:
    name = f"{label}, stage {interval.stage}: {interval.kind}, micro-batch {interval.micro_batch}"
    rect = (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_ROW}" fill="{_COLOURS[interval.kind]}" '
        f'fill-opacity="{min(1.0, opacity):.2f}"'
    )
    if interval.kind in BUSY:
        rect += ' stroke="white" stroke-width="0.6"'
    box = f"{rect}><title>{escape(name)}, {1e3 * interval.seconds:.3f} ms</title></rect>"
    number = str(interval.micro_batch)
    if interval.kind in BUSY and width >= _DIGIT * (1 + len(number)):
        box += _text(x + width / 2, y + 17, number, anchor="middle")
    return box


def _axis(wall_s: float, y: float, scale: float) -> Iterator[str]:
    """Milliseconds, in steps of 1, 2 or 5 times a power of ten, at most twelve."""
    wall_ms = 1e3 * wall_s
    power = 10 ** math.floor(math.log10(wall_ms / 12))
    step_ms = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 12 >= wall_ms)
    yield f'<line x1="{_LEFT}" y1="{y:g}" x2="{_LEFT + wall_s * scale:.2f}" y2="{y:g}" stroke="black"/>'
    for tick in range(math.floor(wall_ms / step_ms) + 1):
        x = _LEFT + tick * step_ms / 1e3 * scale
        yield f'<line x1="{x:.2f}" y1="{y:g}" x2="{x:.2f}" y2="{y + 4:g}" stroke="black"/>'
        yield _text(x, y + 16, f"{tick * step_ms:g}", anchor="middle")
    yield _text(10, y + 16, "ms")


def _legend(kinds: Sequence[str], top: float, further: str) -> Iterator[str]:
    for place, kind in enumerate(kinds):
        x = _LEFT + 130 * place
        yield f'<rect x="{x}" y="{top + 6:g}" width="14" height="14" fill="{_COLOURS[kind]}"/>'
        yield _text(x + 20, top + 18, kind)
    yield _text(_LEFT + 130 * len(kinds), top + 18, f"white: idle; numbers: micro-batches{further}")


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.2f}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
