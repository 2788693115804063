"""One rank of one strategy: an ordinary ``Trainer.fit`` that waits between its turns."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_multigpu.bench.jobs.rank_process import Seat, Turns
from lightning_multigpu.bench.strategies.contenders import Contender
from lightning_multigpu.bench.strategies.models import Subject, repeated
from lightning_multigpu.communication.metering.clocks import Clock, clock_of
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.job.shared_gpus import place, rank_devices
from lightning_multigpu.strategies.run_view import view_of


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """The plan of a bench: each strategy has ``repetitions`` turns of ``steps`` timed steps after ``warm_up`` others.

    A turn may take ``timeout_s``, and the first one ``start_timeout_s`` longer.
    """

    subject: Subject
    device_type: str
    repetitions: int
    steps: int
    warm_up: int
    timeout_s: float
    start_timeout_s: float = 180.0

    @property
    def num_steps(self) -> int:
        """Of each job; the first turn is for memory, buckets and caches, and is not counted."""
        return (self.repetitions + 1) * (self.warm_up + self.steps)


@dataclass(frozen=True)
class Taken:
    """A turn of one rank: seconds of each timed step, and the figures of the strategy's meter, if it has one.

    ``samples`` are those of a timed step, on average: 0 where they cannot be counted, and where the batch is a copy of
    another rank's, as under a pipeline.
    """

    seconds: list[float]
    metered: dict[str, float] | None = None
    parameters: int = 0
    samples: float = 0.0


@dataclass
class TakesTurns(Callback):
    """Times steps from the start of one batch to that of the next, and waits at the end of a turn for the next one.

    ::

        on_train_batch_start   |   |   |   |...............|   |   |   |........
                               warm-up  timed   (waiting)   warm-up  timed
                                    <-1-><-2->                   <-3-><-4->

    While it waits, the thread sleeps in a system call. ``batch_size`` is that of all batches; with 0 their samples are
    counted.
    """

    turns: Turns
    warm_up: int
    steps: int
    batch_size: int = 0
    _marks: list[tuple[Any, int]] = field(default_factory=list)
    _first_metered: int = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        timeline, view = clock_of(trainer.strategy.root_device), view_of(trainer)
        meter, samples = view.meter, (self.batch_size or leading_size(batch) or 0) if view.owns_batch() else 0
        is_over = not self._marks
        if self._marks:
            self._marks.append((timeline.mark(), samples))
            is_over = len(self._marks) > self.warm_up + self.steps
            if is_over:
                self.turns.answer(asdict(self._taken(timeline, meter, pl_module)))
        if is_over and self.turns.next() is None:
            trainer.should_stop = True
            return
        if is_over:
            self._marks = [(timeline.mark(), samples)]
        if meter is not None and len(self._marks) == self.warm_up + 1:
            self._first_metered = meter.steps_ended

    def _taken(self, timeline: Clock, meter: Meter | None, module: LightningModule) -> Taken:
        timeline.wait(self._marks[-1][0])
        steps = [*pairwise(self._marks)][self.warm_up :]
        seconds = [timeline.seconds(start, end) for (start, _), (end, _) in steps]
        parameters = sum(parameter.numel() for parameter in module.parameters())
        samples = fmean(size for (_, size), _ in steps)
        metered: dict[str, float] | None = None
        if meter is not None:
            meter.flush()
            ended = [step for step in meter.steps if step.index >= self._first_metered]
            figures = {
                "total_ms": [1e3 * step.total_s for step in ended],
                "hidden_ms": [1e3 * step.hidden_s for step in ended],
                "exposed_ms": [1e3 * step.exposed_s for step in ended],
                "sent_bytes": [float(step.sent_bytes) for step in ended],
            }
            metered = {name: median(values) for name, values in figures.items()} if ended else None
        return Taken(seconds, metered, parameters, samples)


def serve(settings: tuple[Contender, StrategyPlan, int], seat: Seat, turns: Turns) -> None:
    """Trains turn by turn until there is none left, on as many devices of a host as the settings say."""
    seed_everything(0, verbose=False)
    contender, plan, num_devices = settings
    subject = plan.subject
    model = subject.model()
    data = None if subject.data is None else subject.data()
    loader: DataLoader[Any] | None = None
    batch_size = 0
    if subject.batch_size:
        one_process = contender.is_one_process
        batch_size = subject.batch_size * (num_devices if one_process else 1)
        ranks = 1 if contender.strategy is None or one_process else seat.placement.world_size
        # One batch more: the last turn ends with the start of a batch that belongs to none.
        batch = model.example_batch(batch_size)  # type: ignore[operator]
        loader = repeated(batch, batch_size, plan.num_steps + 1, ranks)
    trainer = make_trainer(
        contender, plan, num_devices, seat, [TakesTurns(turns, plan.warm_up, plan.steps, batch_size)]
    )
    trainer.fit(model, train_dataloaders=loader, datamodule=data)


def make_trainer(
    contender: Contender, plan: StrategyPlan, num_devices: int, seat: Seat, callbacks: list[Callback]
) -> Trainer:
    devices = rank_devices(plan.device_type, num_devices, torch.cuda.device_count())
    strategy: Strategy
    if contender.strategy is None:
        strategy, num_nodes = SingleDeviceStrategy(devices[seat.local_rank]), 1
    else:
        # As if this rank had been started by hand: Lightning then starts none.
        os.environ.update(LOCAL_RANK=str(seat.local_rank), NODE_RANK=str(seat.placement.node_rank))
        strategy, num_nodes = contender.make(), seat.placement.num_nodes
        place(strategy, devices)
    return Trainer(
        accelerator="gpu" if plan.device_type == "cuda" else "cpu",
        devices="auto",
        num_nodes=num_nodes,
        strategy=strategy,
        # A rank whose turn is over sleeps with the next batch of its own loader in hand: at the end of an epoch whose
        # batches are dealt out, async_ps would wait for that batch, and the turn for async_ps.
        use_distributed_sampler=plan.subject.batch_size > 0 or contender.options.get("mode") != "async",
        plugins=[LightningEnvironment()],  # and Lightning looks for no other, such as MPI's, which starts a daemon
        precision=plan.subject.precision,
        accumulate_grad_batches=plan.subject.accumulate,
        max_epochs=-1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
