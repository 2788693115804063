"""Pieces: which parameters a flat tensor is made of, and how it is cut."""

from __future__ import annotations

import pytest

from lightning_multigpu.communication.compression import GradientPiece, cut
from lightning_multigpu.communication.compression.pieces import offsets

PIECES = (
    GradientPiece("a", (2, 3)),
    GradientPiece("b", (4,)),
    GradientPiece("c", ()),
    GradientPiece("d", (0, 5)),
    GradientPiece("e", (3, 3), 2, 7),
)


def test_sizes() -> None:
    assert [piece.numel for piece in PIECES] == [6, 4, 1, 0, 5]
    assert [piece.is_whole for piece in PIECES] == [True, True, True, True, False]
    assert offsets(PIECES) == [0, 6, 10, 11, 11, 16]


@pytest.mark.parametrize(("start", "stop"), [(-2, 3), (4, 3), (0, 7)])
def test_a_piece_lies_within_its_parameter(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"elements {start} to {stop} of 'a'.* 6 elements"):
        GradientPiece("a", (2, 3), start, stop)


@pytest.mark.parametrize("border", range(17))
def test_cutting_keeps_every_element_once(border: int) -> None:
    def elements(pieces: tuple[GradientPiece, ...]) -> list[tuple[str, int]]:
        return [(piece.name, i) for piece in pieces for i in range(piece.start, piece.stop)]

    first, second = cut(PIECES, 0, border), cut(PIECES, border, 16)
    assert elements(first) + elements(second) == elements(PIECES)
    assert offsets(first)[-1] == border
