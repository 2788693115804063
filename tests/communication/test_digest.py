"""What differs between ranks is named, with its values and who has them."""

import torch
from torch import nn

from lightning_multigpu.communication.digest import disagreement, fingerprint, model_table, rank_list, value_text


class Thing:
    pass


def test_each_entry_with_its_values_and_their_ranks_and_how_many_more() -> None:
    tables = {rank: {"torch": "2.13", "option x": "2" if rank == 1 else "1"} for rank in range(4)}
    assert disagreement(tables, "are not alike") == "the ranks are not alike: option x: 1 on ranks 0, 2-3; 2 on rank 1"
    assert disagreement({0: {}, 1: {"b": "7"}}, "differ") == "the ranks differ: b: (none) on rank 0; 7 on rank 1"
    tables = {rank: {f"entry {i}": str(rank) for i in range(8)} for rank in range(2)}
    assert (disagreement(tables, "differ") or "").splitlines() == [
        "the ranks differ: entry 0: 0 on rank 0; 1 on rank 1",
        *(f"  entry {i}: 0 on rank 0; 1 on rank 1" for i in range(1, 5)),
        "  and 3 more",
    ]
    assert rank_list([7, 0, 1, 2, 5]) == "ranks 0-2, 5, 7"


def test_values_by_name_without_a_place_in_memory_and_cut_but_not_alike() -> None:
    assert value_text(rank_list) == "lightning_multigpu.communication.digest.rank_list"
    assert value_text(Thing) == f"{__name__}.Thing"
    assert value_text(Thing()) == value_text(Thing())
    one, other = value_text("x" * 500 + "1"), value_text("x" * 500 + "2")
    assert len(one) < 150
    assert one != other


def test_models_by_names_types_and_shapes_in_order() -> None:
    table = model_table([("weight", torch.zeros(2, 4)), ("count", torch.zeros((), dtype=torch.int64))])
    assert table == {"tensor 0": "weight float32 (2, 4)", "tensor 1": "count int64 ()"}
    assert model_table(nn.LazyLinear(3).named_parameters())["tensor 0"] == "weight float32 of no shape yet"
    assert fingerprint({"a": "1", "b": "2"}) == fingerprint({"b": "2", "a": "1"})
    assert fingerprint({"a": "1"}) != fingerprint({"a": "2"})
