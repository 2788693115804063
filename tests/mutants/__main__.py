"""Applies each mutant to a copy of the tree and runs the test that has to notice it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.mutants import REPOSITORY, Mutant, load

CAUGHT, SURVIVED, STALE, BROKEN = VERDICTS = ("caught", "survived", "stale", "broken")
_COPIED = ("lightning_multigpu", "tests", "benchmarks", "examples", "configs", "pyproject.toml")
_OTHERS = ("pytest", "torch", "torch.distributed", "lightning.pytorch", "torchmetrics")  # slow to import
_PYTEST = ("-q", "-p", "no:cacheprovider", "--tb=no", "-W", "ignore:Module already imported so cannot be rewritten")
_OUTPUT = "output.txt"
_SOME_TESTS_FAILED = 1  # pytest's exit status; 2 to 5 mean that it could not run them
_END_S = 20.0


class Outcome(NamedTuple):
    """What became of a mutant."""

    mutant: Mutant
    verdict: str
    reason: str
    seconds: float = 0.0


class Scratch:
    """A copy of the tree, in which one mutant at a time is applied.

    Args:
        directory: where the copy goes.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "tree"
        self._output = directory / _OUTPUT
        self._directory.mkdir(parents=True)
        for name in _COPIED:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, self._directory / name)
            elif source.exists():
                shutil.copy2(source, self._directory / name)

    def apply(self, mutant: Mutant) -> None:
        """Puts the fault into the copy."""
        path = self._directory / mutant.path
        path.write_text(mutant.mutated(path.read_text()))

    def restore(self, mutant: Mutant) -> None:
        """Takes the fault out again."""
        original, copy = REPOSITORY / mutant.path, self._directory / mutant.path
        shutil.copy2(original, copy)  # with its time, by which compiled files are known

    def start(self, *arguments: str) -> int:
        """Runs pytest in the copy, in a process of its own that has what others have written imported already."""
        pid = os.fork()
        if pid:
            return pid
        status = 70
        try:
            os.setsid()
            output = os.open(self._output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.chdir(self._directory)
            os.environ.update(PYTHONPATH=str(self._directory), COLUMNS="240")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.path[:] = [str(self._directory), *(path for path in sys.path if path not in ("", str(REPOSITORY)))]
            for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
                del sys.modules[name]
            sys.modules["__main__"] = importlib.import_module("pytest.__main__")
            sys.argv = ["pytest", *arguments]
            status = int(sys.modules["pytest"].main([*_PYTEST, *arguments]))
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(status)

    def output(self) -> str:
        """What pytest has written."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def end_leftovers(self) -> None:
        """Ends processes that tests in the copy have started and left behind."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("PYTHONPATH", "").startswith(str(self._directory)):
                    process.kill()


class Run:
    """Pytest in a copy, with or without a fault.

    Args:
        scratch: the copy.
        arguments: of pytest.
        timeout_s: after which it is ended.
    """

    def __init__(self, scratch: Scratch, *arguments: str, timeout_s: float) -> None:
        self.scratch = scratch
        self.start_s = time.monotonic()
        self._deadline_s = self.start_s + timeout_s
        self._pid = scratch.start(*arguments)
        self.descriptor = os.pidfd_open(self._pid)
        self._status: int | None = None
        self._told_to_end = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start_s

    def has_ended(self) -> bool:
        """Whether it has; ends it if it takes too long."""
        late_s = time.monotonic() - self._deadline_s
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid and late_s > 0 and not self._told_to_end:
            self._told_to_end = True
            os.kill(self._pid, signal.SIGINT)  # fixtures end what they have started
        if not pid and late_s > _END_S:
            os.kill(self._pid, signal.SIGKILL)
        if pid:
            self._status = os.waitstatus_to_exitcode(status)
            os.close(self.descriptor)
            self.scratch.end_leftovers()
        return bool(pid)

    def end(self) -> None:
        """Ends it and what it has started."""
        os.kill(self._pid, signal.SIGKILL)
        self.scratch.end_leftovers()

    @property
    def status(self) -> int | None:
        """Pytest's exit status, or the negative number of the signal that ended it; None where it took too long."""
        return None if self._told_to_end else self._status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the mutants that were asked for; 0 if each of them was caught."""
    options = _parser().parse_args(arguments)
    wanted = [name.lower() for name in options.k]
    mutants = [mutant for mutant in load() if any(name in mutant.title.lower() for name in wanted)]
    if not mutants:
        print(f"no mutant's name contains {' or '.join(options.k)}; --list shows all names")
        return 1
    if options.list:
        for mutant in mutants:
            print(f"{mutant.title}\n    {mutant.path}, {mutant.node}")
        return 0
    start_s = time.monotonic()
    counts = dict.fromkeys(VERDICTS, 0)
    for outcome in run(mutants, jobs=options.jobs, timeout_s=options.timeout):
        counts[outcome.verdict] += 1
        reason = f"  ({outcome.reason})" if outcome.verdict != CAUGHT or options.verbose else ""
        print(f"{outcome.verdict:<8} {outcome.seconds:5.1f} s  {outcome.mutant.title}{reason}", flush=True)
    print(f"{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}", end="")
    print(f" in {time.monotonic() - start_s:.0f} s")
    return 0 if counts[CAUGHT] == len(mutants) else 1


def run(mutants: Sequence[Mutant], *, jobs: int, timeout_s: float) -> Iterator[Outcome]:
    """Yields what becomes of each mutant, in the order in which they end.

    Args:
        mutants: those to run.
        jobs: how many run at a time.
        timeout_s: of a mutant's test; a test that does not end has noticed the fault.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in _OTHERS:
        importlib.import_module(name)
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as directory:
        free = [Scratch(Path(directory, str(number))) for number in range(jobs)]
        waiting = []
        for mutant in mutants:
            problem = mutant.problem()
            if problem is not None:
                yield Outcome(mutant, STALE, problem)
            else:
                waiting.append(mutant)
        passing = _passing({mutant.node for mutant in waiting}, free[0], timeout_s)
        running: dict[int, tuple[Mutant, Run]] = {}
        try:
            while waiting or running:
                while waiting and free:
                    mutant, scratch = waiting.pop(0), free.pop()
                    if mutant.node not in passing:
                        yield Outcome(mutant, BROKEN, f"{mutant.node} does not pass without the fault")
                        free.append(scratch)
                        continue
                    scratch.apply(mutant)
                    started = Run(scratch, mutant.node, "-x", "-rfE", timeout_s=timeout_s)
                    running[started.descriptor] = mutant, started
                select.select(list(running), [], [], 1.0)
                for descriptor, (mutant, started) in list(running.items()):
                    if started.has_ended():
                        del running[descriptor]
                        started.scratch.restore(mutant)
                        free.append(started.scratch)
                        yield _outcome(mutant, started)
        finally:
            for _, started in running.values():
                started.end()


def _passing(nodes: set[str], scratch: Scratch, timeout_s: float) -> set[str]:
    """Those tests that pass without a fault; all in one process."""
    if not nodes:
        return set()
    run = Run(scratch, *sorted(nodes), "-rpfE", timeout_s=timeout_s * len(nodes))
    try:
        while not run.has_ended():
            select.select([run.descriptor], [], [], 1.0)
    except BaseException:
        run.end()
        raise
    ended: dict[str, set[str]] = {"PASSED": set(), "FAILED": set(), "ERROR": set()}
    for line in scratch.output().splitlines():
        word, _, test = line.partition(" ")
        if word in ended:
            ended[word] |= {node for node in nodes if _is_of(test.partition(" - ")[0], node)}
    return ended["PASSED"] - ended["FAILED"] - ended["ERROR"]


def _is_of(test: str, node: str) -> bool:
    """Whether pytest's ``test`` is the node, one of its parameters', or one of its file or class."""
    return test == node or test.startswith((f"{node}[", f"{node}::"))


def _outcome(mutant: Mutant, run: Run) -> Outcome:
    if run.status is None:
        return Outcome(mutant, CAUGHT, f"{mutant.node} did not end in time", run.seconds)
    if run.status == 0:
        return Outcome(mutant, SURVIVED, f"{mutant.node} passes", run.seconds)
    lines = run.scratch.output().strip().splitlines()
    told = [line.partition(" ")[2].partition(" - ") for line in lines if line.startswith(("FAILED ", "ERROR "))]
    reason = [*(words for _, _, words in told), *lines[-1:], ""][0]
    # What a failed test leaves open may make pytest end with another status.
    has_failed = any(_is_of(test, mutant.node) for test, _, _ in told)
    failed = run.status == _SOME_TESTS_FAILED or run.status < 0 or has_failed
    return Outcome(mutant, CAUGHT if failed else BROKEN, reason, run.seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("-k", nargs="+", default=[""], metavar="NAME", help="only mutants whose name contains one")
    parser.add_argument("--list", action="store_true", help="list the mutants and run none")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many run at a time (default: 1)")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="seconds a test may take")
    parser.add_argument("-v", "--verbose", action="store_true", help="show how each mutant was noticed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
