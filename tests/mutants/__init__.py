"""Small faults in the package, each with the test that has to notice it: ``python -m tests.mutants`` runs them.

The faults are data: the tables ``*.toml`` beside this file, one a family. An entry says what to replace in one file of
the package, and which test fails then::

    [[mutant]]
    name = "a reduce step adds nothing"
    file = "communication/ring.py"              below lightning_multigpu/
    old = "segment.add_(incoming)"              occurs exactly once in the file
    new = "segment.copy_(incoming)"
    test = "communication/test_ring.py::test_sums_over_four_ranks"      below tests/
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TABLES = Path(__file__).parent


@dataclass(frozen=True)
class Mutant:
    """One fault; ``family`` is the name of its table."""

    family: str
    name: str
    file: str
    old: str
    new: str
    test: str

    @property
    def title(self) -> str:
        return f"{self.family}: {self.name}"

    @property
    def path(self) -> str:
        return f"lightning_multigpu/{self.file}"

    @property
    def node(self) -> str:
        return f"tests/{self.test}"

    def mutated(self, source: str) -> str:
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"the text to replace occurs {count} times in {self.path}")
        return source.replace(self.old, self.new)

    def problem(self, root: Path = REPOSITORY) -> str | None:
        """Why the mutant does not apply to the tree below ``root``; None if it does."""
        try:
            ast.parse(self.mutated((root / self.path).read_text()))
            _check_node(root, self.node)
        except (OSError, SyntaxError, ValueError) as error:
            return str(error)
        return None


def load() -> list[Mutant]:
    """All mutants, in the order of their tables' names."""
    return [
        Mutant(table.stem, **entry)
        for table in sorted(TABLES.glob("*.toml"))
        for entry in tomllib.loads(table.read_text())["mutant"]
    ]


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _check_node(root: Path, node: str) -> None:
    file, *names = node.partition("[")[0].split("::")
    body: list[ast.stmt] = _parsed(root / file).body
    for name in names:
        found = [part for part in body if isinstance(part, ast.FunctionDef | ast.ClassDef) and part.name == name]
        if not found:
            raise ValueError(f"there is no {name} in {file}")
        body = found[0].body
