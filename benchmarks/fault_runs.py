"""Plants faults in small jobs, and counts the jobs that hang or leave a process or a file behind.

``python -m benchmarks.fault_runs --runs 15`` runs 15 of all combinations of fault, place, rank and launcher, one
after another; ``--only kill,stop training popen`` those that have one of the words in each of the arguments. Controls
are among them: what a job has to survive, with the weights of a run without faults. The launcher ``hosts`` starts one
rank on each of two emulated hosts, and needs root.

There are fewer combinations than 1,000; ``--runs 1000`` runs them all, and then again from the first one on. The output
of a job that ended wrongly follows its row.

With ``--resume N``, N of the failed jobs are run again from their last checkpoint, and must come to those weights too.
The exit status is 1 if a job hung, ended well in spite of its fault, did not say what failed, or left something behind.
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
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.fault_job import FaultJob, Outcome
from tests.faults import PLACES
from tests.launch.fault_script import (
    CONTROLS,
    FAILURE_TIMEOUT_S,
    HOST_KINDS,
    JOIN_TIMEOUT_S,
    KINDS,
    RANKS,
    STRATEGIES,
    must_survive,
)
from tests.launch.outside_faults import CONTROL_S

LAUNCHERS = ("popen", "spawn", "external", "hosts")
_SHUFFLE_SEED = 3
STEP = 5


@dataclass(frozen=True)
class Combination:
    """A fault, where it happens, on which rank, and who started the ranks."""

    kind: str
    where: str
    rank: int
    launcher: str

    def words(self) -> set[str]:
        """The words by which ``--only`` names it."""
        return {self.kind, self.where, f"rank{self.rank}", self.launcher}

    def arguments(self, strategy: str) -> list[str]:
        """The command line of the job's script."""
        method = "spawn" if self.launcher == "spawn" else "popen"
        first = self.where == "joining" or (self.kind, self.where) == ("slow", "training")  # the first step compiles
        step = 0 if first else STEP
        # A batch that is put together in a worker of the loader: the rank itself is well, and waits.
        workers = 1 if self.where == "data" and self.kind in KINDS else 0
        return [method, self.kind, self.where, str(self.rank), str(step), str(workers), strategy]


def combinations(only: list[str], strategy: str) -> list[Combination]:
    """The combinations that were asked for, in an order that mixes them; the same every time."""
    kinds = (*KINDS, *HOST_KINDS, *CONTROLS)
    every = [
        Combination(*values)
        for values in itertools.product(kinds, PLACES, range(RANKS), LAUNCHERS)
        if makes_sense(*values) and (strategy, values[-1]) != ("hybrid", "hosts")  # it splits no layer between hosts
    ]
    known = set().union(*(combination.words() for combination in every))
    wanted = [set(words.split(",")) for words in only]
    if unknown := set().union(*wanted) - known:
        raise SystemExit(f"--only: {', '.join(sorted(unknown))} is none of: {', '.join(sorted(known))}")
    chosen = [combination for combination in every if all(combination.words() & words for words in wanted)]
    random.Random(_SHUFFLE_SEED).shuffle(chosen)
    return chosen


def repeated(chosen: list[Combination], runs: int | None) -> list[Combination]:
    """So many of them, again from the first one on where there are fewer; all of them once for None."""
    return chosen if runs is None else list(itertools.islice(itertools.cycle(chosen), runs))


def makes_sense(kind: str, where: str, rank: int, launcher: str) -> bool:
    """Hosts fail where there are several, guardians and jobs once they have begun."""
    if where == "joining" and (kind in HOST_KINDS or "guardian" in kind):
        return False
    return launcher == "hosts" or kind not in HOST_KINDS


def row(combination: Combination, outcome: Outcome) -> str:
    kind, where, rank, launcher = astuple(combination)
    seconds = "-" if outcome.ended_after_s is None else f"{outcome.ended_after_s:.1f}"
    named = "yes" if outcome.names_rank else "no"
    left = "; ".join([*outcome.leaks, *(f"({name}, torch's)" for name in outcome.left_by_torch)]) or "-"
    return (
        f"{kind:13} {where:10} {rank:4} {launcher:8}  {outcome.verdict():18} {seconds:>5} {outcome.orphans:7}  "
        f"{named:5}  {left}"
    )


def main() -> int:
    options = arguments()
    chosen = repeated(combinations(options.only, options.strategy), options.runs)
    # Whoever ends this program ends the job of the moment with it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: sys.exit(128 + received))
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"{options.strategy}, {RANKS} ranks, failure_timeout_s={FAILURE_TIMEOUT_S:g}, deadline "
          f"{options.deadline_s:g} s after the fault; {len(chosen)} runs")  # fmt: skip
    good = run(Combination("nothing", "training", 0, "popen"), options).weights
    assert good is not None, "the run without a fault has to come to its end"
    print(f"{'fault':13} {'where':10} {'rank':4} {'launcher':8}  {'outcome':18} {'s':>5} orphans  named  left behind")
    outcomes: list[Outcome] = []
    begin = time.monotonic()
    for combination in chosen:
        if time.monotonic() - begin > 60 * options.minutes:
            print(f"stopped after {options.minutes:g} minutes: {len(chosen) - len(outcomes)} runs not begun")
            break
        outcome = run(combination, options, resume_to=good if len(outcomes) < options.resume else None)
        outcomes.append(outcome)
        print(row(combination, outcome), flush=True)
        if not outcome.is_right(good):
            print(outcome.output, flush=True)
    counts = summary(outcomes, good)
    print("\n".join(lines(counts)))
    return 1 if counts["all"]["wrong"] else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="so many, some of them again where there are fewer (all, once)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD[,WORD]")
    parser.add_argument("--strategy", choices=STRATEGIES, default="ring_ddp", help="ddp is Lightning's own")
    parser.add_argument("--deadline-s", type=float, default=30.0, help="from the fault to the end of all processes")
    parser.add_argument("--minutes", type=float, default=120.0, help="no run is begun after that")
    parser.add_argument("--resume", type=int, default=0, metavar="N", help="the first N failed jobs are resumed")
    parser.add_argument("--forked", action="store_true", help="fork jobs from a process that has imported Lightning")
    return parser.parse_args()


def run(combination: Combination, options: argparse.Namespace, *, resume_to: float | None = None) -> Outcome:
    """One job; with ``resume_to``, a failed one is resumed and has to come to these weights."""
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        directory, launcher = Path(name), combination.launcher
        job = FaultJob(directory, combination.arguments(options.strategy), launcher, forked=options.forked)
        more_s = 0.0
        if must_survive(combination.kind, combination.where):
            more_s = CONTROL_S + 60  # the whole training is still to come
        elif combination.where == "joining":
            more_s = JOIN_TIMEOUT_S  # for so long the others wait for a rank that hangs
        outcome = job.run(rank=combination.rank, kind=combination.kind, deadline_s=options.deadline_s + more_s)
        if resume_to is None or outcome.is_control:
            return outcome
        again = replace(combination, kind="nothing").arguments(options.strategy)
        resumed = FaultJob(directory, again, launcher, {"RESUME": "1"}, forked=options.forked).run(
            rank=0, kind="nothing", deadline_s=60
        )
    if resumed.is_right(resume_to):
        return outcome
    return replace(outcome, resumed=False, output=f"{outcome.output}\n=== resumed ===\n{resumed.output}")


def summary(outcomes: Sequence[Outcome], weights: float | None = None) -> dict[str, dict[str, Any]]:
    """Counts by kind of fault and for all of them, and seconds from the fault to the end.

    Args:
        outcomes: of the runs.
        weights: of a run without faults, which controls have to come to.
    """
    kinds = sorted({outcome.kind for outcome in outcomes})
    groups = {kind: [outcome for outcome in outcomes if outcome.kind == kind] for kind in kinds}
    return {name: _counts(group, weights) for name, group in {**groups, "all": list(outcomes)}.items()}


def _counts(outcomes: Sequence[Outcome], weights: float | None) -> dict[str, Any]:
    seconds = [o.ended_after_s for o in outcomes if o.ended_after_s is not None and not o.is_control]
    return {
        "runs": len(outcomes),
        "hangs": sum(outcome.hung for outcome in outcomes),
        "orphans": sum(outcome.orphans for outcome in outcomes),
        "leaks": sum(len(outcome.leaks) for outcome in outcomes),
        "by_torch": sum(len(outcome.left_by_torch) for outcome in outcomes),
        "unnamed": sum(not (o.names_rank or o.is_control or o.reported) for o in outcomes),
        "wrong": sum(not outcome.is_right(weights) for outcome in outcomes),
        "median_s": round(median(seconds), 2) if seconds else None,
        "maximum_s": round(max(seconds), 2) if seconds else None,
    }


def lines(counts: dict[str, dict[str, Any]]) -> list[str]:
    """As a table."""
    columns = list(counts["all"])
    table = [f"{'fault':14}" + "".join(f"{column:>11}" for column in columns)]
    for kind, values in counts.items():
        cells = ("-" if values[column] is None else str(values[column]) for column in columns)
        table.append(f"{kind:14}" + "".join(f"{cell:>11}" for cell in cells))
    return table


if __name__ == "__main__":
    sys.exit(main())
