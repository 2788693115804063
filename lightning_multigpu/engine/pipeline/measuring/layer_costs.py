"""Layer costs: time and memory of each part of a step, measured on the ranks that hold the layers, without training.

Each layer runs forward and then backward, on detached inputs, and its output goes on to the next layer, or to the rank
that has the next layer. One rank measures at a time::

    rank 1    step: before -> [0] -> [1] -> end, sends           [ ] forward and backward, timed
    rank 0                                 receives, step: -> [2] -> [3] -> after -> loss
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_multigpu.communication.metering.clocks import Clock, clock_of
from lightning_multigpu.engine.activation_checkpointing import recomputed, safe_inputs
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.stages.layer_interception import (
    Activations,
    LayerInterception,
    map_only,
    tensors_of,
)
from lightning_multigpu.engine.step_state import (
    preserved_random_state,
    seed_of,
    set_random_state,
    without_gradients,
)
from lightning_multigpu.engine.tensor_split.parts import local
from lightning_multigpu.engine.training_memory import SavedTensors
from lightning_multigpu.planning.pipelines.stage_costs import PartCost

_RUNS = 4
"""Timed runs of each stage, after one that warms up and counts bytes; the fastest time of each part counts."""


def layer_costs(
    ownership: Ownership, step: Callable[[], Any], seed: int, recompute: Collection[int] = ()
) -> dict[int, PartCost]:
    """The costs of this rank's parts of the step; a collective of the pipeline.

    Parameters, their gradients and random states are left unchanged.

    Args:
        step: runs the user's step on one micro-batch and returns its loss; each stage of this rank calls it 5 times.
        recompute: layers whose backward computes them again.

    Raises:
        PipelineError: the step cannot be split; or whatever the step raises.
    """
    return _Measurement(ownership, seed, recompute).run(step)


class _Measurement:
    def __init__(self, ownership: Ownership, seed: int, recompute: Collection[int]) -> None:
        self._chain, self._ownership, self._device = ownership.chain, ownership, ownership.device
        self._seed, self._recompute = seed, recompute
        self._layers = LayerInterception(self._chain, self._begin_part, self._measure_layer)
        self._clock: Clock = clock_of(self._device)
        self._start: Any = None
        self._parts: dict[int, PartCost] = {}
        self._saved = SavedTensors(None)

    def run(self, step: Callable[[], Any]) -> dict[int, PartCost]:
        ownership = self._ownership
        held = [*ownership.held(), *ownership.buffers()]
        with preserved_random_state(self._device), without_gradients(ownership.held()), self._layers.installed():
            for stage in ownership.stages:
                bounds, ended, result = ownership.bounds[stage], False, None
                receive = None if stage == 0 else self._received_once()
                for run in range(1 + _RUNS):
                    self._saved = SavedTensors(None if run else held)
                    with self._saved.counted():
                        ended, result = self._layers.run(bounds, step, receive)
                    if ended:
                        continue
                    if stage < len(ownership.bounds) - 1:
                        raise PipelineError(
                            "training_step returned without running the split part; every step must run it"
                        )
                    self._end_part(1 + len(self._chain), [result] if isinstance(result, Tensor) else [], sends=False)
                self._saved = SavedTensors(None)
                if ended:
                    ownership.group.send_activations(Activations.of(result), ownership.following)
        ownership.finish()
        return self._parts

    def _received_once(self) -> Callable[[], Activations]:
        group, previous = self._ownership.group, self._ownership.previous
        return functools.cache(lambda: group.receive_activations(previous, self._device, gradients=True))

    def _measure_layer(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if index == 0:
            self._end_part(0, tensors_of((args, kwargs)))
        self._saved.part = 1 + index
        # Copies, so that a layer may work in place, which autograd forbids on leaves.
        args, kwargs = map_only(Tensor, self._saved.detached_copy, (args, kwargs))
        recomputed_bytes = 0
        if index in self._recompute:
            recomputed_bytes = self._inner_bytes(index, forward, args, kwargs)
            forward = functools.partial(recomputed, self._chain.layers[index], forward, args, kwargs)
            args, kwargs = (), {}
        self._start = self._clock.mark()
        output = forward(*args, **kwargs)
        self._end_part(1 + index, tensors_of(output), recomputed_bytes=recomputed_bytes)
        if index == len(self._chain) - 1:
            self._saved.part = 2 + index
            output = map_only(Tensor, self._saved.detached_copy, output)
            self._start = self._clock.mark()
        return output

    def _inner_bytes(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> int:
        """Bytes that a recomputed layer saves, without its inputs, when it runs again; counted in the warm-up run."""
        if not self._saved.counts:
            return 0
        inner = SavedTensors([*self._ownership.held(), *self._ownership.buffers(), *tensors_of((args, kwargs))])
        args, kwargs = safe_inputs(self._chain.layers[index], args, kwargs)
        with inner.counted():
            forward(*args, **kwargs)
        self._begin_part(1 + index)
        return sum(inner.size_bytes.values())

    def _end_part(self, part: int, outputs: Sequence[Tensor], *, sends: bool = True, recomputed_bytes: int = 0) -> None:
        """Stops the clock of a part's forward pass, times its backward pass, and notes the costs."""
        forward_s = self._since(self._start)
        outputs = [*map(local, outputs)]
        wanted = [output for output in outputs if output.requires_grad and output.grad_fn is not None]
        gradients = [torch.ones_like(output) for output in wanted]
        backward_s = 0.0
        if wanted:
            start = self._clock.mark()
            torch.autograd.backward(wanted, gradients)
            backward_s = self._since(start)
        if self._saved.counts:
            self._parts[part] = PartCost(
                float("inf"),
                float("inf"),
                sum(output.nbytes for output in outputs) if sends else 0,
                self._saved.size_bytes.get(part, 0),
                self._saved.input_bytes.get(part, 0),
                recomputed_bytes,
            )
        else:
            before = self._parts[part]
            fastest = min(before.forward_s, forward_s), min(before.backward_s, backward_s)
            self._parts[part] = replace(before, forward_s=fastest[0], backward_s=fastest[1])

    def _since(self, start: Any) -> float:
        end = self._clock.mark()
        self._clock.wait(end)
        return self._clock.seconds(start, end)

    def _begin_part(self, part: int) -> None:
        set_random_state(seed_of(self._seed, part), self._device)
        if part == 0:
            self._start = self._clock.mark()
