"""Runs a user's step through a pipeline: micro-batches by one of torch's schedules, or a whole batch forward only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn import Parameter

from lightning_multigpu.communication.meter import Meter
from lightning_multigpu.engine.pipeline.chain import Chain
from lightning_multigpu.engine.pipeline.errors import PipelineError
from lightning_multigpu.engine.pipeline.random_state import kept_random_state, seed_of, set_random_state
from lightning_multigpu.engine.pipeline.stage import Stage
from lightning_multigpu.engine.pipeline.transfer import Line
from lightning_multigpu.engine.pipeline.walk import Carried, ChainWalk

ScheduleName = Literal["gpipe", "1f1b"]
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b")


class PipelineRunner:
    """One stage of a pipeline.

    ::

        gpipe, P = 2, M = 3          1f1b
        stage 0  F0 F1 F2 .. B0 B1 B2     F0 F1 .. B0 F2 B1 .. B2
        stage 1  .. F0 F1 F2 B0 B1 B2 ..  .. F0 B0 F1 B1 F2 B2 ..

    Args:
        chain: all layers.
        bounds: the layers ``[start, stop)`` of each stage.
        stage: the index of this one.
        line: to the other stages.
        device: where this stage computes.
        meter: told of what travels.
        schedule: the order of the micro-batches' forward and backward passes. With fewer micro-batches than stages
            1f1b has no steady phase, and gpipe, which then is the same, runs in its place.
        parameters: gives those that this stage holds.
    """

    def __init__(
        self,
        chain: Chain,
        bounds: Sequence[tuple[int, int]],
        stage: int,
        line: Line,
        device: torch.device,
        meter: Meter,
        *,
        schedule: ScheduleName,
        parameters: Callable[[], list[Parameter]],
    ) -> None:
        self.line = line
        self._device = device
        self._schedule = schedule
        self._seed: tuple[int, ...] = ()
        start, stop = bounds[stage]
        self._walk = ChainWalk(chain, start, stop, self._begin_part)
        self._stage = Stage(self._compute, parameters, stage, line, device, meter)
        self._clones_input = any(getattr(part, "inplace", False) for part in chain.layers[start].modules())
        self._kinds: set[Any] = set()
        self._step: Callable[[int], Any] = lambda micro_batch: None
        self._scales: Sequence[float] = ()
        self._chunks: dict[int, int] = {}
        self._losses: dict[int, Tensor] = {}

    @property
    def is_first(self) -> bool:
        return bool(self._stage.is_first)

    @property
    def is_last(self) -> bool:
        return bool(self._stage.is_last)

    def train(
        self, step: Callable[[int], Any], kinds: Sequence[Any], scales: Sequence[float], seed: tuple[int, ...]
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches; gradients are added to those that are there.

        Args:
            step: runs the user's step on micro-batch m and returns its loss.
            kinds: of each micro-batch, something hashable: equal kinds have equal shapes. The same on all stages.
            scales: what each micro-batch's loss is multiplied by before its backward.
            seed: of the step; the same on all stages, different for every step.

        Returns:
            On the last stage the unscaled losses of the micro-batches in order, else nothing.

        Raises:
            PipelineError: the step cannot be split; or whatever the step raises.
        """
        self._step, self._scales, self._losses = step, scales, {}
        with kept_random_state(self._device), self._walk.installed():
            for group in self._groups(kinds):
                self._run_group(group, [kinds[m] for m in group], seed)
        self._step = lambda micro_batch: None
        return [self._losses[m] for m in sorted(self._losses)]

    def evaluate(self, step: Callable[[], Any], seed: tuple[int, ...]) -> tuple[bool, Any]:
        """Runs a step on a whole batch, forward only.

        Returns:
            Whether the rest of the step runs on later stages; if not, what the step returned.
        """
        self._seed = seed
        index = self._stage.stage_index
        receive = None if self.is_first else lambda: self.line.receive_carried(index - 1, self._device)
        with kept_random_state(self._device), self._walk.installed():
            left, output = self._walk.run(step, receive)
        if left:
            self.line.send_carried(Carried.of(output), index + 1)
        return left, output

    def _groups(self, kinds: Sequence[Any]) -> list[list[int]]:
        """Micro-batches that run together: the first ones of a new kind go alone, their headers travel ahead.

        In a running schedule a stage that waits for a header would keep back the gradients that the sender waits for.
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

    def _run_group(self, micro_batches: list[int], kinds: list[Any], seed: tuple[int, ...]) -> None:
        count = len(micro_batches)
        self._seed = seed
        self._chunks = {micro_batch: chunk for chunk, micro_batch in enumerate(micro_batches)}
        self._stage.begin(kinds)
        one_forward_one_backward = self._schedule == "1f1b" and count >= self._stage.num_stages
        cls = Schedule1F1B if one_forward_one_backward else ScheduleGPipe
        schedule = cls(self._stage, count, loss_fn=_loss_itself, scale_grads=False)
        indices = torch.tensor(micro_batches)
        try:
            schedule.step(micro_batch=indices, target=indices if self.is_last else None, return_outputs=False)
        except RuntimeError:
            if self._stage.error is not None:
                raise self._stage.error from None
            raise
        finally:
            self._stage.clear_runtime_states()
        self._stage.end()

    def _compute(self, received: tuple[Tensor, ...], micro_batch: int) -> Any:
        """The stage's forward pass: the tensors of its output, on the last stage the scaled loss."""
        step_seed, self._seed = self._seed, (*self._seed, micro_batch)
        chunk = self._chunks[micro_batch]
        receive = None
        if not self.is_first:
            inputs = tuple(tensor.clone() for tensor in received) if self._clones_input else received
            receive = lambda: Carried(self._stage.structure_received(chunk), inputs)  # noqa: E731
        try:
            left, result = self._walk.run(lambda: self._step(micro_batch), receive)
        finally:
            self._seed = step_seed
        if left:
            carried = Carried.of(result)
            self._stage.sends(carried, chunk)
            return carried.tensors
        if not self.is_last:
            raise PipelineError("training_step returned without running the split part; every step must run it")
        if not (isinstance(result, Tensor) and result.numel() == 1 and result.requires_grad):
            raise PipelineError(
                f"training_step returned {type(result).__name__} as its loss: it must return a tensor of one element "
                "that depends on parameters, for every micro-batch"
            )
        self._losses[micro_batch] = result.detach()
        return result.reshape(()) * self._scales[micro_batch]

    def _begin_part(self, part: int) -> None:
        set_random_state(seed_of(*self._seed, part), self._device)


def _loss_itself(output: Tensor, target: Tensor) -> Tensor:
    return output
