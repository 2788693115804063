"""Figures of an HTML page, as text of SVG. Each figure has a text alternative."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import cycle

from lightning_multigpu.planning.numbers import number

# Okabe and Ito's colours, which colour-blind people can tell apart.
ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
GREY, LIGHT = "#8a8a8a", "#d9d9d9"
LINES = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY, "#000")
"""Colours of lines, in turn."""

_WIDTH, _LEFT, _ROW, _AXIS = 1000.0, 165.0, 28.0, 26.0
_PLOT = 110.0
_THINNEST = 0.3
_LABEL = 20  # characters that fit there
_SHORT_LABEL = 9  # that fit there on a small screen, whose letters are larger


class Rows:
    """A figure of rows with boxes, over one scale from 0 to ``end``.

    Args:
        meaning: the text alternative.
        end: of the scale, above 0.
        show: a value on the scale as text.
    """

    def __init__(self, meaning: str, end: float, show: Callable[[float], str]) -> None:
        self._meaning, self._end, self._show = meaning, end, show
        self._shapes: list[str] = []
        self._height = 0.0
        self._has_long_labels = False
        self._drawn: dict[float, float] = {}

    def row(self, label: str) -> None:
        """Begins a row."""
        self._has_long_labels |= len(label) > _SHORT_LABEL
        shown = label if len(label) <= _LABEL else f"…{label[1 - _LABEL :]}"  # folders differ at the end
        self._shapes.append(
            f'<text x="4" y="{self._height + 18:g}">{escape(shown)}<title>{escape(label)}</title></text>'
        )
        self._height += _ROW
        self._drawn.clear()

    def box(
        self, start: float, end: float, colour: str, title: str, *, top: float = 0, height: float = _ROW - 6
    ) -> None:
        """Puts a box into the row; ``title`` shows where the pointer rests on it.

        A box too thin to be seen is left out where an earlier one at that ``top`` was made wide enough to cover it.
        """
        x, natural = _x(start, self._end), _x(end, self._end) - _x(start, self._end)
        if natural < _THINNEST and x + natural <= self._drawn.get(top, 0.0):
            return
        width = max(_THINNEST, natural)
        self._drawn[top] = max(self._drawn.get(top, 0.0), x + width)
        self._shapes.append(
            f'<rect x="{x:.2f}" y="{self._height - _ROW + top:g}" width="{width:.2f}" '
            f'height="{height:g}" fill="{colour}" stroke="#555" stroke-width=".4"><title>{escape(title)}</title></rect>'
        )

    def html(self) -> str:
        """The figure with its axis."""
        shapes = [*self._shapes, *_axis(self._end, self._height, self._show)]
        return _svg(self._meaning, self._height + _AXIS, shapes, scrolls=self._has_long_labels)


def bars(
    meaning: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    colours: Mapping[str, str],
    show: Callable[[float], str],
) -> str:
    """A stacked bar for each row, of its parts by name; one of them is above 0."""
    figure = Rows(meaning, max(sum(parts.values()) for _, parts in rows), show)
    for label, parts in rows:
        figure.row(label)
        at = 0.0
        for name, value in parts.items():
            figure.box(at, at + value, colours[name], f"{label}: {words(name)}, {show(value)}")
            at += value
    return figure.html()


def plot(
    meaning: str, lines: Mapping[str, Sequence[tuple[float, float]]], end_s: float, show: Callable[[float], str]
) -> str:
    """Lines over the seconds from 0 to ``end_s``, from points of seconds and values; heights begin at 0."""
    largest = max(value for points in lines.values() for _, value in points) or 1.0
    shapes = []
    for share in (0.0, 0.5, 1.0):
        y = _PLOT * (1 - share) + 10
        shapes.append(f'<text x="4" y="{y + 8:g}">{show(largest * share)}</text>')
        shapes.append(f'<path d="M{_LEFT:g} {y:g}H{_WIDTH - 10:g}" stroke="{LIGHT}"/>')
    for (name, points), colour in zip(lines.items(), cycle(LINES)):
        at = " ".join(f"{_x(at_s, end_s):.1f},{10 + _PLOT * (1 - value / largest):.1f}" for at_s, value in points)
        shapes.append(
            f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-opacity=".8" '
            'vector-effect="non-scaling-stroke">'
            f"<title>{escape(name)}</title></polyline>"
        )
    shapes += _axis(end_s, _PLOT + 12, lambda seconds: f"{number(seconds)} s")
    return _svg(meaning, _PLOT + 12 + _AXIS, shapes)


def words(name: str) -> str:
    """``data_wait`` as two words."""
    return name.replace("_", " ")


def _x(value: float, end: float) -> float:
    return _LEFT + value * (_WIDTH - _LEFT - 10) / end


def _axis(end: float, y: float, show: Callable[[float], str]) -> list[str]:
    return [
        f'<text x="{_x(end * part / 4, end):.1f}" y="{y + 18:g}" text-anchor="{"end" if part == 4 else "middle"}">'
        f"{show(end * part / 4)}</text>"
        for part in range(5)
    ]


def _svg(meaning: str, height: float, shapes: Sequence[str], *, scrolls: bool = False) -> str:
    style = ' style="min-width: 46rem"' if scrolls else ' class="fits"'
    return (
        f'<div class="wide"><svg role="img" aria-label="{escape(meaning)}" viewBox="0 0 {_WIDTH:g} {height:g}" '
        f'font-size="13"{style}>{"".join(shapes)}</svg></div>'
    )
