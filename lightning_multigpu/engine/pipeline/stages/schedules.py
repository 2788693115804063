"""Schedules: run the passes of a rank's stages in the schedule's order, either one by one or by torch's schedules."""

from __future__ import annotations

from collections.abc import Sequence
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
from lightning_multigpu.engine.pipeline.stages.stage import Stage
from lightning_multigpu.planning.pipelines.schedule_order import ExecutedSchedule, executed_schedule, schedule_orders

_TORCH: dict[ExecutedSchedule, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "breadth_first": ScheduleLoopedBFS,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


class PassesInOrder:
    """Runs one pass after the other, for stages that post their messages themselves and wait only for what they use.

    The receives of the next pass are posted before a pass begins, so that data arrives during the pass.
    """

    def __init__(self, stages: Sequence[Stage], position: int, num_ranks: int, schedule: str) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._position = position
        self._num_ranks = num_ranks
        self._schedule = schedule

    def run(self, num_micro_batches: int) -> None:
        """Runs a step of so many micro-batches, which the stages have begun."""
        order = schedule_orders(self._schedule, self._num_ranks, len(self._stages), num_micro_batches)[self._position]
        apart = any(work.kind == "weight" for work in order)
        for work, following in zip(order, [*order[1:], None], strict=True):
            stage, micro_batch = self._stages[work.stage], work.micro_batch
            stage.expect(work.kind, micro_batch)
            if following is not None:
                self._stages[following.stage].expect(following.kind, following.micro_batch, ahead=True)
            if work.kind == "forward":
                stage.forward(micro_batch)
            elif work.kind == "backward":
                stage.backward(micro_batch, full=not apart)
            else:
                stage.weight(micro_batch)


class TorchSchedules:
    """torch's own schedules, which post messages in batches and wait for them, as NCCL needs.

    Otherwise two ranks that send to each other would both wait.
    """

    def __init__(self, stages: Sequence[Stage], group: dist.ProcessGroup, device: torch.device, schedule: str) -> None:
        self._stages = [_StageForTorch(stage, group, device) for stage in stages]
        self._num_ranks = dist.get_world_size(group)
        self._schedule = schedule
        self._made: dict[tuple[Any, int], Any] = {}

    def run(self, num_micro_batches: int) -> None:
        """Runs a step of so many micro-batches, which the stages have begun."""
        cls = _TORCH[executed_schedule(self._schedule, self._num_ranks, num_micro_batches)]
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

    The overridden methods of torch are private: ``tests/engine/pipeline/test_schedules.py`` names those that have
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
