"""Which server has which elements."""

import pytest
import torch
from torch import nn, optim

from lightning_multigpu.placement.table import Layout, Split, bucket_parts, split_of

NUMELS = [5, 40, 1, 0, 17, 8]


@pytest.mark.parametrize("split", ["elements", "tensors", "nothing"])
@pytest.mark.parametrize("num_servers", [1, 2, 3, 80])
def test_every_element_is_on_one_server(split: Split, num_servers: int) -> None:
    layout = Layout(NUMELS, num_servers, split)
    owners = [[0] * numel for numel in NUMELS]
    flat = [0] * layout.total
    for server, (first, last) in enumerate(layout.bounds):
        pieces = layout.pieces(server)
        assert [piece.offset for piece in pieces] == sorted(piece.offset for piece in pieces)
        assert sum(piece.stop - piece.start for piece in pieces) == last - first
        for piece in pieces:
            assert first <= piece.offset
            assert piece.end <= last
            for element in range(piece.start, piece.stop):
                owners[piece.number][element] += 1
            for place in range(piece.offset, piece.end):
                flat[place] += 1
    assert owners == [[1] * numel for numel in NUMELS]
    assert flat == [1] * layout.total


def test_parts_are_even_where_tensors_are_cut() -> None:
    sizes = [last - first for first, last in Layout(NUMELS, 3, "elements").bounds]
    assert sizes == [24, 24, 23]


def test_whole_tensors_go_to_the_emptiest_part() -> None:
    layout = Layout(NUMELS, 2, "tensors")
    assert [[piece.number for piece in layout.pieces(server)] for server in range(2)] == [[1], [0, 2, 4, 5]]
    assert all(piece.start == 0 and piece.stop == NUMELS[piece.number] for s in range(2) for piece in layout.pieces(s))
    assert layout.bounds == [(0, 40), (40, 71)]


def test_an_optimizer_of_another_class_is_not_divided() -> None:
    class Mine(optim.Adam):
        """It may relate any two parameters."""

    parameters = [nn.Parameter(torch.zeros(2, 2))]
    assert split_of(optim.Adam(parameters)) == "elements"
    assert split_of(optim.Adafactor(parameters)) == "tensors"
    assert split_of(Mine(parameters)) == "nothing"


@pytest.mark.parametrize("split", ["elements", "tensors", "nothing"])
@pytest.mark.parametrize("num_servers", [1, 3])
def test_buckets_hold_every_element_once_and_begin_at_the_last_tensor(split: Split, num_servers: int) -> None:
    numels = [4, 0, 25, 3, 10]
    parts = bucket_parts(numels, num_servers, split, full_numel=8)
    seen = []
    for server, pieces in parts:
        assert server < num_servers
        assert [piece.offset for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
        seen += [(piece.number, element) for piece in pieces for element in range(piece.start, piece.stop)]
    assert sorted(seen) == [(n, element) for n, numel in enumerate(numels) for element in range(numel)]
    assert 4 in [piece.number for piece in parts[0][1]] or split == "tensors"
    if split == "elements":
        sizes = [pieces[-1].end for _, pieces in parts]
        assert max(sizes) <= 8
        assert max(sizes) - min(sizes) <= 1
        assert [server for server, _ in parts] == [*range(num_servers)] * (6 // num_servers)
    else:
        assert len(parts) == (1 if split == "nothing" else 3)
