"""Classes as they are named on a command line."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.commands.settings.classes import ClassNotFoundError, arguments_of, find_class, refusal
from lightning_multigpu.registry import REGIMES, Regime


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("lightning_multigpu.RingDDPStrategy", RingDDPStrategy),
        ("lightning_multigpu.strategies.ring_ddp.RingDDPStrategy", RingDDPStrategy),
        ("RingDDPStrategy", RingDDPStrategy),
        ("EarlyStopping", EarlyStopping),
        ("lightning_multigpu.register_all", None),
    ],
)
def test_found(path: str, found: type | None) -> None:
    assert find_class(path) is found


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("EarlyStoping", "there is no such class. Did you mean 'EarlyStopping'?"),
        ("ComunicationMonitr", "there is no such class. Did you mean "
         "'lightning_multigpu.callbacks.CommunicationMonitor'?"),
        ("lightning_multigpu.CommunicationMonitor", "lightning_multigpu has no 'CommunicationMonitor'. Did you mean "
         "'lightning_multigpu.callbacks.CommunicationMonitor'?"),
        ("lightning_multigpu.Zzz", "lightning_multigpu has no 'Zzz'."),
        ("ThroughputMonitor", "2 classes have this name: write lightning_multigpu.callbacks.ThroughputMonitor or "
         "lightning.pytorch.callbacks.ThroughputMonitor"),
        ("ring_ddp", "a strategy's name takes no options; with options, pass its class RingDDPStrategy"),
    ],
)  # fmt: skip
def test_not_found(path: str, message: str) -> None:
    with pytest.raises(ClassNotFoundError) as caught:
        find_class(path)
    assert str(caught.value) == message


def test_a_module_that_fails_on_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_on_import.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ClassNotFoundError, match="a_package_that_is_not_there"):
        find_class("fails_on_import.Model")


@pytest.mark.parametrize("regime", REGIMES, ids=lambda regime: regime.name)
def test_a_file_may_give_a_strategy_its_own_options_only(regime: Regime) -> None:
    """jsonargparse followed ``**options`` into torch's DDP, offered ``dim`` and passed it where it was refused."""
    own = {
        name
        for cls in regime.strategy.__mro__
        if cls.__module__.startswith("lightning_multigpu.") and "__init__" in vars(cls)
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert set(arguments_of(regime.strategy)) == own


def test_refusal() -> None:
    assert refusal(RingDDPStrategy, "failure_timeout_s", 3) is None
    assert str(refusal(RingDDPStrategy, "failure_timeout_s", "many")).startswith("Expected a <class 'float'>")
