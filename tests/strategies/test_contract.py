"""What every strategy promises, run for each row of the registry: it trains as one device does."""

import functools
import inspect
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_multigpu import TensorSplitStrategy
from lightning_multigpu.registry import StrategyRow
from tests.strategies.tasks import Case as TrainingCase
from tests.strategies.tasks import (
    Classifier,
    distinct_rows,
    fit,
    fit_module,
    global_losses,
    rows_of_each_class,
    state,
    synchronous_rows,
)
from tests.world import World

# The halves of a batch are rounded to bfloat16's 8 bits apart from each other: each step's gradients agree to some
# 2^-8 = 4e-3 of their size, not element by element. Unreduced gradients miss it by more than an order of magnitude.
BFLOAT16_RTOL = 3e-2
# A weight that has come near to zero keeps the rounding of its larger values: 2^-24 of those in each of 14 steps.
FLOAT32_RTOL, FLOAT32_ATOL = 1e-5, 1e-6

# Two epochs: the second one begins with what the first one has left, of the optimizer, of gradients and of the order.
Case = functools.partial(TrainingCase, max_epochs=2)

# Each has something that no other has; what does not meet in the code is in one case.
CASES = {
    "sgd float32": Case(precision="32-true", rtol=FLOAT32_RTOL),
    "adamw and validation within epochs": Case(optimizer="adamw", validate=True, trainer={"val_check_interval": 0.5}),
    "groups, scheduler and clipping by value": Case(
        optimizer="groups", trainer={"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    ),
    "uneven last batch, accumulation and clipping": Case(
        num_samples=53, trainer={"accumulate_grad_batches": 4, "gradient_clip_val": 0.2}
    ),
    "bf16-mixed": Case(precision="bf16-mixed", rtol=BFLOAT16_RTOL, max_epochs=1),
    "last batch smaller than the world": Case(num_samples=49),
    "unused parameters": Case(module={"unused": True}, strategy={"find_unused_parameters": True}),
    "sparse gradients": Case(module={"sparse": True}),
    "static graph, gradients in tensors of their own": Case(
        strategy={"static_graph": True, "gradient_as_bucket_view": False}
    ),
    "activation checkpointing": Case(strategy={"activation_checkpointing": True}),
    "many small buckets": Case(strategy={"bucket_cap_mb": 0.0001}),
}
FOUR_RANKS, TWO_STEPS = "four ranks", "two steps"
OTHER_CASES = {
    FOUR_RANKS: Case(num_samples=53, max_epochs=1),  # its last step is that of the uneven batch
    TWO_STEPS: Case(num_samples=16, max_epochs=1),
}
REPEATED = "sgd float32"

rows = pytest.mark.parametrize("row", synchronous_rows(), ids=lambda row: row.name)
strategies = pytest.mark.parametrize(
    "row", [r for r in synchronous_rows() if r in rows_of_each_class()], ids=lambda row: row.name
)


@functools.cache
def _one_device(case_name: str) -> dict[str, Any]:
    return fit((CASES | OTHER_CASES)[case_name], None, 1)


def fit_cases(names: list[str], strategy_name: str, ranks: int) -> list[dict[str, Any]]:
    return [fit(CASES[name], strategy_name, ranks) for name in names]


# What each rank has found in each case of a strategy, by the strategy's name.
_found: dict[str, dict[str, list[dict[str, Any]]]] = {}


def _two_ranks(row: StrategyRow, world2: World) -> dict[str, list[dict[str, Any]]]:
    if row.name not in _found:
        names = [name for name in CASES if _applies(row, name)]
        repeated = [REPEATED] if REPEATED in names else []
        found = world2.run(fit_cases, names + repeated, row.name, 2, timeout_s=180)
        _found[row.name] = dict(zip([*names, "again"], zip(*found, strict=True), strict=False))
    return _found[row.name]


def _assert_same(value: torch.Tensor, expected: torch.Tensor, rtol: float) -> None:
    if rtol == BFLOAT16_RTOL:
        assert torch.linalg.vector_norm(value - expected) <= rtol * torch.linalg.vector_norm(expected)
    else:
        atol = FLOAT32_ATOL if rtol == FLOAT32_RTOL else rtol * 1e-2
        torch.testing.assert_close(value, expected, rtol=rtol, atol=atol)


# What the further rows of a class are run with: they differ from the first one in the order of the work.
ORDER_MATTERS = ("uneven last batch, accumulation and clipping", "bf16-mixed")


def _applies(row: StrategyRow, name: str) -> bool:
    """Options of a case belong to the rows that have them."""
    case = CASES[name]
    if row not in rows_of_each_class() and name not in ORDER_MATTERS:
        return False
    accepted = {name for cls in row.strategy.__mro__ for name in inspect.signature(cls.__init__).parameters}
    if row.strategy is TensorSplitStrategy:  # 2 ranks are one tensor group, which averages no gradients
        accepted -= {"gradient_as_bucket_view", "static_graph", "bucket_cap_mb"}
    return set(case.strategy) <= accepted


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"row", "case_name"} <= set(metafunc.fixturenames):
        pairs = [(r, name) for r in synchronous_rows() for name in CASES if _applies(r, name)]
        metafunc.parametrize(("row", "case_name"), pairs, ids=[f"{r.name}-{name}" for r, name in pairs])


def test_trains_as_one_device_does(row: StrategyRow, case_name: str, world2: World) -> None:
    case = CASES[case_name]
    reference = _one_device(case_name)
    ranks = _two_ranks(row, world2)[case_name]

    for result in ranks:
        assert result["global_step"] == reference["global_step"]
        assert result["learning_rates"] == reference["learning_rates"]
        for name, value in result["weights"].items():
            assert torch.equal(value, ranks[0]["weights"][name]), f"{name} differs between ranks"
            _assert_same(value, reference["weights"][name], case.rtol)
    if case_name == "last batch smaller than the world":
        return  # a rank without a sample repeats one: it counts for nothing in the gradients, but is logged once more
    assert global_losses(ranks) == pytest.approx([loss for loss, _ in reference["seen"]], rel=case.rtol)
    for name, value in reference["metrics"].items():
        for result in ranks:
            assert result["metrics"][name] == pytest.approx(value, rel=max(case.rtol, 1e-6)), name


def test_ranks_train_on_different_data(world2: World) -> None:
    """The parity above would mean little if every rank had seen the whole batch."""
    first, second = _two_ranks(synchronous_rows()[0], world2)[REPEATED]
    assert [n for _, n in first["seen"]] == [4] * 14
    assert first["seen"] != second["seen"]


@rows
def test_four_ranks(row: StrategyRow, world4: World) -> None:
    case = OTHER_CASES[FOUR_RANKS]
    for result in world4.run(fit, case, row.name, 4):
        for name, value in result["weights"].items():
            _assert_same(value, _one_device(FOUR_RANKS)["weights"][name], case.rtol)


@pytest.mark.parametrize("row", distinct_rows(), ids=lambda row: row.name)
def test_two_steps(row: StrategyRow, world2: World) -> None:
    """What ``make newest`` runs with the newest torch and Lightning."""
    case = OTHER_CASES[TWO_STEPS]
    for result in world2.run(fit, case, row.name, 2):
        for name, value in result["weights"].items():
            assert torch.isfinite(value).all()
            if row.synchronous:
                _assert_same(value, _one_device(TWO_STEPS)["weights"][name], case.rtol)


@strategies
def test_runs_repeat_bit_for_bit(row: StrategyRow, world2: World) -> None:
    found = _two_ranks(row, world2)
    (first, *_), (again, *_) = found[REPEATED], found["again"]
    assert all(torch.equal(first["weights"][name], again["weights"][name]) for name in first["weights"])
    assert first["seen"] == again["seen"]


def scaled(strategy_name: str | None, ranks: int) -> dict[str, Any]:
    """float16 with a gradient scaler, whose first steps overflow and must be skipped by all ranks alike."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24))
    module = Classifier()
    fit_module(module, strategy_name, ranks, Case(), precision=None, plugins=[plugin])  # the first epoch overflows
    assert plugin.scaler is not None
    return {"weights": state(module), "scale": plugin.scaler.get_scale()}


scaled_on_one_device = functools.cache(scaled)


@strategies
def test_gradient_scaling_agrees_over_ranks(row: StrategyRow, world2: World) -> None:
    reference = scaled_on_one_device(None, 1)
    assert reference["scale"] < 2.0**24, "nothing has overflowed: the test shows nothing"
    first, second = world2.run(scaled, row.name, 2)
    # A loss over half of the samples has gradients that overflow at half the scale; those of a micro-batch are smaller.
    assert reference["scale"] / 2 <= first["scale"] == second["scale"] <= reference["scale"] * 2
    start = state(Classifier())
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name]), f"{name} differs between ranks"
        assert torch.isfinite(value).all()
        assert not torch.equal(value, start[name]), "every step was skipped"
