"""Pipeline runner: runs a user's step in micro-batches by a schedule, or on a whole batch forward only.

Over Gloo the passes of a rank's stages run one by one in the schedule's order, over NCCL by torch's schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn import Module

from lightning_multigpu._torch_compat import make_schedule, step_without_outputs
from lightning_multigpu.engine.activation_checkpointing import recomputed
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.measuring.recorder import Recorder
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.stages.layer_interception import Activations, LayerInterception
from lightning_multigpu.engine.pipeline.stages.stage import Stage
from lightning_multigpu.engine.step_state import preserved_random_state, seed_of, set_random_state
from lightning_multigpu.planning.pipelines.schedule_order import (
    ExecutedSchedule,
    ScheduleName,
    executed_schedule,
    schedule_orders,
)

_CHANGED = (
    "a tensor that the backward pass of a micro-batch needs is changed in place by the step, as where it limits or "
    "normalises weights under torch.no_grad(), and {} micro-batches are under way together. Make the change in "
    "on_train_batch_start, which comes once a batch, or pass num_micro_batches=1 ({})"
)
_TORCH: dict[ExecutedSchedule, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "breadth_first": ScheduleLoopedBFS,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


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
        self._layers = LayerInterception(
            chain,
            lambda part: set_random_state(seed_of(*self._seed, part), self._device),
            self._recomputed if recompute else None,
        )
        self.stages = [Stage(self._forward, ownership, index, recorder) for index in ownership.stages]
        # NCCL needs messages in batches, as torch posts them: else two ranks that send to each other both wait.
        torchs = TorchSchedules(self.stages, group.process_group, ownership.device) if group.in_batches else None
        self._run = self._run_in_order if torchs is None else torchs.run
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
                executed = executed_schedule(self._schedule, self._ownership.num_ranks, count)
                for stage in self.stages:
                    stage.begin([kinds[m] for m in self._micro_batches], alternates=executed == "1f1b")
                try:
                    self._run(executed, count)
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

    def _run_in_order(self, executed: ExecutedSchedule, num_micro_batches: int) -> None:
        """Runs one pass after the other; the stages post their messages, and wait only for what they use.

        The receives of the next pass are posted before a pass begins, so that data arrives during the pass.
        """
        ownership, stages = self._ownership, {stage.index: stage for stage in self.stages}
        orders = schedule_orders(self._schedule, ownership.num_ranks, len(stages), num_micro_batches)
        order = orders[ownership.position]
        for work, following in zip(order, [*order[1:], None], strict=True):
            stage, micro_batch = stages[work.stage], work.micro_batch
            stage.expect(work.kind, micro_batch)
            if following is not None:
                stages[following.stage].expect(following.kind, following.micro_batch, ahead=True)
            if work.kind == "forward":
                stage.forward(micro_batch)
            elif work.kind == "backward":
                stage.backward(micro_batch, full=executed != "zero_bubble")
            else:
                stage.weight(micro_batch)

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

    def _recomputed(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The output of a layer of this stage, some of which backward computes again."""
        if index not in self._recompute or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return recomputed(self._ownership.chain.layers[index], forward, args, kwargs)


class TorchSchedules:
    """torch's own schedules, which post messages in batches and wait for them, as NCCL needs."""

    def __init__(self, stages: Sequence[Stage], group: dist.ProcessGroup, device: torch.device) -> None:
        self._stages = [_StageForTorch(stage, group, device) for stage in stages]
        self._made: dict[tuple[Any, int], Any] = {}

    def run(self, executed: ExecutedSchedule, num_micro_batches: int) -> None:
        """Runs a step of so many micro-batches, which the stages have begun."""
        cls = _TORCH[executed]
        key = cls, num_micro_batches
        if key not in self._made:
            stages: Any = self._stages[0] if cls in (ScheduleGPipe, Schedule1F1B) else self._stages
            self._made[key] = make_schedule(
                cls,
                stages,
                num_micro_batches,
                num_stages=self._stages[0].num_stages,
                loss_fn=lambda loss, target: loss,
                scale_grads=False,
            )
        target = torch.arange(num_micro_batches) if any(stage.is_last for stage in self._stages) else None
        step_without_outputs(self._made[key], target)


class _StageForTorch(_PipelineStageBase):
    """A stage with the interface of torch's stages, for torch's schedules.

    torch's own stage needs the shapes beforehand, or runs stage and loss once more on uninitialised data to find them.
    That would count batches in BatchNorm and in metrics, and draw random numbers.

    The overridden methods of torch are private: ``tests/engine/pipeline/test_runner.py`` names those that have
    moved.
    """

    def __init__(self, stage: Stage, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(Module(), stage.index, stage.num_stages, device, group)
        self._stage = stage

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())  # torch receives nothing by itself

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None: ...

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._stage.expect("forward", fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._stage.outgoing("forward", fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._stage.expect("backward", bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._stage.outgoing("backward", bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        output = self._stage.forward(fwd_chunk_id)
        return output.detach() if isinstance(output, Tensor) else output.tensors

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._stage.backward(bwd_chunk_id, full=full_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._stage.weight(bwd_chunk_id)
