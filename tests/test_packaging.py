"""What the package promises about itself: its needs, its layers, its public names, and that its documents keep up."""

import ast
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import lightning_multigpu
from lightning_multigpu import STRATEGIES, HybridStrategy, StrategyRow, TensorSplitStrategy

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Modules of the pack and libraries that each layer may import; libraries that are not watched are free.
_OURS = "lightning_multigpu"
LAYERS = {
    "planning": {f"{_OURS}.planning"},
    "job/guardian": {f"{_OURS}.job.guardian"},
    "communication": {f"{_OURS}.{module}" for module in ("communication", "_suggest", "_torch_compat")} | {"torch"},
    "placement": {f"{_OURS}.placement", "torch"},
    "engine": {
        *(f"{_OURS}.{layer}" for layer in ("engine", "placement", "communication", "planning", "_torch_compat")),
        "torch",
    },
    "job": {
        *(f"{_OURS}.{layer}" for layer in ("job", "engine", "communication", "_lightning_internals", "_torch_compat")),
        "lightning",
        "torch",
    },
    "emulation": {f"{_OURS}.{layer}" for layer in ("emulation", "job.guardian")},
    "report": {f"{_OURS}.{layer}" for layer in ("report", "planning", "communication.metering")},
    "strategies": {
        *(f"{_OURS}.{layer}" for layer in ("strategies", "job", "engine", "placement", "communication")),
        *(f"{_OURS}.{module}" for module in ("planning", "report", "_lightning_internals", "_suggest")),
        *(f"{_OURS}.{module}" for module in ("_torch_compat", "_torchft", "_usable_cores")),
        "lightning",
        "torch",
        "torchmetrics",
    },
    "callbacks": {
        *(f"{_OURS}.{layer}" for layer in ("callbacks", "strategies", "engine", "communication", "planning", "report")),
        *(f"{_OURS}.{module}" for module in ("_lightning_internals", "_usable_cores", "__version__")),
        "lightning",
        "torch",
        "torchmetrics",
    },
}
FAMILIES = (f"{_OURS}/engine", f"{_OURS}/strategies")
WATCHED = {_OURS, "lightning", "torch", "torchmetrics"}


@functools.cache
def imported(path: Path) -> list[str]:
    """Every module, and every name of a module, that a file imports, wherever in the file; no import is relative."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: a relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def own_classes(strategy: type) -> list[type]:
    return [each for each in strategy.__mro__ if each.__module__.startswith(f"{_OURS}.")]


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_pins_are_exact_and_within_the_ranges() -> None:
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    assert all(re.fullmatch(r"==[^*+]+", str(pin.specifier)) and pin.url is None for pin in pins)
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    installed = [*PROJECT["dependencies"], *(need for of in PROJECT["optional-dependencies"].values() for need in of)]
    for need in map(Requirement, installed):
        name = canonicalize_name(need.name)
        assert name == PROJECT["name"] or versions[name] in need.specifier, f"{name}=={versions[name]} is not in {need}"


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_the_versions_that_were_run_are_the_ranges(page: str) -> None:
    """``make newest`` and ``doctor`` read the ranges, people the pages."""
    words = r"torch (\S+) to 2\.(\d+), Lightning (\S+) to 2\.(\d+)(?: and|,) Python (\S+) to (\S+?)[, ]"
    found = re.search(words, " ".join((ROOT / page).read_text().split()))
    assert found is not None
    torch, last_torch, lightning, last_lightning, *pythons = found.groups()
    ranges = {need.name: need.specifier for need in map(Requirement, PROJECT["dependencies"])}
    assert ranges["torch"] == SpecifierSet(f">={torch},<2.{int(last_torch) + 1}")
    assert ranges["lightning"] == SpecifierSet(f">={lightning},<2.{int(last_lightning) + 1}")
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert [f">={pythons[0]}", *pythons] == [PROJECT["requires-python"], named[0], named[-1]]


class TestImports:
    @pytest.mark.parametrize("layer", LAYERS)
    def test_layers_import_downwards_only(self, layer: str) -> None:
        strays = [
            f"{path.relative_to(ROOT)}: {module}"
            for path in python_files(f"lightning_multigpu/{layer}")
            for module in imported(path)
            if module.split(".")[0] in WATCHED
            and not any(f"{module}.".startswith(f"{allowed}.") for allowed in LAYERS[layer])
        ]
        assert not strays

    @pytest.mark.parametrize(
        ("folders", "allowed", "forbidden"),
        [
            # It has a registry and base classes of its own: our strategies are unknown to it.
            ((_OURS, "examples"), (), ("pytorch_lightning",)),
            ((f"{_OURS}/strategies",), (), (f"{_OURS}.job.guardian",)),
            # What several families use lies in engine/, placement/ and strategies/ themselves; hybrid is a pipeline.
            (
                FAMILIES,
                ("pipeline", "__init__", "hybrid"),
                (f"{_OURS}.engine.pipeline", f"{_OURS}.strategies.pipeline"),
            ),
            (FAMILIES, ("parameter_server",), (f"{_OURS}.engine.parameter_server",)),
        ],
        ids=["pytorch_lightning", "guardian", "pipeline", "parameter servers"],
    )
    def test_what_is_not_to_be_imported(
        self, folders: tuple[str, ...], allowed: tuple[str, ...], forbidden: tuple[str, ...]
    ) -> None:
        strays = [
            f"{path.relative_to(ROOT)}: {module}"
            for path in python_files(*folders)
            if not {*allowed} & {*path.parts, path.stem}
            for module in imported(path)
            if module.startswith(forbidden)
        ]
        assert not strays

    def test_private_names_of_lightning_are_imported_in_one_place_only(self) -> None:
        strays = [
            f"{path.relative_to(ROOT)}: {name}"
            for path in python_files(_OURS)
            if path != ROOT / _OURS / "_lightning_internals.py"
            for name in imported(path)
            if name.startswith("lightning.") and "._" in name
        ]
        assert not strays

    def test_the_guardian_needs_the_standard_library_alone(self) -> None:
        """It runs with ``-S``, without site-packages, so that it is small and starts at once."""
        modules = {module.split(".")[0] for path in python_files(f"{_OURS}/job/guardian") for module in imported(path)}
        assert modules - sys.stdlib_module_names <= {_OURS}

    @pytest.mark.parametrize("row", STRATEGIES, ids=lambda row: row.name)
    def test_a_strategy_is_a_base_and_a_family(self, row: StrategyRow) -> None:
        """TensorSplitStrategy had six classes of the pack above Lightning's, three of them mixins."""
        own = own_classes(row.strategy)
        shares_a_family = issubclass(row.strategy, HybridStrategy | TensorSplitStrategy)
        assert len(own) <= 3 + shares_a_family  # with PackStrategy, below the base
        assert all(issubclass(each, Strategy) and len(set(each.__bases__) - {*own}) <= 1 for each in own)

    def test_the_base_alone_overrides_lightnings_hooks_of_checkpoints(self) -> None:
        """Seventeen overrides in nine files decided, each by itself, who gathers and what a failure leaves."""
        hooks = {"save_checkpoint", "load_checkpoint", "lightning_module_state_dict", "load_model_state_dict"}
        hooks |= {"optimizer_state", "load_optimizer_state_dict", "remove_checkpoint"}
        found = {
            path.stem
            for path in python_files(f"{_OURS}/strategies")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and node.name in hooks
        }
        assert found == {"pack_strategy"}

    def test_nothing_is_unpickled_but_from_torchs_process_groups_and_own_children(self) -> None:
        """The security page says so: what comes through a socket of the pack is text, as what comes from a store.

        But a parameter server unpickles a job's description from the store.
        """
        found = {
            path.stem
            for path in python_files(_OURS)
            if {"pickle", "dill"} & {name.split(".")[0] for name in imported(path)}
        }
        groups, own_children = {"metered_group", "point_to_point", "last_stage_outputs"}, {"spawn_launcher"}
        servers = {"pair", "server", "parameter_server"}
        assert found <= groups | own_children | servers

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
        strategies = {row.strategy.__name__ for row in STRATEGIES}
        others = {"Meter", "PipelineError", "RankFailedError", "STRATEGIES", "StrategyRow", "MultiGPUStrategy"}
        assert {*lightning_multigpu.__all__} == {*strategies, *others, "find_last_checkpoint", "register_all"}
        assert all(hasattr(lightning_multigpu, name) for name in lightning_multigpu.__all__)

    def test_importing_registers_every_strategy_and_again_changes_nothing(self) -> None:
        lightning_multigpu.register_all()
        for row in STRATEGIES:
            assert type(StrategyRegistry.get(row.name)) is row.strategy


class TestImport:
    """Importing the package registers the strategies with Lightning, and does not itself import Lightning."""

    def run(self, *lines: str) -> str:
        command = [sys.executable, "-W", "error", "-c", "\n".join(lines)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
        return process.stdout + process.stderr

    def test_lower_layers_without_lightning_which_is_found_when_it_is_imported_later(self) -> None:
        names = [
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for path in python_files(*(f"{_OURS}/{layer}" for layer in ("communication", "placement", "engine")))
        ]
        output = self.run(
            "import sys, importlib, warnings, lightning_multigpu",
            "print('torch' in sys.modules)",
            f"for name in {names}: importlib.import_module(name)",
            "print('torch' in sys.modules, sorted({'lightning', 'torchmetrics'} & sys.modules.keys()))",
            "warnings.simplefilter('default')",
            "from lightning.pytorch.strategies import StrategyRegistry",
            "print('ring_ddp' in StrategyRegistry, lightning_multigpu.RingDDPStrategy.__name__)",
            "import lightning.pytorch as pl; print(type(pl.__loader__).__name__)",
        )
        first, last = output.splitlines()[:2], output.splitlines()[-2:]
        assert (first, last) == (["False", "True []"], ["True RingDDPStrategy", "SourceFileLoader"]), output

    def test_registers_when_a_part_of_the_package_imports_lightning(self) -> None:
        """A spawned worker of a loader imports the module that its rank names, and nothing before it.

        Nothing but the engine of ddp_sharded imports FairScale.
        """
        output = self.run(
            "import os, sys, warnings, torch; warnings.simplefilter('default'); sys.modules['fairscale'] = None",
            "ways = 'from lightning_multigpu import ShardedStrategy', 'import lightning_multigpu.job.loader_workers'",
            "for first in ways:",
            "    if os.fork() == 0:",
            "        exec(first)",
            "        from lightning.pytorch.strategies import StrategyRegistry",
            "        from lightning_multigpu.strategies import ShardedStrategy",
            "        import lightning_multigpu.cli",
            "        print(StrategyRegistry['ddp_sharded']['strategy'].strategy is ShardedStrategy)",
            "        break",
            "    os.wait()",
        )
        assert [line for line in output.splitlines() if line == "True"] == ["True"] * 2, output


@pytest.mark.launch
def test_the_wheel_has_the_package_alone_and_trains_from_any_directory(tmp_path: Path) -> None:
    def run(*command: str, cwd: str = "") -> str:
        path = f"{tmp_path / 'installed'}:{Path(__file__).with_name('environment')}"
        environment = {**os.environ, "PYTHONPATH": path}
        process = subprocess.run(
            command, cwd=tmp_path / cwd, env=environment, capture_output=True, text=True, timeout=400
        )
        assert process.returncode == 0, f"exit status {process.returncode}\n{process.stdout}\n{process.stderr}"
        return process.stdout

    how = ("--no-deps", "--no-index", "--no-build-isolation", "--target", "installed")
    run(sys.executable, "-m", "pip", "install", *how, str(ROOT))  # builds a wheel
    names = {path.name for path in (tmp_path / "installed").iterdir()}
    assert names - {"bin"} == {_OURS, f"{_OURS}-{lightning_multigpu.__version__}.dist-info"}
    assert all((tmp_path / "installed" / _OURS / name).exists() for name in ("py.typed", "report/page.css"))
    assert run(sys.executable, "-c", f"import {_OURS} as m; print(m.__file__)").startswith(f"{tmp_path}/installed")
    program = str(tmp_path / "installed/bin/lightning-multigpu")
    run(program, "new", "project")
    few = ("--trainer.max_steps=3", "--trainer.limit_val_batches=1")
    run(program, "fit", "--config", "config.yaml", *few, cwd="project")
    report = json.loads((tmp_path / "project/runs/version_0/multigpu_report.json").read_text())
    assert (report["strategy"]["name"], report["world"]["size"], report["steps"]) == ("ring_ddp", 2, 3)
    assert len(list(tmp_path.rglob("checkpoints/*.ckpt"))) == 1


class TestDocuments:
    README = (ROOT / "README.md").read_text()

    @pytest.mark.parametrize("row", STRATEGIES, ids=lambda row: row.name)
    def test_pages_have_every_strategy(self, row: StrategyRow) -> None:
        page = (ROOT / "docs/choosing.md").read_text()
        [line] = [line for line in page.splitlines() if re.match(rf"\| (`\w+`, )?`{row.name}`", line)]
        for text in (row.compute, row.gradients, row.model, row.bytes_per_step):
            assert text in line
        if not row.name.endswith("_spawn"):
            assert f"`{row.name}`" in self.README

    @pytest.mark.parametrize(
        "strategy", dict.fromkeys(c for row in STRATEGIES for c in own_classes(row.strategy) if "__init__" in vars(c))
    )
    def test_docstring_has_every_option(self, strategy: type) -> None:
        """The pages take their tables of options from there."""
        section = inspect.cleandoc(strategy.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
        code = vars(strategy)["__init__"].__code__  # without options that the signature has of another class
        own = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        assert sorted(set(re.findall(r"^    (\w+): ", section, re.MULTILINE)) - {"options"}) == sorted(own)

    def test_architecture_names_files_and_classes_that_exist(self) -> None:
        page = (ROOT / "docs/architecture.md").read_text()
        files = [str(path) for path in python_files(_OURS, "tests")]
        names = {word for path in python_files(_OURS) for word in re.findall(r"\w+", path.read_text())}
        assert [
            name for name in re.findall(r"[\w/]+\.py", page) if not any(f.endswith(f"/{name}") for f in files)
        ] == []
        assert {*re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", page)} <= names

    @pytest.mark.parametrize("name", [row.name for row in STRATEGIES if (ROOT / f"configs/{row.name}.yaml").exists()])
    def test_configuration_shows_the_defaults(self, name: str) -> None:
        config = yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())
        [row] = [row for row in STRATEGIES if row.name == name]
        defaults = {**options(row.strategy), **row.options}
        for name, value in config["trainer"]["strategy"]["init_args"].items():
            assert value == (str(defaults[name]) if name == "timeout" else defaults[name]), name


def options(strategy: type) -> dict[str, Any]:
    """Keyword-only arguments of a strategy and of its base in this pack, with their defaults."""
    return {
        name: parameter.default
        for cls in reversed(own_classes(strategy))
        if "__init__" in vars(cls)
        for name, parameter in inspect.signature(vars(cls)["__init__"]).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
