"""Plants faults in small jobs, and counts the jobs that hang or leave something behind.

``python -m tests.benchmarks.fault_runs --runs 15`` runs 15 of all combinations of fault, place, rank and launcher, one
after another; ``--only kill,stop training popen`` those that have one of the words in each of the arguments. The exit
status is 1 if a job hung, ended well in spite of its fault, or left something behind.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import random
import signal
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from lightning_multigpu.faults import PLACES
from tests.benchmarks.fault_job import FaultJob, Outcome
from tests.launch.fault_script import FAILURE_TIMEOUT_S, KINDS, RANKS, STRATEGIES

LAUNCHERS = ("popen", "spawn", "external")
_SHUFFLE_SEED = 3
_STEP = 5


@dataclass(frozen=True)
class Combination:
    """A fault, where it happens, on which rank, and who started the ranks."""

    kind: str
    where: str
    rank: int
    launcher: str

    def words(self) -> set[str]:
        """What ``--only`` may name it by."""
        return {self.kind, self.where, f"rank{self.rank}", self.launcher}

    def arguments(self, strategy: str) -> list[str]:
        """The command line of the job's script."""
        method = "spawn" if self.launcher == "spawn" else "popen"
        step = 0 if self.where == "joining" else _STEP
        # A batch that is put together in a worker of the loader: the rank itself is well, and waits.
        workers = 1 if self.where == "data" else 0
        return [method, self.kind, self.where, str(self.rank), str(step), str(workers), strategy]


def combinations(only: list[str], runs: int | None) -> list[Combination]:
    """Those that were asked for, in an order that mixes them; the same every time."""
    every = [Combination(*values) for values in itertools.product(KINDS, PLACES, range(RANKS), LAUNCHERS)]
    known = set().union(*(combination.words() for combination in every))
    wanted = [set(words.split(",")) for words in only]
    if unknown := set().union(*wanted) - known:
        raise SystemExit(f"--only: {', '.join(sorted(unknown))} is none of: {', '.join(sorted(known))}")
    chosen = [combination for combination in every if all(combination.words() & words for words in wanted)]
    random.Random(_SHUFFLE_SEED).shuffle(chosen)
    return chosen[:runs]


def row(combination: Combination, outcome: Outcome) -> str:
    kind, where, rank, launcher = astuple(combination)
    seconds = "-" if outcome.ended_after_s is None else f"{outcome.ended_after_s:.1f}"
    named = "yes" if outcome.names_rank else "no"
    left = "; ".join(outcome.leaks) or "-"
    return (
        f"{kind:9} {where:10} {rank:4} {launcher:8}  {outcome.verdict():18} {seconds:>5} {outcome.orphans:7}  "
        f"{named:5}  {left}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="at most so many (all)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD[,WORD]")
    parser.add_argument("--strategy", choices=STRATEGIES, default="ring_ddp", help="ddp is Lightning's own")
    parser.add_argument("--deadline-s", type=float, default=30.0, help="from the fault to the end of all processes")
    parser.add_argument("--minutes", type=float, default=120.0, help="no run is begun after that")
    parser.add_argument("--outputs", type=Path, help="keep the outputs of jobs in this directory")
    options = parser.parse_args()
    chosen = combinations(options.only, options.runs)
    # Whoever ends this program ends the job of the moment with it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: sys.exit(128 + received))
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"{options.strategy}, {RANKS} ranks on one host, failure_timeout_s={FAILURE_TIMEOUT_S:g}, deadline "
          f"{options.deadline_s:g} s after the fault; {len(chosen)} runs")  # fmt: skip
    print(f"{'fault':9} {'where':10} {'rank':4} {'launcher':8}  {'outcome':18} {'s':>5} orphans  named  left behind")
    outcomes: list[Outcome] = []
    begin = time.monotonic()
    for combination in chosen:
        if time.monotonic() - begin > 60 * options.minutes:
            print(f"stopped after {options.minutes:g} minutes: {len(chosen) - len(outcomes)} runs not begun")
            break
        with tempfile.TemporaryDirectory(prefix="fault-") as directory:
            job = FaultJob(Path(directory), combination.arguments(options.strategy), combination.launcher)
            outcome = job.run(rank=combination.rank, kind=combination.kind, deadline_s=options.deadline_s)
        outcomes.append(outcome)
        print(row(combination, outcome), flush=True)
        if options.outputs is not None:
            options.outputs.mkdir(parents=True, exist_ok=True)
            name = "-".join(map(str, astuple(combination))).replace(" ", "_")
            (options.outputs / f"{name}.log").write_text(outcome.output)
    hangs, wrong = sum(o.hung for o in outcomes), sum(not o.is_right() for o in outcomes)
    orphans, leaks = sum(o.orphans for o in outcomes), sum(len(o.leaks) for o in outcomes)
    print(f"{len(outcomes)} runs: {hangs} hangs, {orphans} orphans, {leaks} leaks; {wrong} not as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
