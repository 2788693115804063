"""Classes as they are named on a command line."""

from __future__ import annotations

import inspect
from argparse import ArgumentError
from pathlib import Path

import pytest

from lightning_multigpu import PipelineStrategy, RingDDPStrategy
from lightning_multigpu.commands.class_settings import arguments_of, class_parser, explained, find_class
from lightning_multigpu.registry import STRATEGIES, StrategyRow


def test_found() -> None:
    assert find_class("lightning_multigpu.RingDDPStrategy") is RingDDPStrategy


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("lightning_multigpu.RingDPStrategy", "has no class 'RingDPStrategy'. Did you mean 'RingDDPStrategy'?"),
        ("lightning_multigpu.register_all", "lightning_multigpu has no class 'register_all'."),
        ("nowhere.Model", "No module named 'nowhere'"),
        ("fails_on_import.Model", "a_package_that_is_not_there"),
    ],
)
def test_not_found(path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_on_import.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r".") as caught:
        find_class(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("row", STRATEGIES, ids=lambda row: row.name)
def test_a_file_may_give_a_strategy_its_own_options_only(row: StrategyRow) -> None:
    """jsonargparse followed ``**options`` into torch's DDP, offered ``dim`` and passed it where it was refused."""
    own = {
        name
        for cls in row.strategy.__mro__
        if cls.__module__.startswith("lightning_multigpu.") and "__init__" in vars(cls)
        if cls is not PipelineStrategy or row.strategy is PipelineStrategy  # hybrid has them in pipeline=
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert set(arguments_of(row.strategy)) == own


def test_a_wrong_value_without_the_types_that_it_could_have() -> None:
    class_parser(RingDDPStrategy).parse_object({"failure_timeout_s": 3})
    with pytest.raises(ArgumentError) as caught:
        class_parser(RingDDPStrategy).parse_object({"failure_timeout_s": "many"})
    lines = [line.strip(" -") for line in explained(caught.value.message).splitlines()]
    assert lines == ['Parser key "failure_timeout_s":', "Expected a <class 'float'>. Got value: many"]
