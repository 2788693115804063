"""The run of a strategies bench: the same steps under each strategy in turn, while the others sleep.

Each strategy has a job of its own, all started before the first turn. A turn is some steps of one job; in every
repetition each job gets one, in an order that moves on by one place, so that none of them always follows the same
neighbour or profits from a quiet moment of the machine. ::

    repetition 1    none  ddp  ring_ddp       "none": each rank trains by itself, all at the same time, so that they
    repetition 2    ddp  ring_ddp  none       share cores and memory as the others do; what a step takes longer than
    repetition 3    ring_ddp  none  ddp       that is the cost of communication
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import fmean, median

from lightning_multigpu.bench.jobs.host_agents import HostAgents, JobError, RankJob
from lightning_multigpu.bench.strategies.contenders import Contender
from lightning_multigpu.bench.strategies.strategy_rank import StrategyPlan, Taken, serve
from lightning_multigpu.report.statistics import Spread


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """One row: the step of one strategy, in seconds, on the slowest rank.

    ``seconds`` are the steps of that rank, in order. ``rank_medians_s`` are the medians of all ranks. ``metered`` is
    what the strategy's own meter says of a step, on the rank that communicates longest: total_ms, hidden_ms, exposed_ms
    and sent_bytes. ``samples`` of a step and ``samples_per_s`` are of all ranks together; 0 and None where samples
    cannot be counted. A row of a strategy that failed has a reason in place of figures.
    """

    label: str
    reason: str | None = None
    step_s: Spread | None = None
    seconds: Sequence[float] = ()
    rank_medians_s: Sequence[float] = ()
    metered: dict[str, float] | None = None
    parameters: int = 0
    samples: float = 0.0
    samples_per_s: float | None = None


@dataclass
class StrategyRun:
    """One strategy in the course of the run; on ``devices`` ranks of a host, if not on all."""

    hosts: HostAgents
    contender: Contender
    plan: StrategyPlan
    devices: int | None = None
    _job: RankJob | None = None
    _reason: str | None = None
    _taken: list[Sequence[Taken]] = field(default_factory=list)  # of each turn that counts, by rank

    def start(self) -> None:
        """Starts the ranks."""
        plan, devices = self.plan, self.devices or self.hosts.placement.devices
        self._job = self.hosts.start(
            serve,
            (self.contender, plan, devices),
            timeout_s=plan.timeout_s,
            start_timeout_s=plan.start_timeout_s,
            devices=1 if self.contender.is_one_process else devices,
        )

    def take(self, *, counts: bool) -> None:
        """Takes a turn, if the strategy has not failed."""
        if self._job is None:
            return
        try:
            taken = [Taken(**answer) for answer in self._job.turn(True)]
        except JobError as error:
            self._job, self._reason = None, str(error)
            return
        if counts:
            self._taken.append(taken)

    def end(self) -> None:
        if self._job is not None:
            self._job.end()

    def result(self) -> StrategyResult:
        if self._reason is not None:
            return StrategyResult(label=self.contender.label, reason=self._reason)
        ranks = [*zip(*self._taken, strict=True)]
        seconds = [[step_s for taken in turns for step_s in taken.seconds] for turns in ranks]
        samples = [fmean(taken.samples for taken in turns) for turns in ranks]
        spreads = [*map(Spread.of, seconds)]
        slowest = max(range(len(spreads)), key=lambda rank: spreads[rank].median)
        return StrategyResult(
            label=self.contender.label,
            step_s=spreads[slowest],
            seconds=seconds[slowest],
            rank_medians_s=[spread.median for spread in spreads],
            metered=max(filter(None, map(_meter_figures, ranks)), key=lambda of: of["total_ms"], default=None),
            parameters=ranks[0][0].parameters,
            samples=sum(samples),
            samples_per_s=sum(size / of.median for size, of in zip(samples, spreads, strict=True)) or None,
        )


def take_turns(
    runs: Sequence[StrategyRun], after_turn: Callable[[str], object] = lambda label: None
) -> list[StrategyResult]:
    """The rows of runs with equal plans and hosts, also of different numbers of ranks; they start at the same time.

    ``after_turn`` gets the label of the strategy after each turn; each has one more than the plan's repetitions.
    """
    for run in runs:
        run.start()
    for number in range(1 + runs[0].plan.repetitions):  # the first one does not count
        first = max(0, number - 1) % len(runs)
        for run in [*runs[first:], *runs[:first]]:
            run.take(counts=number > 0)
            after_turn(run.contender.label)
    with ThreadPoolExecutor() as threads:  # ranks take a moment to end
        list(threads.map(StrategyRun.end, runs))
    return [run.result() for run in runs]


def _meter_figures(turns: Sequence[Taken]) -> dict[str, float] | None:
    """Medians of a rank over its turns; None without a meter."""
    metered = [taken.metered for taken in turns if taken.metered is not None]
    return {key: median(turn[key] for turn in metered) for key in metered[0]} if metered else None
