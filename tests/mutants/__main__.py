"""Applies each mutant to a copy of the tree and runs the test that has to notice it."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.mutants import REPOSITORY, Mutant, load

_COPIED = ("lightning_multigpu", "tests", "benchmarks", "examples", "configs", "pyproject.toml")
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", "-rfE")
_CANNOT_RUN = (2, 3, 4, 5)  # pytest's exit statuses for tests that it could not run
_TIMEOUT_S, _END_S = 180.0, 20.0


def test(directory: Path, nodes: Sequence[str]) -> tuple[int | None, str]:
    """Runs tests in the copy: pytest's exit status, None where they did not end in time, and what it has written."""
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(directory), "COLUMNS": "240"}
    with subprocess.Popen(
        [*_PYTEST, *nodes], cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_S * len(nodes))
            return process.returncode, output
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # fixtures end what they have started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            return None, "did not end in time"
        finally:
            process.kill()
            for each in psutil.process_iter():  # what tests in the copy have started and left behind
                with contextlib.suppress(psutil.Error):
                    if each.environ().get("PYTHONPATH", "").startswith(str(directory)):
                        each.kill()


def verdict_of(mutant: Mutant, directory: Path) -> tuple[str, str]:
    """Returns "caught", "survived", "stale" or "broken", and why."""
    if (problem := mutant.problem()) is not None:
        return "stale", problem
    original, copy = REPOSITORY / mutant.path, directory / mutant.path
    copy.write_text(mutant.mutated(original.read_text()))
    try:
        status, output = test(directory, [mutant.node])
    finally:
        shutil.copy2(original, copy)  # with its time, by which compiled files are known
    if status == 0:
        return "survived", f"{mutant.node} passes"
    told = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return "broken" if status in _CANNOT_RUN else "caught", (told or output.splitlines()[-1:] or [""])[0]


def main() -> int:
    """Runs the mutants that were asked for; 0 if each of them was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("-k", nargs="+", default=[""], metavar="NAME", help="only mutants whose name contains one")
    wanted = [name.lower() for name in parser.parse_args().k]
    mutants = [mutant for mutant in load() if any(name in mutant.title.lower() for name in wanted)]
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as made:
        directory, counts = Path(made), Counter[str]()
        for name in _COPIED:
            source = REPOSITORY / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, directory / name)
        nodes = sorted({mutant.node for mutant in mutants if mutant.problem() is None})
        status, output = test(directory, nodes) if nodes else (0, "")
        if status != 0:
            print(f"{output}\nthe tests do not pass without the faults")
            return 1
        for mutant in mutants:
            verdict, reason = verdict_of(mutant, directory)
            counts[verdict] += 1
            print(f"{verdict:<8} {mutant.title}  ({reason})", flush=True)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("caught", "survived", "stale", "broken")))
    return 0 if counts["caught"] == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
