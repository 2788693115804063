"""Values of options that several commands take."""

import pytest

from lightning_multigpu.commands.option_parser import strategies_of
from lightning_multigpu.commands.usage import UsageError


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["ddp", "ring_ddp"], ["ddp", "ring_ddp"]),
        (["ddp, ring_ddp"], ["ddp", "ring_ddp"]),
        (["ring_ddp:a=int8,b=no,cpu_ps"], ["ring_ddp:a=int8,b=no", "cpu_ps"]),
        (["hybrid:plan={a: 1, b: [2, 3]},ddp"], ["hybrid:plan={a: 1, b: [2, 3]}", "ddp"]),
    ],
)  # fmt: skip
def test_strategies_with_spaces_or_commas_between(given: list[str], found: list[str]) -> None:
    assert strategies_of(given) == found


@pytest.mark.parametrize("given", [[","], ["ddp", "ddp"]])
def test_no_strategy_or_one_twice(given: list[str]) -> None:
    with pytest.raises(UsageError, match="name each strategy once"):
        strategies_of(given)
