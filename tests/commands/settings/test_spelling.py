"""Misspelt strategies and classes, found without an import."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_multigpu.commands.settings.spelling import ClassNotFoundError, check_class, check_strategy, find_class
from lightning_multigpu.registry import STRATEGIES

MODULE = """
from torch.nn import Linear


class Model:
    class Inner:
        pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are not imported."""
    for name, source in {
        "mine/__init__.py": "",
        "mine/models.py": MODULE,
        "mine/stars.py": "from os.path import *",
        "mine/made.py": "globals()['Ma' + 'de'] = int",
        "mine/broken.py": "class Model(:",
        "loose/models.py": MODULE,
    }.items():
        path = tmp_path / "roots_of_spelling" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path / "roots_of_spelling")


@pytest.mark.parametrize(
    "name", ["auto", "ddp", "fsdp", "my_ring_ddp", "ring_ddp2", "RING_DDP", "ddp_spawn", *(r.name for r in STRATEGIES)]
)
def test_names_that_may_be_right(name: str) -> None:
    check_strategy(name)


@pytest.mark.parametrize("name", ["rng_ddp", "ring-ddp", "ring_dpp", "ringddp", "Pipeline_1f1", "gpip"])
def test_misspelt_names(name: str) -> None:
    with pytest.raises(ValueError, match=rf"strategy='{name}' is unknown\. Did you mean '\w+'\?"):
        check_strategy(name)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    "path",
    ["mine.models.Model", "mine.models.Model.Inner", "mine.models.Linear", "mine.stars.join", "mine.made.Made",
     "mine.broken.Modl", "loose.models.Model", "EarlyStoping", "mine", "mine.models", "configs/x.yaml", "builtins.int",
     "lightning_multigpu.RingDDPStrategy", "lightning.pytorch.callbacks.EarlyStopping", "torch.optim.SGD",
     "lightning.pytorch.loggers.WandbLogger", "lightning_multigpu.strategies.ring_ddp.RingDDPStrategy"],
)  # fmt: skip
def test_classes_that_may_be_there(path: str) -> None:
    check_class(path)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    "path",
    ["mine.models.Modl", "mine.models.Liner", "mine.modles.Model", "loose.modles.Model", "myne.models.Model",
     "lightning_multigpu.RingDDPStrateg", "lightning_multigpu.callbacks.ThroughputMonitr",
     "lightning_multigpu.CommunicationMonitor", "lightning.pytorch.callbacks.EarlyStoping", "torch.optim.SDG"],
)  # fmt: skip
def test_misspelt_classes_are_refused_as_they_are_when_they_are_imported(path: str) -> None:
    loaded = set(sys.modules)
    with pytest.raises(ClassNotFoundError) as found_in_source:
        check_class(path)
    assert not {name for name in set(sys.modules) - loaded if name.startswith(("mine", "loose"))}
    with pytest.raises(ClassNotFoundError) as imported:
        find_class(path)
    assert str(found_in_source.value) == str(imported.value)
