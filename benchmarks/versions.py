"""Passed, failed and skipped tests with the versions of this interpreter's environment.

python -m benchmarks.versions [--output FILE] tests/strategies/test_contract.py -n 2
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.heading import heading

PACKAGES = ("torchmetrics", "transformers", "jsonargparse", "psutil", "rich", "scikit-learn", "fairscale", "numpy")


def counts(report: Path) -> dict[str, Counter[str]]:
    """Outcomes of the tests in a JUnit report, by the folder or file below ``tests/`` that they are in."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.get("classname", "").split(".")
        module = next((at for at, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found["/".join(parts[:module])][outcome] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="appends the table to this file")
    given, tests = parser.parse_known_args()
    lines = [
        f"python -m benchmarks.versions {shlex.join(tests)}",
        f"{heading()}\n# " + ", ".join(f"{name} {version(name)}" for name in PACKAGES),
        f"\n{'':40}{'passed':>8}{'failed':>8}{'skipped':>9}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={report}", *tests]).returncode
        if not report.exists():
            return status
        found = counts(report)
    for name, outcomes in [*sorted(found.items()), ("all", sum(found.values(), Counter()))]:
        lines.append(f"{name:40}{outcomes['passed']:8}{outcomes['failed']:8}{outcomes['skipped']:9}")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.output is not None:
        with given.output.open("a") as file:
            file.write(text + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
