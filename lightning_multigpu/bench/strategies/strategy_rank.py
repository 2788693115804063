"""One rank of one strategy: an ordinary ``Trainer.fit`` that waits between its turns."""

from __future__ import annotations

import os
from contextlib import ExitStack
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
from lightning_multigpu.bench.strategies.models import Subject, brings_batch, repeated
from lightning_multigpu.communication.metering.clocks import clock_of
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.training_memory import SavedActivations, measured_bytes
from lightning_multigpu.job.shared_gpus import place, rank_devices


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """The plan of a bench: each strategy has ``repetitions`` turns of ``steps`` timed steps after ``warm_up`` others.

    A turn may take ``timeout_s``, and the start of the ranks ``start_timeout_s``.
    """

    subject: Subject
    device_type: str
    repetitions: int
    steps: int
    warm_up: int
    timeout_s: float
    start_timeout_s: float = 180.0
    counts_memory: bool = False

    @property
    def num_steps(self) -> int:
        """Of each job; the first turn is for memory, buckets and caches, and is not counted."""
        return (self.repetitions + 1) * (self.warm_up + self.steps)


@dataclass(frozen=True)
class Turn:
    """Train ``warm_up`` steps and then ``steps`` timed ones; answered by the fields of :class:`Taken`."""

    warm_up: int
    steps: int


@dataclass(frozen=True)
class Taken:
    """A turn of one rank: seconds of each timed step, and the figures of the strategy's meter, if it has one.

    ``samples`` are those of a timed step, on average: 0 where they cannot be counted, and where the batch is a copy of
    another rank's, as under a pipeline. ``memory`` has bytes by kind in the second step, where they are counted.
    """

    seconds: list[float]
    metered: dict[str, float] | None = None
    parameters: int = 0
    samples: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)


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
    counts_memory: bool = False
    batch_size: int = 0
    _turn: Turn | None = None
    _marks: list[tuple[Any, int]] = field(default_factory=list)
    _first_metered: int = 0
    _saved: SavedActivations | None = None
    _counting: ExitStack = field(default_factory=ExitStack)
    _memory: dict[str, int] = field(default_factory=dict)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        timeline = clock_of(trainer.strategy.root_device)
        owns_batch = getattr(trainer.strategy, "owns_batch", True)
        mark = timeline.mark(), (self.batch_size or leading_size(batch) or 0) if owns_batch else 0
        if self._turn is not None:
            self._marks.append(mark)
            self._note_first_metered(trainer)
            if self.counts_memory and self._saved is None:  # in the second step of the first turn, which is not counted
                held = [p for p in pl_module.parameters() if not isinstance(p, Placeholder)]
                self._saved = SavedActivations([*held, *pl_module.buffers()])
                self._counting.enter_context(self._saved.counted())
            if len(self._marks) <= self._turn.warm_up + self._turn.steps:
                return
            timeline.wait(mark[0])
            steps = [*pairwise(self._marks)][self._turn.warm_up :]
            seconds = [timeline.seconds(start, end) for (start, _), (end, _) in steps]
            samples = fmean(size for (_, size), _ in steps)
            parameters = sum(parameter.numel() for parameter in pl_module.parameters())
            taken = Taken(seconds, self._metered(trainer), parameters, samples, self._memory)
            self.turns.answer(asdict(taken))
        self._turn = self.turns.next()
        if self._turn is None:
            trainer.should_stop = True
            return
        self._marks = [(timeline.mark(), mark[1])]
        self._note_first_metered(trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if self._saved is not None and not self._memory:
            self._counting.close()
            held = asdict(measured_bytes(pl_module.parameters(), trainer.optimizers))
            self._memory = {**held, "activations_bytes": self._saved.peak_bytes}

    def _note_first_metered(self, trainer: Trainer) -> None:
        meter = meter_of(trainer)
        if meter is not None and self._turn is not None and len(self._marks) == self._turn.warm_up + 1:
            self._first_metered = meter.steps_ended

    def _metered(self, trainer: Trainer) -> dict[str, float] | None:
        meter = meter_of(trainer)
        if meter is None:
            return None
        meter.flush()
        steps = [step for step in meter.steps if step.index >= self._first_metered]
        if not steps:
            return None
        figures = {
            "total_ms": [1e3 * step.total_s for step in steps],
            "hidden_ms": [1e3 * step.hidden_s for step in steps],
            "exposed_ms": [1e3 * step.exposed_s for step in steps],
            "sent_bytes": [float(step.sent_bytes) for step in steps],
        }
        return {name: median(values) for name, values in figures.items()}


def serve(settings: tuple[Contender, StrategyPlan, int], seat: Seat, turns: Turns) -> None:
    """Trains turn by turn until there is none left, on as many devices of a host as the settings say."""
    seed_everything(0, verbose=False)
    contender, plan, num_devices = settings
    subject = plan.subject
    model = subject.model()
    loader: DataLoader[Any] | None = None
    batch_size = 0
    data = None if subject.data is None else subject.data()
    if data is None and brings_batch(model):
        # One more: the last turn ends with the start of a batch that belongs to none.
        num_batches = plan.num_steps + 1
        one_process = contender.is_one_process
        batch_size = subject.batch_size * (num_devices if one_process else 1)
        batch = model.example_batch(batch_size)  # type: ignore[operator]
        ranks = 1 if contender.strategy is None or one_process else seat.placement.world_size
        loader = repeated(batch, batch_size, num_batches, ranks)
    trainer = make_trainer(contender, plan, num_devices, seat, [TakesTurns(turns, plan.counts_memory, batch_size)])
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


def meter_of(trainer: Trainer) -> Meter | None:
    meter = getattr(trainer.strategy, "meter", None)
    return meter if isinstance(meter, Meter) else None
