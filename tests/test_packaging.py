"""What the package promises about itself: its needs, its layers, its public names, and that its documents keep up."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import lightning_multigpu
from lightning_multigpu import REGIMES, PipelineStrategy, RingDDPStrategy

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_multigpu"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]

# What a layer may import: of the pack, and of the two libraries that it stands on.
LAYERS = {
    "communication": {"lightning_multigpu.communication", "torch"},
    "engine": {"lightning_multigpu.engine", "lightning_multigpu.communication", "lightning_multigpu.planning", "torch"},
    "planning": {"lightning_multigpu.planning"},
}


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file; none of the imports is relative."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: a relative import"
            yield node.module or ""


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


class TestMetadata:
    def test_ranges(self) -> None:
        needs = {need.name: need.specifier for need in map(Requirement, PROJECT["dependencies"])}
        assert PROJECT["requires-python"] == ">=3.11"
        assert str(needs["lightning"]) == "<2.7,>=2.6"
        assert str(needs["torch"]) == ">=2.13"
        assert "torchmetrics" in needs
        assert PROJECT["optional-dependencies"]["sharded"] == ["fairscale==0.4.13"]

    def test_type_hints_are_part_of_the_package(self) -> None:
        assert (PACKAGE / "py.typed").is_file()

    def test_console_script(self) -> None:
        [script] = entry_points(group="console_scripts", name="lightning-multigpu")
        assert callable(script.load())

    def test_licence_is_apache_2(self) -> None:
        assert PROJECT["license"] == "Apache-2.0"
        assert (ROOT / "LICENSE").read_text().split()[:4] == ["Apache", "License", "Version", "2.0,"]


class TestPins:
    def test_torch(self) -> None:
        """An open range of torch would let the installer take gigabytes of another build."""
        assert "torch==2.13.0" in map(str, PINS)

    @pytest.mark.parametrize("pin", PINS, ids=str)
    def test_is_exact_and_without_a_place(self, pin: Requirement) -> None:
        assert re.fullmatch(r"==[^*+]+", str(pin.specifier))
        assert pin.url is None

    def test_each_is_within_the_ranges(self) -> None:
        versions = {canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("==")) for pin in PINS}
        extras = PROJECT["optional-dependencies"]
        installed = [*PROJECT["dependencies"], *extras["dev"], *extras["examples"], *extras["gpu"], *extras["plot"]]
        for need in map(Requirement, installed):
            name = canonicalize_name(need.name)
            if name != PROJECT["name"]:
                assert versions[name] in need.specifier, f"{name}=={versions[name]} is not in {need}"


class TestImports:
    def test_lightning_by_its_own_name(self) -> None:
        """``pytorch_lightning`` has a registry and base classes of its own: our strategies are unknown to it."""
        strays = [
            f"{path.relative_to(ROOT)}: {module}"
            for path in python_files("lightning_multigpu", "examples", "tests")
            for module in imported_modules(path)
            if module.split(".")[0] == "pytorch_lightning"
        ]
        assert not strays

    @pytest.mark.parametrize("layer", LAYERS)
    def test_layers_import_downwards_only(self, layer: str) -> None:
        watched = {"lightning_multigpu", "lightning", "torch", "torchmetrics"}
        strays = [
            f"{path.relative_to(ROOT)}: {module}"
            for path in python_files(f"lightning_multigpu/{layer}")
            for module in imported_modules(path)
            if module.split(".")[0] in watched
            and not any(f"{module}.".startswith(f"{allowed}.") for allowed in LAYERS[layer])
        ]
        assert not strays

    def test_callbacks_and_examples_keep_out_of_a_strategys_inside(self) -> None:
        strays = [
            f"{path.relative_to(ROOT)} line {node.lineno}: {ast.unparse(node)}"
            for path in python_files("lightning_multigpu/callbacks", "examples")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and re.search(r"\bstrategy$", ast.unparse(node.value))
        ]
        assert not strays


class TestPublicNames:
    def test_root(self) -> None:
        assert set(lightning_multigpu.__all__) == {
            "REGIMES",
            "Meter",
            "MultiGPUStrategy",
            "PipelineError",
            "PipelineStrategy",
            "RankFailedError",
            "Regime",
            "RingDDPStrategy",
            "register_all",
        }
        assert all(hasattr(lightning_multigpu, name) for name in lightning_multigpu.__all__)

    def test_importing_registers_every_regime_and_again_changes_nothing(self) -> None:
        lightning_multigpu.register_all()
        for regime in REGIMES:
            assert StrategyRegistry[regime.name]["strategy"] is regime.strategy
            assert StrategyRegistry[regime.name]["init_params"] == dict(regime.options)


class TestDocuments:
    README = (ROOT / "README.md").read_text()

    def test_readme_has_every_regime_and_its_formula(self) -> None:
        for regime in REGIMES:
            [row] = [line for line in self.README.splitlines() if line.startswith(f"| `{regime.name}` |")]
            for text in (regime.compute, regime.gradients, regime.model, regime.bytes_per_step):
                assert text in row

    def test_readme_has_every_option_and_its_default(self) -> None:
        for name, default in {**options(RingDDPStrategy), **options(PipelineStrategy)}.items():
            [row] = [line for line in self.README.splitlines() if line.startswith(f"| `{name}` |")]
            shown = row.split("|")[2].strip().strip("`")
            if name != "timeout":  # a timedelta, which is shown in words
                assert shown in (str(default), f'"{default}"')

    def test_readme_links_lead_somewhere(self) -> None:
        for target in re.findall(r"\]\(([^)#]+)\)", self.README):
            assert "://" in target or (ROOT / target).exists(), target

    @pytest.mark.parametrize("name", ["ring_ddp", "gpipe"])
    def test_configuration_shows_the_defaults(self, name: str) -> None:
        config = yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())
        [regime] = [regime for regime in REGIMES if regime.name == name]
        defaults = {**options(regime.strategy), **regime.options}
        for name, value in config["trainer"]["strategy"]["init_args"].items():
            assert value == (str(defaults[name]) if name == "timeout" else defaults[name]), name

    def test_configurations_train_the_same_thing(self) -> None:
        ring, pipeline, single = (
            yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())
            for name in ("ring_ddp", "gpipe", "single_device")
        )
        assert ring["model"] == pipeline["model"] == single["model"]
        assert ring["seed_everything"] == pipeline["seed_everything"] == single["seed_everything"]
        sizes = [config["data"]["init_args"]["batch_size"] for config in (ring, pipeline, single)]
        assert sizes[0] * ring["trainer"]["devices"] == sizes[1] == sizes[2] * single["trainer"]["devices"]


def options(strategy: type) -> dict[str, Any]:
    """Keyword-only arguments of a strategy and of its base in this pack, with their defaults."""
    return {
        name: parameter.default
        for cls in reversed(strategy.__mro__)
        if cls.__module__.startswith("lightning_multigpu.") and "__init__" in vars(cls)
        for name, parameter in inspect.signature(vars(cls)["__init__"]).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
