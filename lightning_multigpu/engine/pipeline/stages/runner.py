"""Pipeline runner: runs a user's step in micro-batches by a schedule, or on a whole batch forward only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_multigpu.engine.activation_checkpointing import recomputed
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.measuring.recorder import Recorder
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.stages.layer_interception import Activations, LayerInterception
from lightning_multigpu.engine.pipeline.stages.schedules import PassesInOrder, TorchSchedules
from lightning_multigpu.engine.pipeline.stages.stage import Stage
from lightning_multigpu.engine.step_state import preserved_random_state, seed_of, set_random_state
from lightning_multigpu.planning.pipelines.schedule_order import ScheduleName, executed_schedule

_DEPTH = 8  # of operations from the loss, in its form
_MOST_NODES = 2000
_CHANGED = (
    "a tensor that the backward pass of a micro-batch needs is changed in place by the step, as where it limits or "
    "normalises weights under torch.no_grad(), and {} micro-batches are under way together. Make the change in "
    "on_train_batch_start, which comes once a batch, or pass num_micro_batches=1 ({})"
)


class PipelineRunner:
    """One rank of a pipeline, with one stage or several.

    ::

        gpipe, P = 2, M = 3               1f1b
        rank 0   F0 F1 F2 .. B0 B1 B2     F0 F1 .. B0 F2 B1 .. B2
        rank 1   .. F0 F1 F2 B0 B1 B2 ..  .. F0 B0 F1 B1 F2 B2 ..

    Args:
        schedule: the order of the micro-batches' forward and backward passes. If it needs more micro-batches, or a
            multiple of another number, all run forward first and then backward, with equal results.
    """

    def __init__(
        self,
        ownership: Ownership,
        *,
        schedule: ScheduleName,
        recorder: Recorder,
        recompute: Collection[int] = (),
    ) -> None:
        chain, bounds, group = ownership.chain, ownership.bounds, ownership.group
        self._ownership = ownership
        self._recorder = recorder
        self._device = ownership.device
        self._schedule = schedule
        self._bounds = bounds
        self._seed: tuple[int, ...] = ()  # of the step and of its micro-batch that runs
        self._step_seed: tuple[int, ...] = ()
        self._recompute = recompute
        self._layers = LayerInterception(chain, self._begin_part, self._recomputed if recompute else None)
        self.stages = [Stage(self._forward, ownership, index, recorder) for index in ownership.stages]
        self._order = (
            TorchSchedules(self.stages, group.process_group, ownership.device, schedule)
            if group.in_batches
            else PassesInOrder(self.stages, ownership.position, ownership.num_ranks, schedule)
        )
        self._kinds: set[Any] = set()
        self._step: Callable[[int], Any] = lambda micro_batch: None
        self._scales: Sequence[float] = ()
        self._micro_batches: list[int] = []
        self._losses: dict[int, Tensor] = {}
        self.order: list[int] = []  # in which the micro-batches of the newest batch have run
        self.uses_layers = False  # whether the losses of the newest batch depend on what the last stage receives

    def train(
        self, step: Callable[[int], Any], kinds: Sequence[Any], scales: Sequence[float], seed: tuple[int, ...]
    ) -> list[Tensor]:
        """Runs all micro-batches forward and backward, and adds to the gradients.

        Args:
            kinds: a hashable value for each micro-batch; equal values mean equal shapes. The same on all stages.
            scales: the factor of each micro-batch's loss before backward. A micro-batch of scale 0 has no gradients,
                also if its loss is NaN.

        Returns:
            On the last stage the unscaled losses of the micro-batches in order, elsewhere an empty list.

        Raises:
            PipelineError: the step cannot be split; or whatever the step raises.
        """
        self._step, self._scales, self._losses, self.uses_layers = step, scales, {}, False
        self._step_seed = seed
        groups = self._groups(kinds)
        self.order = [m for group in groups for m in group]
        with (
            preserved_random_state(self._device),
            self._layers.installed(),
            self._recorder.step(len(kinds), together=len(groups) == 1),
        ):
            for self._micro_batches in groups:
                count = len(self._micro_batches)
                alternates = executed_schedule(self._schedule, self._ownership.num_ranks, count) == "1f1b"
                for stage in self.stages:
                    stage.begin([kinds[m] for m in self._micro_batches], alternates=alternates)
                try:
                    self._order.run(count)
                except RuntimeError as error:
                    if count == 1 or "modified by an inplace operation" not in str(error):
                        raise
                    raise PipelineError(_CHANGED.format(count, error)) from error
                finally:
                    for stage in self.stages:
                        stage.drop()
                for stage in self.stages:
                    stage.end()
                self.uses_layers |= self.stages[-1].needs_input
        self._step = lambda micro_batch: None
        return [self._losses[m] for m in sorted(self._losses)]

    def evaluate(self, step: Callable[[], Any], seed: tuple[int, ...]) -> Any:
        """Runs a step on a whole batch, forward only; returns its output on the last stage, elsewhere None."""
        self._seed = seed
        group, previous, following = self._ownership.group, self._ownership.previous, self._ownership.following
        with preserved_random_state(self._device), self._layers.installed():
            for stage in self.stages:
                receive = functools.partial(group.receive_activations, previous, self._device)
                ended, output = self._layers.run(self._bounds[stage.index], step, None if stage.is_first else receive)
                if not ended:
                    return output
                group.send_activations(Activations.of(output), following)
        return None

    def _groups(self, kinds: Sequence[Any]) -> list[list[int]]:
        """Micro-batches that run together: the first of each new kind runs alone, and its headers are sent ahead.

        Within a schedule, a stage that waits for a header would delay the gradients that the sender waits for.
        """
        groups: list[list[int]] = []
        others: list[int] = []
        for micro_batch, kind in enumerate(kinds):
            if kind in self._kinds:
                others.append(micro_batch)
            else:
                self._kinds.add(kind)
                groups.append([micro_batch])
        return [*groups, others] if others else groups

    def _forward(self, stage: Stage, chunk: int) -> Activations | Tensor:
        """Runs a stage's part of the user's step on a micro-batch, given by its number in the schedule.

        Returns:
            The output of the stage, on the last stage the scaled loss.
        """
        micro_batch = self._micro_batches[chunk]
        self._seed = (*self._step_seed, micro_batch)
        ended, result = self._layers.run(
            self._bounds[stage.index],
            functools.partial(self._step, micro_batch),
            None if stage.is_first else functools.partial(stage.expected, chunk),
            functools.partial(stage.arrived, chunk),
        )
        if ended:
            output = Activations.of(result)
            if self._schedule == "zero_bubble":  # it detaches outputs in place, which views forbid
                output = replace(output, tensors=tuple(t.clone() if t._is_view() else t for t in output.tensors))
            return output
        if not stage.is_last:
            raise PipelineError("training_step returned without running the split part; every step must run it")
        if not (isinstance(result, Tensor) and result.numel() == 1 and result.requires_grad):
            raise PipelineError(
                f"training_step returned {type(result).__name__} as its loss: it must return a tensor of one element "
                "that depends on parameters, for every micro-batch"
            )
        self._losses[micro_batch] = result.detach()
        if self._scales[micro_batch] == 0:  # NaN times 0 would be NaN
            return torch.zeros((), dtype=result.dtype, device=result.device, requires_grad=True)
        return result.reshape(()) * self._scales[micro_batch]

    def _begin_part(self, part: int) -> None:
        set_random_state(seed_of(*self._seed, part), self._device)

    def _recomputed(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The output of a layer of this stage, some of which backward computes again."""
        if index not in self._recompute or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return recomputed(self._ownership.chain.layers[index], forward, args, kwargs)


class LossForms:
    """Remembers from which operations losses were computed.

    A form is the set of pairs of successive operations, with their distances from the loss. Distances of 8 and more
    count as 8, so that loops of varying length make few forms. A loss that lacks operations has no new form.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, str, str]] = set()

    def is_new(self, loss: Tensor) -> bool:
        """Whether the graph of ``loss``, before backward, has a pair of operations that no earlier loss had.

        The first loss has no new one. The graph is followed to the leaves and to the stage's inputs, over at most 2000
        operations.
        """
        found: set[tuple[int, str, str]] = set()
        nodes: list[Any] = [loss.grad_fn]
        seen = set(nodes)
        depth = 0
        while nodes and len(seen) < _MOST_NODES:
            following: list[Any] = []
            for node in nodes:
                name = node.name() if node is not None else ""
                for other, _ in () if node is None else node.next_functions:
                    if other is None:
                        continue
                    found.add((depth, name, other.name()))
                    if other not in seen:
                        seen.add(other)
                        following.append(other)
            nodes, depth = following, min(depth + 1, _DEPTH)
        is_new = bool(self._known) and not found <= self._known
        self._known |= found
        return is_new
