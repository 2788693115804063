"""Figures of reports, as text of SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

# Okabe and Ito's colours, which colour-blind people can tell apart.
ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
GREY, LIGHT = "#8a8a8a", "#d9d9d9"

_LEFT, _WIDTH, _RIGHT = 165.0, 825.0, 10.0
_ROW, _GAP, _AXIS, _TITLE, _LEGEND = 22.0, 6.0, 26.0, 30.0, 34.0
_THINNEST = 0.3
_LABEL = 20  # characters that fit there
_SHORT_LABEL = 9  # that fit there on a small screen, whose letters are larger
_DIGIT = 6.5  # the width of one, and of the space around a number


class SvgFigure:
    """A figure of rows with boxes over one scale from 0 to ``end``, whose values are shown as the text of ``show``.

    ``left`` and ``width`` are pixels of the labels, and of the scale.
    """

    def __init__(self, end: float, show: Callable[[float], str], *, left: float = _LEFT, width: float = _WIDTH) -> None:
        self._end, self._show, self._left, self._width = end, show, left, width
        self._shapes: list[str] = []
        self._height = 0.0
        self._has_long_labels = False
        self._drawn: dict[float, float] = {}

    def title(self, text: str) -> None:
        self._shapes.append(_text(10, self._height + 19, text, weight="bold"))
        self._height += _TITLE

    def row(self, label: str) -> None:
        self._has_long_labels |= len(label) > _SHORT_LABEL
        shown = label if len(label) <= _LABEL else f"…{label[1 - _LABEL :]}"  # folders differ at the end
        self._shapes.append(_text(4, self._height + 17, shown, title=label))
        self._height += _ROW + _GAP
        self._drawn.clear()

    def box(
        self,
        start: float,
        end: float,
        colour: str,
        title: str,
        *,
        top: float = 0,
        height: float = _ROW,
        opacity: float | None = None,
        text: str = "",
    ) -> None:
        """Puts a box into the row; ``title`` shows where the pointer rests on it, and ``text`` where it fits in.

        A box too thin to be seen is left out where an earlier one at that ``top`` was made wide enough to cover it.
        """
        x, natural = self._x(start), self._x(end) - self._x(start)
        if natural < _THINNEST and x + natural <= self._drawn.get(top, 0.0):
            return
        width, y = max(_THINNEST, natural), self._height - _ROW - _GAP + top
        self._drawn[top] = max(self._drawn.get(top, 0.0), x + width)
        shade = "" if opacity is None else f' fill-opacity="{opacity:.2f}"'
        self._shapes.append(
            f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{colour}"{shade} stroke="#555" '
            f'stroke-width=".4"><title>{escape(title)}</title></rect>'
        )
        if text and width >= _DIGIT * (1 + len(text)):
            self._shapes.append(_text(x + width / 2, y + 16, text, anchor="middle"))

    def axis(self, most: int = 5) -> None:
        """Puts the scale below, in steps of 1, 2 or 5 times a power of ten, at most as many."""
        power = 10 ** math.floor(math.log10(self._end / most))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= self._end)
        for tick in range(math.floor(self._end / step) + 1):
            at, anchor = tick * step, "end" if tick * step > 0.97 * self._end else "middle"
            self._shapes.append(_text(self._x(at), self._height + 18, self._show(at), anchor=anchor))
        self._height += _AXIS

    def legend(self, colours: Mapping[str, str], further: str) -> None:
        """Puts the names of colours below, and a text behind them."""
        for place, (name, colour) in enumerate(colours.items()):
            x = self._left + 130 * place
            self._shapes.append(f'<rect x="{x:g}" y="{self._height + 6:g}" width="14" height="14" fill="{colour}"/>')
            self._shapes.append(_text(x + 20, self._height + 18, name))
        self._shapes.append(_text(self._left + 130 * len(colours), self._height + 18, further))
        self._height += _LEGEND

    def part_of_page(self, meaning: str) -> str:
        """The figure for an HTML page, with its text alternative."""
        style = 'style="min-width: 46rem"' if self._has_long_labels else 'class="fits"'
        size = f"{self._left + self._width + _RIGHT:g} {self._height:g}"
        return (
            f'<div class="wide"><svg role="img" aria-label="{escape(meaning)}" viewBox="0 0 {size}" font-size="13" '
            f"{style}>{''.join(self._shapes)}</svg></div>"
        )

    def document(self) -> str:
        width, height = self._left + self._width + _RIGHT, self._height
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} '
        head += f'{height:g}" font-family="sans-serif" font-size="12">'
        return "\n".join(
            [head, f'<rect width="{width:g}" height="{height:g}" fill="white"/>', *self._shapes, "</svg>\n"]
        )

    def _x(self, value: float) -> float:
        return self._left + value * self._width / self._end


def bars(
    meaning: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    colours: Mapping[str, str],
    show: Callable[[float], str],
) -> str:
    """A stacked bar for each row, of its parts by name; one of them is above 0."""
    figure = SvgFigure(max(sum(parts.values()) for _, parts in rows), show)
    for label, parts in rows:
        figure.row(label)
        at = 0.0
        for name, value in parts.items():
            figure.box(at, at + value, colours[name], f"{label}: {words(name)}, {show(value)}")
            at += value
    figure.axis()
    return figure.part_of_page(meaning)


def words(name: str) -> str:
    """``data_wait`` as two words."""
    return name.replace("_", " ")


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", title: str = "") -> str:
    tip = f"<title>{escape(title)}</title>" if title else ""
    return f'<text x="{x:.1f}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}{tip}</text>'
