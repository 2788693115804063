"""What differs between ranks is named, with its values and who has them."""

from __future__ import annotations

import torch
from torch import nn

from lightning_multigpu.communication.digest import (
    disagreement,
    fingerprint,
    model_table,
    rank_list,
    value_text,
)


class Thing:
    pass


class TestDisagreement:
    def test_names_the_entry_each_value_and_its_ranks(self) -> None:
        tables = {rank: {"torch": "2.13", "option x": "2" if rank == 1 else "1"} for rank in range(4)}
        assert (
            disagreement(tables, "are not alike") == "the ranks are not alike: option x: 1 on ranks 0, 2-3; 2 on rank 1"
        )

    def test_an_entry_that_only_one_rank_has(self) -> None:
        assert disagreement({0: {}, 1: {"b": "7"}}, "differ") == "the ranks differ: b: (none) on rank 0; 7 on rank 1"

    def test_the_first_five_and_how_many_more(self) -> None:
        tables = {rank: {f"entry {i}": str(rank) for i in range(8)} for rank in range(2)}
        message = disagreement(tables, "differ")
        assert message is not None
        assert message.splitlines() == [
            "the ranks differ: entry 0: 0 on rank 0; 1 on rank 1",
            *(f"  entry {i}: 0 on rank 0; 1 on rank 1" for i in range(1, 5)),
            "  and 3 more",
        ]


def test_rank_list() -> None:
    assert rank_list([4]) == "rank 4"
    assert rank_list([7, 0, 1, 2, 5]) == "ranks 0-2, 5, 7"


class TestValues:
    def test_functions_and_classes_by_name(self) -> None:
        assert value_text(rank_list) == "lightning_multigpu.communication.digest.rank_list"
        assert value_text(Thing) == f"{__name__}.Thing"

    def test_no_place_in_memory(self) -> None:
        assert value_text(Thing()) == value_text(Thing())

    def test_long_values_are_cut_but_not_alike(self) -> None:
        one, other = value_text("x" * 500 + "1"), value_text("x" * 500 + "2")
        assert len(one) < 150
        assert one != other


class TestModels:
    def test_names_types_and_shapes_in_order(self) -> None:
        table = model_table([("weight", torch.zeros(2, 4)), ("count", torch.zeros((), dtype=torch.int64))])
        assert table == {"tensor 0": "weight float32 (2, 4)", "tensor 1": "count int64 ()"}

    def test_parameters_without_a_shape_yet(self) -> None:
        assert model_table(nn.LazyLinear(3).named_parameters())["tensor 0"] == "weight float32 of no shape yet"

    def test_fingerprints(self) -> None:
        assert fingerprint({"a": "1", "b": "2"}) == fingerprint({"b": "2", "a": "1"})
        assert fingerprint({"a": "1"}) != fingerprint({"a": "2"})
