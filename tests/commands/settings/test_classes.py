"""Classes as they are named on a command line."""

from __future__ import annotations

import inspect
from argparse import ArgumentError
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from lightning_multigpu import PipelineStrategy, RingDDPStrategy
from lightning_multigpu.commands.settings.spelling import ClassNotFoundError, find_class, no_such_class
from lightning_multigpu.commands.settings.wrong_key import arguments_of, class_parser, condensed, explained
from lightning_multigpu.registry import STRATEGIES, StrategyRow


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("lightning_multigpu.RingDDPStrategy", RingDDPStrategy),
        ("lightning_multigpu.strategies.ring_ddp.RingDDPStrategy", RingDDPStrategy),
        ("lightning.pytorch.callbacks.EarlyStopping", EarlyStopping),
        ("lightning_multigpu.register_all", None),
    ],
)
def test_found(path: str, found: type | None) -> None:
    assert find_class(path) is found


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("lightning_multigpu.CommunicationMonitor", "lightning_multigpu has no 'CommunicationMonitor'. Did you mean "
         "'lightning_multigpu.callbacks.CommunicationMonitor'?"),
        ("lightning_multigpu.Zzz", "lightning_multigpu has no 'Zzz'."),
    ],
)  # fmt: skip
def test_not_found(path: str, message: str) -> None:
    with pytest.raises(ClassNotFoundError) as caught:
        find_class(path)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("EarlyStoping", "there is no such class. Did you mean 'EarlyStopping'?"),
        ("AdamWW", "there is no such class. Did you mean 'AdamW'?"),
        ("ComunicationMonitr", "there is no such class. Did you mean "
         "'lightning_multigpu.callbacks.CommunicationMonitor'?"),
        ("ring_ddp", "a strategy's name takes no options; with options, pass its class RingDDPStrategy"),
    ],
)  # fmt: skip
def test_bare_names_that_are_not_known(name: str, message: str) -> None:
    assert no_such_class(name) == message


def test_a_module_that_fails_on_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_on_import.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ClassNotFoundError, match="a_package_that_is_not_there"):
        find_class("fails_on_import.Model")


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


def test_a_wrong_value_in_one_line() -> None:
    class_parser(RingDDPStrategy).parse_object({"failure_timeout_s": 3})
    with pytest.raises(ArgumentError) as caught:
        class_parser(RingDDPStrategy).parse_object({"failure_timeout_s": "many"})
    assert condensed(caught.value.message) == "failure_timeout_s=many: expected float"


@pytest.mark.parametrize(
    ("refusal", "problem"),
    [
        ("Multiple subclasses with name ThroughputMonitor. Give the full class path to avoid ambiguity: a.A, b.A.",
         "several classes have this name: write a.A, b.A"),
        ("Problem with given class_path 'lightning.pytorch.callbacks.ThroughputMonitor':\n"
         "        the following arguments are required: batch_size_fn",
         "lightning.pytorch.callbacks.ThroughputMonitor needs batch_size_fn. Or did you mean "
         "'lightning_multigpu.callbacks.ThroughputMonitor'?"),
    ],
)  # fmt: skip
def test_a_name_that_lightning_has_too(refusal: str, problem: str, tmp_path: Path) -> None:
    """jsonargparse knows the classes that have been imported: both, or Lightning's alone."""
    config = tmp_path / "run.yaml"
    config.write_text("trainer: {callbacks: [{class_path: ThroughputMonitor}]}")
    message = f'Parser key "trainer.callbacks":\n  Does not validate\n  Errors:\n    - {refusal}\n  Given value: []'
    error = explained(message, [f"--config={config}"])
    assert str(error) == f"{config}: trainer.callbacks[0]=ThroughputMonitor: {problem}"
