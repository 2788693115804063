"""Which compression a measurement recommends, and how it measures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from lightning_multigpu.communication.compression import GradientPiece
from lightning_multigpu.engine.data_parallel.compression_choice import (
    candidates,
    choice,
    measure,
    sample_of,
    timed,
)

FLOAT, BFLOAT = torch.float32, torch.bfloat16


class TestChoice:
    @pytest.mark.parametrize(
        ("none", "bf16", "int8", "expected"),
        [
            (1.0, 0.5, 0.25, "int8"),
            (1.0, 0.5, 0.48, "bf16"),  # int8 loses more, and is not much faster
            (1.0, 0.95, 0.92, "none"),
            (1.0, 0.92, 0.85, "int8"),
            (1.0, 0.9, 1.0, "bf16"),
            (1.0, 1.0, 1.0, "none"),
            (1.0, 2.0, 3.0, "none"),
            (1.0, 3.0, 0.5, "int8"),
        ],
    )
    def test_what_loses_more_must_be_clearly_faster(self, none: float, bf16: float, int8: float, expected: str) -> None:
        for unit in (1e-6, 1.0, 100.0):
            assert choice({"none": none * unit, "bf16": bf16 * unit, "int8": int8 * unit}) == expected

    def test_nothing_to_choose_from(self) -> None:
        assert choice({"none": 1.0}) == "none"


class TestCandidates:
    @pytest.mark.parametrize(
        ("dtypes", "expected"),
        [
            ([torch.float32], ("bf16", "int8")),
            ([torch.bfloat16], ("int8",)),
            ([torch.float16], ("int8",)),
            ([torch.bfloat16, torch.float32], ("int8",)),
            ([torch.float64], ()),
            ([torch.float32, torch.float64], ()),
            ([torch.complex64], ()),
            ([], ()),
        ],
    )
    def test_by_types_of_gradients(self, dtypes: list[torch.dtype], expected: tuple[str, ...]) -> None:
        assert candidates(dtypes) == expected
        assert candidates(dtypes[::-1]) == expected


class TestSample:
    def test_has_the_gradients_that_backward_makes_first(self) -> None:
        parameters = {torch.empty(100): GradientPiece(str(i), (100,)) for i in range(4)}
        ((tensor, pieces),) = sample_of(parameters, 1000)
        assert tensor.numel() == sum(piece.numel for piece in pieces) == 250
        assert [(piece.name, piece.numel) for piece in pieces] == [("3", 100), ("2", 100), ("1", 50)]
        assert sample_of(parameters, 10_000)[0][0].numel() == 400
        assert sample_of({}, 10) == []
        assert sample_of({torch.empty(0, 4): GradientPiece("empty", (0, 4))}, 10) == []

    def test_has_a_tensor_for_each_type(self) -> None:
        parameters = {torch.empty(8, dtype=dtype): GradientPiece(str(dtype), (8,)) for dtype in (FLOAT, BFLOAT)}
        assert [(t.dtype, t.numel()) for t, _ in sample_of(parameters, 400)] == [(BFLOAT, 8), (FLOAT, 8)]


class Turns:
    """Ways that take seconds on no clock, each turn as long as it is told; and who came when."""

    def __init__(self, **seconds: Sequence[float]) -> None:
        self.order: list[str] = []
        self._seconds = {name: itertools.cycle(given) for name, given in seconds.items()}

    def ways(self) -> dict[str, Callable[[], float]]:
        return {name: self._way(name) for name in self._seconds}

    def _way(self, name: str) -> Callable[[], float]:
        def run() -> float:
            self.order.append(name)
            return next(self._seconds[name])

        return run


def alone(seconds: Sequence[float]) -> list[float]:
    return list(seconds)


class TestMeasure:
    def test_ways_take_turns(self) -> None:
        turns = Turns(none=[0.01], bf16=[0.02], int8=[0.03])
        measured = measure(turns.ways(), alone, budget_s=1.0)
        assert measured.rounds == 7
        assert turns.order == ["none", "bf16", "int8"] * 8

    def test_a_slow_link_gets_fewer_rounds_and_three_at_least(self) -> None:
        for seconds, rounds in [(0.06, 4), (0.1, 3), (5.0, 3)]:
            turns = Turns(none=[seconds], bf16=[seconds], int8=[seconds])
            assert measure(turns.ways(), alone, budget_s=1.0).rounds == rounds

    def test_medians_without_the_first_turn(self) -> None:
        turns = Turns(none=[9.0, 1.0, 7.0, 2.0])
        assert measure(turns.ways(), alone, budget_s=0).seconds == {"none": 2.0}

    def test_the_slowest_rank_counts(self) -> None:
        """What all ranks agree on is what the choice is made from, also if this rank found something else."""
        asked: list[list[float]] = []

        def agree(seconds: Sequence[float]) -> list[float]:
            asked.append(list(seconds))
            others = [3.0, 1.0] if len(seconds) == 2 else [0.0]
            return [max(pair) for pair in zip(seconds, others, strict=True)]

        turns = Turns(none=[1.0], int8=[2.0])
        measured = measure(turns.ways(), agree, budget_s=0)
        assert measured.seconds == {"none": 3.0, "int8": 2.0}
        assert choice(measured.seconds) == "int8"
        assert asked.count([0.0]) == 2 * measured.rounds, "each turn begins together"

    def test_timed(self) -> None:
        done: list[int] = []
        assert timed(lambda: done.append(1), torch.device("cpu")) >= 0
        assert done == [1]
