"""Which compression a measurement recommends, and how it measures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from lightning_multigpu.communication.compression import GradientPiece
from lightning_multigpu.engine.data_parallel.compression_choice import (
    Bucket,
    buckets,
    candidates,
    choice,
    first_bytes,
    measure,
    sample_bytes,
    timed,
)

FLOAT, BFLOAT = torch.float32, torch.bfloat16
SHAPES = [(300, 40), (300,), (7, 300), (7,), (1000, 100), (3,), (20, 20)]


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


class TestBuckets:
    @pytest.mark.parametrize("bucket_bytes", [1, 1200, 48000, 60_000, 10_000_000])
    def test_are_those_of_torch(self, bucket_bytes: int) -> None:
        """Its own assignment of the gradients in the order in which backward makes them."""
        for dtypes in ([FLOAT], [FLOAT, BFLOAT]):
            parameters = {
                torch.empty(shape, dtype=dtypes[i % len(dtypes)]): GradientPiece(str(i), shape)
                for i, shape in enumerate(SHAPES)
            }
            backward = list(reversed(parameters))
            expected, _ = dist._compute_bucket_assignment_by_size(backward, [bucket_bytes])
            found = [
                [len(SHAPES) - 1 - int(piece.name) for piece in b.pieces] for b in buckets(parameters, bucket_bytes)
            ]
            assert sorted(found) == sorted(expected)

    def test_hold_every_parameter_once(self) -> None:
        parameters = {torch.empty(shape): GradientPiece(str(i), shape) for i, shape in enumerate(SHAPES)}
        found = buckets(parameters, 5000)
        assert [piece.name for bucket in found for piece in bucket.pieces] == list("6543210")
        assert sum(bucket.num_bytes for bucket in found) == 4 * sum(piece.numel for piece in parameters.values())
        assert buckets({}, 5000) == []
        assert buckets({torch.empty(0, 4): GradientPiece("empty", (0, 4))}, 5000) == []

    def test_as_many_as_there_is_time_for(self) -> None:
        some = [Bucket((GradientPiece(str(i), (100,)),), FLOAT) for i in range(4)]
        assert first_bytes(some, 1e9) == some
        assert first_bytes(some, 1000) == some[:2]
        assert first_bytes(some, 800) == some[:2]
        (part,) = first_bytes(some, 40)
        assert (part.numel, part.pieces[0].name, part.pieces[0].shape) == (10, "0", (100,))
        assert first_bytes(some, 0)[0].numel == 1
        assert first_bytes([], 10) == []


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

    @pytest.mark.parametrize("bandwidth", [1e6, 25e6, 125e6])
    def test_the_sample_is_as_long_as_there_is_time_for(self, bandwidth: float) -> None:
        """Four rounds of the sample, its half and its quarter take the budget."""
        found = sample_bytes(lambda: (1 << 20) / bandwidth, alone, budget_s=1.0)
        assert 4 * 1.75 * found / bandwidth == pytest.approx(1.0)
        assert sample_bytes(lambda: 1e-6, alone) == 64 << 20

    def test_timed(self) -> None:
        done: list[int] = []
        assert timed(lambda: done.append(1), torch.device("cpu")) >= 0
        assert done == [1]
