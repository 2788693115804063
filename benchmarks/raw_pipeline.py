"""torch's own pipeline schedules in a loop by hand, without a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn import functional as F

from lightning_multigpu.bench.strategies.models import BenchGPT

_CPU = torch.device("cpu")
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def stages_per_rank(schedule: str) -> int:
    return 2 if schedule in ("interleaved", "zero_bubble") else 1


class RawPipeline:
    """One rank of a pipeline; the rank at position p of P has the stages p, P + p...

    Args:
        group: the ranks in the order of their positions.
        schedule: a name of :data:`SCHEDULES`.
        num_micro_batches: M.
        modules: of this rank's stages.
        loss_fn: of the last stage's output and the micro-batch's target.
        device: of the stages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        schedule: str,
        num_micro_batches: int,
        modules: Sequence[nn.Module],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        device: torch.device = _CPU,
    ) -> None:
        self.position, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        num_stages = num_ranks * len(modules)
        stages = [
            PipelineStage(module, self.position + index * num_ranks, num_stages, device, group=group)
            for index, module in enumerate(modules)
        ]
        self._has_last = stages[-1].is_last
        given: Any = stages if len(stages) > 1 else stages[0]
        self.schedule = SCHEDULES[schedule](given, num_micro_batches, loss_fn=loss_fn)

    def step(self, batch: Tensor, target: Tensor) -> list[Tensor]:
        """Forward and backward of a batch; the losses of its micro-batches, on the last stage."""
        losses: list[Tensor] = []
        inputs = (batch,) if self.position == 0 else ()
        self.schedule.step(
            *inputs,
            target=target if self._has_last else None,
            losses=losses if self._has_last else None,
            return_outputs=False,
        )
        return losses


class GPTStage(nn.Module):
    """Layers ``[start, stop)`` of a :class:`BenchGPT`; the first stage embeds, the last one has the head.

    Bytes (batch, 65) or features (batch, 64, width) to features or logits (batch, 64, 256).
    """

    def __init__(self, model: BenchGPT, start: int, stop: int) -> None:
        super().__init__()
        layers = list(model.blocks.layers)
        self.context = model.context
        self.bytes, self.positions = (model.bytes, model.positions) if start == 0 else (None, None)
        self.layers = nn.ModuleList(layers[start:stop])
        self.head = model.head if stop == len(layers) else None

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(self.context, device=x.device)
        if self.bytes is not None and self.positions is not None:
            x = self.bytes(x[:, :-1]) + self.positions(torch.arange(self.context, device=x.device))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return x if self.head is None else self.head(x)


def gpt_stages(model: BenchGPT, schedule: str, position: int, num_ranks: int) -> list[GPTStage]:
    """This rank's stages, of equal numbers of layers."""
    num_stages = num_ranks * stages_per_rank(schedule)
    size = len(model.blocks.layers) // num_stages
    return [GPTStage(model, s * size, (s + 1) * size) for s in range(position, num_stages, num_ranks)]


def gpt_loss(logits: Tensor, text: Tensor) -> Tensor:
    """As in :meth:`BenchGPT.training_step`."""
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
