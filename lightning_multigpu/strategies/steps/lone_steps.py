"""Lone steps: the training steps of one rank, timed on one device while nothing is sent.

A rank of a data-parallel strategy trains the whole module, and a rank of ``tensor_split`` its part of it::

    fork --+-- child 0: Trainer.fit, timed        as many at once as ranks would share the machine's
           +-- child 1: Trainer.fit, timed        cores and memory; each ends in the middle of its fit,
           +-- ...                                and this process's module stays as it is
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median, quantiles
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_multigpu._usable_cores import usable_cores
from lightning_multigpu.communication.metering.clocks import CoreWait, clock_of
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.tensor_split.blocks import find_blocks
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.engine.tensor_split.trials import TracelessStep, Trials
from lightning_multigpu.engine.training_memory import SavedActivations, held_bytes
from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.planning.scaling.model_profile import Phases
from lightning_multigpu.strategies.steps.dry_run import QUIET_SETTINGS, traceless, unlogged_loss

_FEWEST_STEPS = 6
_WARM_UP = 2
_DETAILED = 3
_TIMEOUT_S = 600.0


class LoneStepsError(ValueError):
    """The module's steps could not be run alone; the message is the exception of its code."""


@dataclass(frozen=True)
class LoneRank:
    """The steps of one rank.

    Attributes:
        phases: of the median step.
        samples: of a batch; None if they cannot be counted.
        held: bytes of parameters, gradients and optimizer states.
        activations_bytes: saved for backward.
        flops: multiplications and additions of a step.
        gradients: bytes of each gradient and the share of backward after which it is ready.
        collectives: operation and bytes of each collective that a part of a module would take part in.
        waiting: the share of the time in which other processes had the core.
    """

    phases: Phases
    samples: int | None
    held: HeldBytes
    activations_bytes: int
    flops: float
    gradients: Sequence[tuple[int, float]] = ()
    collectives: Sequence[tuple[str, int]] = ()
    waiting: float = 0.0


class LoneTensorGroup(TensorGroup):
    """The first of ``size`` ranks that split layers, without the others: nothing is sent, and sums are its own."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.on_gather = lambda layer, operation: None
        self._readers, self.shows_parts = None, False
        self._meter, self._shared, self._thread = Meter(), None, None
        self._is_nccl, self._is_alone = False, True
        self.sent: list[tuple[str, int]] = []  # operation and bytes of each collective
        self.observer = lambda operation, name, size_bytes: self.sent.append((operation, size_bytes))


@dataclass
class _Step:
    """The marks of one step: beginning and end of each phase, which may lie within each other."""

    begin: Any
    phases: list[tuple[str, Any, Any]] = field(default_factory=list)
    end: Any = None


class LoneStepsStrategy(SingleDeviceStrategy):
    """Trains on one device, times the phases of each step, and never ends by itself.

    With a ``tensor_parallel_size`` above 1 it has the first part of each layer.
    """

    def __init__(self, device: torch.device, tensor_parallel_size: int = 1) -> None:
        super().__init__(device)
        self._group = LoneTensorGroup(tensor_parallel_size) if tensor_parallel_size > 1 else None
        self.clock = clock_of(device)
        self.timed: list[_Step] = []
        self.activations_bytes = 0
        self.flops = 0.0
        self.samples: int | None = None
        self.collectives: list[tuple[str, int]] = []
        self._is_first = True

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first:
            return self._first_step(*args, **kwargs)
        if self._group is not None:
            self.collectives, self._group.sent = self._group.sent, []  # of the batch before
        return self._timed("forward", super().training_step, *args, **kwargs)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._timed("backward", super().backward, *args, **kwargs)  # type: ignore[no-any-return]

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("optimizer", super().optimizer_step, *args, **kwargs)

    def _timed(self, phase: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        start = self.clock.mark()
        found = call(*args, **kwargs)
        if self.timed:
            self.timed[-1].phases.append((phase, start, self.clock.mark()))
        return found

    def _first_step(self, *args: Any, **kwargs: Any) -> Any:
        """Splits the module where that is wanted, and counts what a step saves and computes."""
        self._is_first = False
        module = self.lightning_module
        assert module is not None
        self.samples = leading_size(args[0] if args else next(iter(kwargs.values())))
        if self._group is not None:
            _split(module, self._group, lambda: module.training_step(*args, **kwargs))
            self._group.sent = []
        saved = SavedActivations([*module.parameters(), *module.buffers()])
        counter = FlopCounterMode(display=False)
        with saved.counted(), counter if self._group is None else nullcontext():  # it hooks split logits
            output = super().training_step(*args, **kwargs)
        self.activations_bytes = saved.peak_bytes
        self.flops = 3.0 * counter.get_total_flops()  # backward computes two gradients for each product
        return output


def _split(module: pl.LightningModule, group: LoneTensorGroup, step: Any) -> None:
    """Splits the blocks in which a step computes on parts.

    Raises:
        LoneStepsError: no block can be split.
    """
    run = TracelessStep(
        module,
        group,
        lambda: unlogged_loss(module.trainer.precision_plugin, module, step),
        traceless=partial(traceless, module),
        gather=lambda value: [value],
        optimizes_manually=not module.automatic_optimization,
    )
    trials = Trials(run)
    trials.run(partial(find_blocks, module))
    if not trials.split:
        raise LoneStepsError("no layer can be split")


class _Watch(pl.Callback):
    """Marks the steps, and sends the result when ``seconds`` have passed since all children have begun."""

    def __init__(self, connection: Connection, barrier: Any, seconds: float) -> None:
        self._connection, self._barrier, self._seconds = connection, barrier, seconds
        self._until_s = 0.0
        self._core_wait = CoreWait()
        self._waited_s = 0.0
        self._ready: list[list[tuple[int, Any]]] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, LoneStepsStrategy)
        steps = len(strategy.timed)
        if steps == _WARM_UP:
            self._barrier.wait(_TIMEOUT_S)
            self._until_s = time.monotonic() + self._seconds
            self._core_wait.__enter__()
            self._waited_s = self._core_wait.seconds()
        if steps >= _WARM_UP + _FEWEST_STEPS and time.monotonic() >= self._until_s and not self._ready:
            for parameter in pl_module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            self._ready.append([])
        elif self._ready:
            self._ready.append([])
        if len(self._ready) > _DETAILED:
            self._finish(strategy, pl_module)
        strategy.timed.append(_Step(strategy.clock.mark()))

    def _note(self, parameter: Tensor) -> None:
        self._ready[-1].append((parameter.nbytes, clock_of(parameter.device).mark()))

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, LoneStepsStrategy)
        strategy.timed[-1].end = strategy.clock.mark()

    def _finish(self, strategy: LoneStepsStrategy, module: pl.LightningModule) -> None:
        clock = strategy.clock
        clock.wait(strategy.timed[-1].end)
        steps = strategy.timed
        detailed = steps[-_DETAILED:]
        found = LoneRank(
            phases=_phases(clock, steps[_WARM_UP : 1 - _DETAILED]),
            samples=strategy.samples,
            held=held_bytes(module.parameters(), strategy.optimizers),
            activations_bytes=strategy.activations_bytes,
            flops=strategy.flops,
            gradients=_shares(clock, detailed[-1], self._ready[_DETAILED - 1]),
            collectives=strategy.collectives,
            waiting=(self._core_wait.seconds() - self._waited_s) / (time.monotonic() - self._until_s + self._seconds),
        )
        self._connection.send(found)
        os._exit(0)


def _phases(clock: Any, steps: Sequence[_Step]) -> Phases:
    """The medians; ``steps`` has one more step, whose begin ends the last one.

    Gradients of two batches are added up before an optimizer step, where the module's optimization is automatic.
    """
    rows = []
    for step, following in pairwise(steps):
        row = {"step": clock.seconds(step.begin, following.begin), "input": clock.seconds(step.end, following.begin)}
        for index, (phase, start, end) in enumerate(step.phases):
            others = (mark for number, mark in enumerate(step.phases) if number != index)
            within = [(a, b) for _, a, b in others if clock.seconds(start, a) >= 0 and clock.seconds(b, end) >= 0]
            own_s = clock.seconds(start, end) - sum(clock.seconds(a, b) for a, b in within)
            row[phase] = row.get(phase, 0.0) + own_s
        rows.append(row)
    last = [row for row in rows if "optimizer" in row] or rows
    adding = [row["backward"] for before, row in pairwise(rows) if "optimizer" not in before and "backward" in row]
    first = [row["backward"] for before, row in pairwise(rows) if "optimizer" in before and "backward" in row]
    middle = {phase: median(row.get(phase, 0.0) for row in rows) for phase in ("forward", "backward", "input")}
    backward_s = median(first) if first else middle["backward"]
    adding_s = max(0.0, median(adding) - backward_s) if adding and first else 0.0
    optimizer_s = median(row.get("optimizer", 0.0) for row in last)
    steps_s = [row["step"] - row.get("optimizer", 0.0) for row in rows]
    known_s = middle["forward"] + median(row.get("backward", 0.0) for row in rows) + middle["input"]
    low, _, high = quantiles(steps_s, n=4)
    return Phases(
        forward_s=middle["forward"],
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        input_s=middle["input"],
        adding_s=adding_s,
        other_s=max(0.0, median(steps_s) - known_s),
        jitter=(high - low) / (median(steps_s) + optimizer_s),
    )


def _shares(clock: Any, step: _Step, ready: Sequence[tuple[int, Any]]) -> list[tuple[int, float]]:
    """Bytes of each gradient, and the share of backward after which it is ready, in the order of readiness."""
    backward = [(start, end) for phase, start, end in step.phases if phase == "backward"]
    if not backward or not ready:
        return []
    start, whole_s = backward[0][0], sum(clock.seconds(a, b) for a, b in backward)
    return [(size, min(1.0, max(0.0, clock.seconds(start, mark) / whole_s))) for size, mark in ready]


def lone_steps(
    module: pl.LightningModule,
    datamodule: pl.LightningDataModule | None,
    trainer_settings: Mapping[str, Any],
    *,
    callbacks: Sequence[pl.Callback] = (),
    device: torch.device,
    crowd: int,
    seconds: float,
    tensor_parallel_size: int = 1,
) -> LoneRank:
    """The mean steps of ``crowd`` ranks that train at the same time.

    Call it before this process has used a GPU, and with one thread for operations: the ranks are forked from it.

    Args:
        module, datamodule: arguments of ``fit``; they stay as they are.
        trainer_settings: arguments of the Trainer; those about devices, logs and the end of the run are replaced.
        callbacks: of the Trainer; only those run that set the size of batches.
        device: of each rank.
        crowd: ranks.
        seconds: that each rank trains, after a few first steps.
        tensor_parallel_size: ranks that split each layer.

    Raises:
        LoneStepsError: the training step raises an error, there is no batch, or no layer can be split.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(crowd)
    processes, connections = [], []
    endless = {
        "accumulate_grad_batches": 1 + module.automatic_optimization, "max_epochs": -1, "max_steps": -1,
        "max_time": None, "min_epochs": None, "min_steps": None, "devices": 1, "num_nodes": 1,
        "use_distributed_sampler": False,
    }  # fmt: skip
    kept = [each for each in callbacks if hasattr(each, "check_before_launch")]

    def train(connection: Connection) -> None:
        """The process of one rank, which never returns."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        torch.set_num_threads(max(1, usable_cores() // crowd))
        watched = [*kept, _Watch(connection, barrier, seconds)]
        own = {"strategy": LoneStepsStrategy(device, tensor_parallel_size), "callbacks": watched}
        try:
            Trainer(**{**trainer_settings, **QUIET_SETTINGS, **endless, **own}).fit(module, datamodule=datamodule)
        except BaseException as error:
            traceback.print_exc()
            barrier.abort()
            text = str(error) if isinstance(error, LoneStepsError) else f"{type(error).__name__}: {error}"
            with suppress(OSError):
                connection.send(text)
        os._exit(1)

    try:
        for _ in range(crowd):
            ours, theirs = context.Pipe()
            process = context.Process(target=train, args=(theirs,))
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        answers = [_answer(connection) for connection in connections]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for answer in answers:
        if isinstance(answer, str):
            raise LoneStepsError(answer)
    ranks = [answer for answer in answers if isinstance(answer, LoneRank)]
    return replace(ranks[0], phases=Phases.mean([rank.phases for rank in ranks]))


def _answer(connection: Connection) -> LoneRank | str:
    with suppress(EOFError, OSError):
        if connection.poll(_TIMEOUT_S):
            return connection.recv()  # type: ignore[no-any-return]
        return f"a step took longer than {_TIMEOUT_S:g} s"
    return (
        "the training loader has no batch to measure, or the process has died; see to it that fit would train on "
        "one device (data, limit_train_batches, memory)"
    )
