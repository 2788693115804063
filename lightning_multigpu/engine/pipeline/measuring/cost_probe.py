"""Cost probe: measures the parts of a step and the links between ranks, without training.

Each rank measures the layers that it holds, one stage after the other. Each layer runs forward and then backward, on
detached inputs, and its output goes on to the next layer, or to the rank that has the next layer::

    rank 1    step: before -> [0] -> [1] -> end, sends           [ ] forward and backward, timed
    rank 0                                 receives, step: -> [2] -> [3] -> after -> loss
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.metering.clocks import CoreWait, synchronise, timed
from lightning_multigpu.engine.activation_checkpointing import recomputed, safe_inputs
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.parity import without_gradients
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.stages.layer_interception import (
    Activations,
    LayerInterception,
    map_only,
    tensors_of,
)
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup
from lightning_multigpu.engine.step_state import preserved_random_state, seed_of, set_random_state
from lightning_multigpu.engine.tensor_split.parts import local
from lightning_multigpu.engine.training_memory import SavedTensors
from lightning_multigpu.planning.pipelines.stage_costs import PartCost
from lightning_multigpu.planning.scaling.links import Link

_MOST_RUNS = 10
_MESSAGE_BYTES = (4 << 10, 1 << 20)
_ROUND_TRIPS = 8


class CostProbe:
    """Times the parts of a step, stage by stage. Parameters, their gradients and random states are left unchanged.

    Args:
        enough_s: seconds after which no further run begins, if there are ``fewest_runs``.
        agreed: makes one decision of those of ranks whose layers communicate with each other.

    Attributes:
        elsewhere_s: seconds that another stage than the first took before the layers; None if this rank has measured no
            such stage.
    """

    def __init__(
        self,
        ownership: Ownership,
        seed: int,
        recompute: Collection[int] = (),
        *,
        fewest_runs: int = 3,
        enough_s: float = 1.0,
        agreed: Callable[[bool], bool] = lambda is_enough: is_enough,
    ) -> None:
        self._chain = ownership.chain
        self._ownership = ownership
        self._device = ownership.device
        self._seed = seed
        self._recompute = recompute
        self._fewest_runs = fewest_runs
        self._enough_s = enough_s
        self._agreed = agreed
        self._layers = LayerInterception(self._chain, self._begin_part, self._measure_layer)
        self.elsewhere_s: float | None = None
        self._parts: dict[int, list[PartCost]] = {}
        self._is_warm = False
        self._core_wait = CoreWait()
        self._part_start_s = 0.0
        self._saved = SavedTensors(None)

    def measure(self, step: Callable[[], Any]) -> dict[int, PartCost]:
        """The costs of this rank's parts of the step; a collective of the pipeline.

        The fastest time of each part counts, since slower ones show other work of the machine. Time in which other
        threads had the core does not count.

        Args:
            step: runs the user's step on one micro-batch and returns its loss. Each stage of this rank calls it once to
                warm up, unless this probe has measured before, and then up to 10 times.

        Raises:
            PipelineError: the step cannot be split; or whatever the step raises.
        """
        self._parts = {part: costs[:1] for part, costs in self._parts.items()}
        with (
            preserved_random_state(self._device),
            without_gradients(self._ownership.held()),
            self._layers.installed(),
            self._core_wait,
        ):
            for stage in self._ownership.stages:
                self._measure_stage(stage, step)
        self._ownership.finish()
        self._is_warm = True
        return {part: _fastest(costs) for part, costs in self._parts.items()}

    def _measure_stage(self, stage: int, step: Callable[[], Any]) -> None:
        ownership = self._ownership
        bounds = ownership.bounds[stage]

        @functools.cache
        def received() -> Activations:
            return ownership.group.receive_activations(ownership.previous, self._device, gradients=True)

        def receive() -> Activations:
            """Called as the step reaches the layers."""
            if not self._saved.counts:
                self.elsewhere_s = min(self._clock_s(), self.elsewhere_s or math.inf)
            return received()

        held = [*ownership.held(), *ownership.buffers()]
        for run in range(1 if self._is_warm else 0, 1 + _MOST_RUNS):
            if run == 1:
                begin_s = time.perf_counter()
            if run > self._fewest_runs and self._agreed(time.perf_counter() - begin_s > self._enough_s):
                break
            self._saved = SavedTensors(held if run == 0 else None)
            with self._saved.counted():
                ended, result = self._layers.run(bounds, step, None if stage == 0 else receive)
            if ended:
                continue
            if stage < len(ownership.bounds) - 1:
                raise PipelineError("training_step returned without running the split part; every step must run it")
            self._end_part(1 + len(self._chain), [result] if isinstance(result, Tensor) else [], output_bytes=0)
        self._saved = SavedTensors(None)
        if ended:
            ownership.group.send_activations(Activations.of(result), ownership.following)

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
        self._start_clock()
        output = forward(*args, **kwargs)
        self._end_part(1 + index, tensors_of(output), recomputed_bytes=recomputed_bytes)
        if index == len(self._chain) - 1:
            self._saved.part = 2 + index
            output = map_only(Tensor, self._saved.detached_copy, output)
            self._start_clock()
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

    def _start_clock(self) -> None:
        synchronise(self._device)
        # The end reads in reverse order: a wait between the two readings makes the time too long, never too short.
        start_s = time.perf_counter()
        self._part_start_s = start_s - self._core_wait.seconds()

    def _clock_s(self) -> float:
        """Seconds since the clock was started, without time in which other threads had the core."""
        synchronise(self._device)
        waited_s = self._core_wait.seconds()
        return time.perf_counter() - waited_s - self._part_start_s

    def _end_part(
        self, part: int, outputs: Sequence[Tensor], *, output_bytes: int | None = None, recomputed_bytes: int = 0
    ) -> None:
        """Stops the clock of a part's forward pass, times its backward pass, and records the costs."""
        forward_s = self._clock_s()
        outputs = [*map(local, outputs)]
        wanted = [output for output in outputs if output.requires_grad and output.grad_fn is not None]
        gradients = [torch.ones_like(output) for output in wanted]
        backward_s = 0.0
        if wanted:
            self._start_clock()
            torch.autograd.backward(wanted, gradients)
            backward_s = self._clock_s()
        cost = PartCost(
            forward_s,
            backward_s,
            sum(output.nbytes for output in outputs) if output_bytes is None else output_bytes,
            self._saved.size_bytes.get(part, 0),
            self._saved.input_bytes.get(part, 0),
            recomputed_bytes,
        )
        self._parts.setdefault(part, []).append(cost)

    def _begin_part(self, part: int) -> None:
        set_random_state(seed_of(self._seed, part), self._device)
        if part == 0:
            self._start_clock()


def _fastest(costs: Sequence[PartCost]) -> PartCost:
    """The sizes that the warm-up run has counted, and the shortest times of the other runs."""
    warm_up, *timed_runs = costs
    return replace(
        warm_up,
        forward_s=min(cost.forward_s for cost in timed_runs),
        backward_s=min(cost.backward_s for cost in timed_runs),
    )


def slowest_link(group: PipelineGroup) -> Link:
    """The cost of the slowest link between neighbouring ranks, from round trips of 4 KiB and of 1 MiB.

    The fastest of a few round trips counts. A collective of the pipeline; a rank knows only its own links.
    """
    slowest = Link(0.0, 0.0)
    mine, num_ranks = dist.get_rank(group.process_group), group.num_ranks
    for position in range(num_ranks if num_ranks > 2 else 1):
        pair = (position, (position + 1) % num_ranks)
        if mine in pair:
            small_s, large_s = (_one_way_s(group, size, pair) for size in _MESSAGE_BYTES)
            per_byte = max(0.0, (large_s - small_s) / (_MESSAGE_BYTES[1] - _MESSAGE_BYTES[0]))
            found = Link(max(0.0, small_s - per_byte * _MESSAGE_BYTES[0]), per_byte)
            slowest = max(slowest, found, key=lambda link: link.seconds(1 << 20))
    group.finish()
    return slowest


def _one_way_s(group: PipelineGroup, size_bytes: int, pair: tuple[int, int]) -> float:
    is_first = dist.get_rank(group.process_group) == pair[0]
    other = pair[1] if is_first else pair[0]
    message = torch.zeros(size_bytes, dtype=torch.uint8, device=group.device)

    def round_trip() -> None:
        if is_first:
            group.send(message, other)
        group.receive(message, other)
        if not is_first:
            group.send(message, other)
        group.finish()

    return min(timed(round_trip, group.device) for _ in range(_ROUND_TRIPS)) / 2
