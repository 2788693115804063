"""Applies each mutant to a copy of the tree and runs the test that has to notice it."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import psutil

from tests.mutants import REPOSITORY, Mutant, load

_COPIED = ("lightning_multigpu", "tests", "benchmarks", "examples", "configs", "pyproject.toml")
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", "-rfE")
_CANNOT_RUN = (2, 3, 4, 5)  # pytest's exit statuses for tests that it could not run
_END_S = 20.0


class Scratch:
    """A copy of the tree, in which one mutant at a time is applied.

    Args:
        directory: where the copy goes.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir()
        for name in _COPIED:
            source = REPOSITORY / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, directory / name)

    def run(self, mutant: Mutant, timeout_s: float) -> tuple[str, str]:
        """Returns "caught", "survived", "stale" or "broken", and why."""
        problem = mutant.problem()
        if problem is not None:
            return "stale", problem
        original, copy = REPOSITORY / mutant.path, self._directory / mutant.path
        copy.write_text(mutant.mutated(original.read_text()))
        try:
            status, output = self.test([mutant.node], timeout_s)
        finally:
            shutil.copy2(original, copy)  # with its time, by which compiled files are known
        if status == 0:
            return "survived", f"{mutant.node} passes"
        told = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return "broken" if status in _CANNOT_RUN else "caught", (told or output.splitlines()[-1:] or [""])[0]

    def test(self, nodes: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
        """Runs tests in the copy. Returns pytest's exit status, None where it took too long, and what it has written.

        Args:
            nodes: the tests.
            timeout_s: after which they are ended; a test that does not end has noticed the fault.
        """
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(self._directory), "COLUMNS": "240"}
        with subprocess.Popen(
            [*_PYTEST, *nodes], cwd=self._directory, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=timeout_s)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # fixtures end what they have started
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
                return None, "did not end in time"
            finally:
                process.kill()
                self._end_leftovers()

    def _end_leftovers(self) -> None:
        """Ends processes that tests in the copy have started and left behind."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("PYTHONPATH", "").startswith(str(self._directory)):
                    process.kill()


def main() -> int:
    """Runs the mutants that were asked for; 0 if each of them was caught."""
    options = _options()
    wanted = [name.lower() for name in options.k]
    mutants = [mutant for mutant in load() if any(name in mutant.title.lower() for name in wanted)]
    if not mutants:
        print(f"no mutant's name contains {' or '.join(options.k)}; --list shows all names")
        return 1
    if options.list:
        print("\n".join(f"{mutant.title}\n    {mutant.path}, {mutant.node}" for mutant in mutants))
        return 0
    start_s, counts = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as directory:
        free: queue.Queue[Scratch] = queue.Queue()
        for number in range(options.jobs):
            free.put(Scratch(Path(directory, str(number))))
        nodes = sorted({mutant.node for mutant in mutants if mutant.problem() is None})
        status, output = free.queue[0].test(nodes, options.timeout * len(nodes)) if nodes else (0, "")
        if status != 0:
            print(f"{output}\nthe tests do not pass without the faults")
            return 1

        def run(mutant: Mutant) -> tuple[str, str]:
            scratch = free.get()
            try:
                return scratch.run(mutant, options.timeout)
            finally:
                free.put(scratch)

        with ThreadPoolExecutor(options.jobs) as pool:
            running = {pool.submit(run, mutant): mutant for mutant in mutants}
            for ended in as_completed(running):
                verdict, reason = ended.result()
                counts[verdict] += 1
                shown = f"  ({reason})" if verdict != "caught" or options.verbose else ""
                print(f"{verdict:<8} {running[ended].title}{shown}", flush=True)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("caught", "survived", "stale", "broken"))
    print(f"{told} in {time.monotonic() - start_s:.0f} s")
    return 0 if counts["caught"] == len(mutants) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("-k", nargs="+", default=[""], metavar="NAME", help="only mutants whose name contains one")
    parser.add_argument("--list", action="store_true", help="list the mutants and run none")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many run at a time (default: 1)")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="seconds a test may take")
    parser.add_argument("-v", "--verbose", action="store_true", help="show how each mutant was noticed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
