"""Gradients of two ways are compared relative to their norms; rounding is no difference."""

import math
from typing import Any

import pytest
import torch

from lightning_multigpu.engine import parity
from lightning_multigpu.engine.main_memory import MainMemory
from lightning_multigpu.engine.parity import Gradients, are_finite, difference, lack_of_memory, rounding_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ONES = torch.ones(4)


def text(name: str, size: str, count: int) -> str:
    return f"{count} parameters differ, most {name!r} (relative difference {size}, rounding explains 1e-04)"


def test_rounding_is_that_of_the_coarsest_type() -> None:
    double, single, half = torch.float64, torch.float32, torch.bfloat16
    assert rounding_of([double], CPU) == rounding_of([double], GPU) == 1e-5
    assert (rounding_of([double, single], CPU), rounding_of([single, double], GPU)) == (1e-4, 1e-2)
    assert rounding_of([half, single], CPU) == rounding_of([torch.float16], GPU) == 1e-1
    assert rounding_of([], CPU) == 0


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"a": ONES}, {"a": ONES * 1.00009}),
        ({}, {}),
        ({"a": 0 * ONES}, {}),
        ({"a": ONES, "b": 1e-8 * ONES}, {"a": ONES}),  # it may be only rounding beside the largest
        ({"a": ONES.bfloat16()}, {"a": ONES.bfloat16()}),
    ],
)
def test_what_rounding_explains_is_no_difference(found: Gradients, expected: Gradients) -> None:
    assert difference(found, expected, 1e-4) == difference(expected, found, 1e-4) == ""


@pytest.mark.parametrize(
    ("found", "worst"),
    [
        ({"a": ONES, "b": 1.001 * ONES, "c": 1.1 * ONES}, ("c", "0.091", 2)),
        ({"a": ONES, "b": ONES}, ("c", "1", 1)),  # a missing one counts as zero
        ({"a": ONES, "b": math.nan * ONES, "c": ONES}, ("b", "inf", 1)),
    ],
)
def test_the_parameter_that_differs_most_is_named(found: Gradients, worst: Any) -> None:
    expected = dict.fromkeys("abc", ONES)
    assert difference(found, expected, 1e-4) == text(*worst)
    assert are_finite(expected, found) is (worst[0] != "b")


def test_every_rank_knows_of_all() -> None:
    def gather(own: Any) -> list[Any]:
        return [own, 2.0 if isinstance(own, float) else [(0.5, "b")]]

    assert difference({"a": ONES}, {"a": ONES}, 1e-4, gather) == text("b", "0.5", 1)
    assert difference({"a": 1.1 * ONES}, {"a": ONES}, 1e-4, gather) == text("b", "0.5", 2)


def test_a_container_has_no_more_memory_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The free memory of the host was asked: a copy of a model that did not fit into the container ended the run."""
    monkeypatch.setattr(parity, "host_memory", lambda: MainMemory("container", 3_000_000, 9_000_000))
    assert lack_of_memory("a copy", 7_000_000, CPU) == "a copy would take 7.00 MB of 6.00 MB"
    assert not lack_of_memory("a copy", 5_000_000, CPU)
