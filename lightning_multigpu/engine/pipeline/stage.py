"""One stage as torch's schedules see it.

torch's own stage wants to know the shapes beforehand, or finds them out by running stage and loss once more on
uninitialised data - which would count batches in BatchNorm and in metrics, and draw random numbers. This one learns
the shapes of each kind of micro-batch from a header that travels ahead of its first tensors, so that micro-batches
of different sizes and a smaller last batch need nothing further.

Everything with a leading underscore here is torch's: ``tests/engine/pipeline/test_stage.py`` names what has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn import Module, Parameter

from lightning_multigpu.communication.meter import Meter
from lightning_multigpu.communication.records import Transfer
from lightning_multigpu.engine.pipeline.recorder import Recorder
from lightning_multigpu.engine.pipeline.transfer import Header, Line
from lightning_multigpu.engine.pipeline.walk import Carried


class StageModule(Module):
    """Calls ``run(received, micro_batch)`` and shows torch the stage's parameters."""

    def __init__(
        self, run: Callable[[tuple[Tensor, ...], int], Any], parameters: Callable[[], list[Parameter]]
    ) -> None:
        super().__init__()
        self._run = run
        self._held = parameters

    def forward(self, *received: Tensor, micro_batch: Tensor) -> Any:
        return self._run(received, int(micro_batch))

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        return iter(self._held())


class Stage(_PipelineStageBase):
    """A stage whose inputs and outputs may have another shape in every micro-batch.

    Args:
        run: computes a micro-batch from what was received: gives the output's tensors, on the last stage the loss.
        parameters: those that the stage holds.
        index: of the stage.
        num_stages: of the pipeline.
        line: to the other ranks.
        device: where the stage computes.
        meter: told of activations and gradients, as group "pipeline".
        recorder: told of what the stage does.
    """

    def __init__(
        self,
        run: Callable[[tuple[Tensor, ...], int], Any],
        parameters: Callable[[], list[Parameter]],
        index: int,
        num_stages: int,
        line: Line,
        device: torch.device,
        meter: Meter,
        recorder: Recorder,
    ) -> None:
        super().__init__(StageModule(run, parameters), index, num_stages, device, line.group)
        self._runtime_validate = False
        self._line = line
        self._meter = meter
        self._recorder = recorder
        self._keys: list[Any] = []
        self._headers_in: dict[Any, Header] = {}
        self._headers_out: dict[Any, Header] = {}
        self._received: dict[int, tuple[Tensor, ...]] = {}
        self._structures: dict[int, Any] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._transfers: list[Transfer] = []
        self._without_gradient: set[int] = set()
        self.error: Exception | None = None

    def begin(self, keys: list[Any]) -> None:
        """Starts a step; ``keys`` tell the kinds of its micro-batches apart: equal keys, equal shapes."""
        self._keys = keys
        self.chunks = len(keys)
        self._received.clear()
        self._structures.clear()
        self._gradients.clear()
        self._without_gradient.clear()
        self.error = None

    def end(self) -> None:
        """Ends a step."""
        self._settle()
        self._line.finish()

    def sends(self, carried: Carried, micro_batch: int) -> None:
        """Notes the containers of the output, which torch's schedules do not carry."""
        self._structures[micro_batch] = carried.structure

    def structure_received(self, micro_batch: int) -> Any:
        """The containers that what was received belongs in."""
        return self._headers_in[self._keys[micro_batch]].structure

    # What torch's schedules call

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False
    ) -> None:
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        self.act_send_info = {}

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        self._recorder.enter("receive", self.stage_index, fwd_chunk_id)
        key = self._keys[fwd_chunk_id]
        if key not in self._headers_in:
            self._headers_in[key] = self._line.receive_object(self._position(self.stage_index - 1))
        buffers = [
            torch.empty(shape, dtype=dtype, device=self._line.device)
            for shape, dtype, _ in self._headers_in[key].tensors
        ]
        self._received[fwd_chunk_id] = tuple(buffers)
        return self._ops(dist.irecv, buffers, self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        self._recorder.enter("send", self.stage_index, fwd_chunk_id)
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        header = Header.of(Carried(self._structures[fwd_chunk_id], outputs))
        key = self._keys[fwd_chunk_id]
        if key not in self._headers_out:
            self._headers_out[key] = header
            self._line.send_object(header, self._position(self.stage_index + 1))
        elif self._headers_out[key] != header:
            raise ValueError(
                f"stage {self.stage_index} hands on {header.tensors}, and for an earlier micro-batch of the same "
                f"shapes {self._headers_out[key].tensors}: shapes that depend on values cannot be pipelined"
            )
        return self._ops(dist.isend, [output.detach().contiguous() for output in outputs], self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last:
            return []
        self._recorder.enter("receive", self.stage_index, bwd_chunk_id)
        outputs, _ = self.fwd_cache[bwd_chunk_id]
        gradients = [self._buffer_like(output) if output.requires_grad else None for output in outputs]
        self._gradients[bwd_chunk_id] = gradients
        return self._ops(dist.irecv, [g for g in gradients if g is not None], self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_first:
            return []
        self._recorder.enter("send", self.stage_index, bwd_chunk_id)
        computed = self.bwd_cache.pop(bwd_chunk_id)
        received = self._received.pop(bwd_chunk_id)
        # A tensor that a layer hands on as it got it is detached by now, and no longer says that it needs a gradient.
        header = self._headers_in[self._keys[bwd_chunk_id]]
        gradients = [
            torch.zeros_like(tensor) if gradient is None else gradient.contiguous()
            for tensor, gradient, (_, _, requires_grad) in zip(received, computed, header.tensors, strict=True)
            if requires_grad
        ]
        return self._ops(dist.isend, gradients, self.stage_index - 1)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        header = self._headers_in[self._keys[fwd_chunk_id]]
        received = tuple(tensor.to(self.device) for tensor in self._received[fwd_chunk_id])
        self._received[fwd_chunk_id] = received
        for tensor, (_, _, requires_grad) in zip(received, header.tensors, strict=True):
            tensor.requires_grad_(requires_grad and self.has_backward)
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else g.to(self.device) for g in self._gradients.pop(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        self._recorder.enter("forward", self.stage_index, fwd_chunk_id, received=not self.is_first)
        try:
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            self._keep(error)
            raise
        self._recorder.enter("idle", self.stage_index, fwd_chunk_id)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._settle()
        received = self._received.get(bwd_chunk_id, ())
        outputs, _ = self.fwd_cache[bwd_chunk_id]
        if not self.is_last and not any(output.requires_grad for output in outputs):
            self.fwd_cache.pop(bwd_chunk_id)
            self._without_gradient.add(bwd_chunk_id)
            self.bwd_cache[bwd_chunk_id] = (None,) * len(received)
            self._recorder.enter("idle", self.stage_index, bwd_chunk_id)
            return
        self._recorder.enter("backward", self.stage_index, bwd_chunk_id, received=not self.is_last)
        self._stage_meta.inputs = (None,) * len(received)  # type: ignore[assignment]  # only its length is used
        try:
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            self._keep(error)
            raise
        self._recorder.enter("idle", self.stage_index, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._settle()
        if bwd_chunk_id in self._without_gradient:
            return
        self._recorder.enter("weight", self.stage_index, bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._recorder.enter("idle", self.stage_index, bwd_chunk_id)

    def _keep(self, error: RuntimeError) -> None:
        """torch wraps what the user's code raises; the user shall see it as it was."""
        if isinstance(error.__cause__, Exception):
            self.error = self.error or error.__cause__

    def _buffer_like(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._line.device)

    def _ops(self, operation: Any, tensors: list[Tensor], stage: int) -> list[dist.P2POp]:
        """Of tensors where the line wants them: with a back end that knows no GPUs, in the host's memory."""
        receives = operation is dist.irecv
        tensors = [tensor.to(self._line.device) for tensor in tensors]
        for tensor in tensors:
            self._transfers.append(
                self._meter.begin(
                    "recv" if receives else "send",
                    group="pipeline",
                    group_size=self._line.num_ranks,
                    size_bytes=tensor.numel() * tensor.element_size(),
                    blocking=receives,
                    awaited=receives,
                )
            )
        return [
            dist.P2POp(operation, tensor, self._line.ranks[self._position(stage)], self.group) for tensor in tensors
        ]

    def _position(self, stage: int) -> int:
        """Of the rank that has a stage."""
        return stage % self._line.num_ranks

    def _settle(self) -> None:
        """Ends the clocks of transfers: schedules wait for what is received before they compute."""
        for transfer in self._transfers:
            transfer.finish()
        self._transfers.clear()
