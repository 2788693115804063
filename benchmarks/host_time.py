"""The host's time of a small step: what the main thread computes under each strategy, beside stock ddp's.

    python -m benchmarks.host_time --turns 12 --names ring_ddp cpu_ps

A GPU waits for it, however fast the GPU is. The model has next to no compute: 10 or 100 layers of 16 x 16, batch 8. A
strategy and stock ddp take turns of some steps. A figure is the processor time of the main thread from one batch to the
next (``time.thread_time``, in which waiting does not count), on the slowest rank. Printed are the microseconds beyond
those of ddp in the same turns, as the rows of a table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from benchmarks.heading import heading
from lightning_multigpu import STRATEGIES
from lightning_multigpu.bench.jobs.host_agents import HostAgents, JobError, RankJob
from lightning_multigpu.bench.jobs.placement import placement
from lightning_multigpu.bench.jobs.rank_process import Seat, Turns
from lightning_multigpu.bench.strategies import strategy_rank
from lightning_multigpu.bench.strategies.contenders import Contender, contender
from lightning_multigpu.bench.strategies.models import Subject
from lightning_multigpu.bench.strategies.strategy_rank import StrategyPlan
from lightning_multigpu.communication.metering.clocks import HostClock

LAYERS = (10, 100)
RANKS = (1, 2)
BATCH_SIZE = 8
_PEER = "ddp"


class SmallLayers(LightningModule):
    """Layers of Linear(16, 16), each with two parameters, and next to no compute."""

    default_batch_size = BATCH_SIZE

    def __init__(self, num_layers: int = 100) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_layers)))

    def example_batch(self, batch_size: int) -> Tensor:
        return torch.randn(batch_size, 16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def serve(settings: tuple[Contender, StrategyPlan, int], seat: Seat, turns: Turns) -> None:
    """A rank of the bench whose clock is the main thread's processor time."""
    strategy_rank.clock_of = lambda device: HostClock(time.thread_time)  # type: ignore[attr-defined]
    strategy_rank.serve(settings, seat, turns)


def beyond_us(name: str, num_layers: int, ranks: int, options: argparse.Namespace) -> tuple[float, list[float]]:
    """Microseconds of ddp's step, and in each turn those of ``name`` beyond ddp's; 0 of them for ddp itself.

    Raises:
        JobError: the strategy does not train this model on so many ranks.
    """
    plan = StrategyPlan(
        subject=Subject("small", partial(SmallLayers, num_layers), BATCH_SIZE),
        device_type=options.device,
        repetitions=options.turns,
        steps=options.steps,
        warm_up=2,
        timeout_s=60.0,
    )
    with HostAgents(placement(ranks, environment={}), threads=1) as hosts:
        jobs: list[RankJob] = []
        for each in map(contender, dict.fromkeys((_PEER, name))):
            devices = 1 if each.is_one_process else ranks
            given = {"timeout_s": plan.timeout_s, "start_timeout_s": plan.start_timeout_s, "devices": devices}
            jobs.append(hosts.start(serve, (each, plan, ranks), **given))
        found: list[list[float]] = []
        for number in range(1 + options.turns):  # the first one does not count
            order = jobs if number % 2 else jobs[::-1]
            taken = {job: 1e6 * max(statistics.median(rank["seconds"]) for rank in job.turn(True)) for job in order}
            found += [[taken[job] for job in jobs]] * (number > 0)
        for job in jobs:
            job.end()
    peer_us = statistics.median(turn[0] for turn in found)
    return peer_us, [turn[-1] - turn[0] for turn in found]


def cell(name: str, num_layers: int, ranks: int, options: argparse.Namespace) -> str:
    """Median and quartiles; "-" where the strategy does not train."""
    try:
        peer_us, more_us = beyond_us(name, num_layers, ranks, options)
    except JobError as error:
        print(f"{name}, {num_layers} layers, {ranks} rank(s): {error}", file=sys.stderr, flush=True)
        return "-"
    if name == _PEER:
        return f"{peer_us:,.0f}"
    low, middle, high = statistics.quantiles(more_us, n=4)
    return f"{middle:+,.0f} ({low:+,.0f} to {high:+,.0f})"


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    names = [_PEER, *(row.name for row in STRATEGIES if not row.name.endswith("_spawn"))]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=names, metavar="NAME", help="strategies (default: all)")
    parser.add_argument("--turns", type=int, default=12, help="of each strategy (default: 12)")
    parser.add_argument("--steps", type=int, default=20, help="of a turn (default: 20)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    options = parser.parse_args()
    print(f"# python -m benchmarks.host_time {' '.join(sys.argv[1:])}".rstrip())
    print(heading())
    print(f"# us of the main thread a step beyond {_PEER}'s; median and quartiles of {options.turns} turns")
    worlds = [(num_layers, ranks) for ranks in RANKS for num_layers in LAYERS]
    titles = [f"{2 * layers} parameters, {ranks} rank{'s' * (ranks > 1)}" for layers, ranks in worlds]
    print(row(["us a step", *titles]), row(["---"] * (1 + len(titles))), sep="\n", flush=True)
    for name in options.names:
        print(row([f"`{name}`", *(cell(name, *world, options) for world in worlds)]), flush=True)


if __name__ == "__main__":
    main()
