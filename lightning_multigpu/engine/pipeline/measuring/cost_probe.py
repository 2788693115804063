"""Measures what each part of a step costs, one stage after the other, while nothing is trained.

Each rank measures the layers that it holds. A layer runs backward as soon as it has run forward, cut off from the
rest by detached inputs, and its output goes on to the next layer, or to the rank that has it::

    rank 1    step: before -> [0] -> [1] -> leaves, sends        [ ] forward and backward, timed
    rank 0                                 receives, step: -> [2] -> [3] -> behind -> loss
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_multigpu.engine.pipeline.errors import PipelineError
from lightning_multigpu.engine.pipeline.measuring.training_memory import SavedTensors
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.stages.layer_interception import Carried, LayerInterception
from lightning_multigpu.engine.pipeline.stages.recompute import recomputed, safe_inputs
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup
from lightning_multigpu.engine.pipeline.stages.step_state import preserved_random_state, seed_of, set_random_state
from lightning_multigpu.planning.stage_costs import LinkCost, PartCost

_FEWEST_RUNS, _MOST_RUNS = 3, 10
_ENOUGH_S = 1.0


class ChainProbe:
    """Runs a step, stage by stage, and times its parts. Parameters, their gradients and random states stay as they are.

    Args:
        chain: all layers.
        bounds: the layers ``[start, stop)`` of each stage at present; the rank at position p of P has p, P + p...
        ownership: what this rank holds.
        line: to the other ranks; None where this rank has all layers.
        device: where this rank computes.
        seed: of the random numbers of the measurement, the same on all ranks.
        recompute: indices of the layers that run again in backward, and are measured so.
    """

    def __init__(
        self,
        chain: Chain,
        bounds: Sequence[tuple[int, int]],
        ownership: Ownership,
        line: PipelineGroup | None,
        device: torch.device,
        seed: int,
        recompute: Collection[int] = (),
    ) -> None:
        self._chain = chain
        self._bounds = bounds
        self._ownership = ownership
        self._line = line
        self._device = device
        self._seed = seed
        self._recompute = recompute
        self._walk = LayerInterception(chain, *bounds[ownership.position], self._begin_part)
        self._parts: dict[int, list[PartCost]] = {}
        self._part_start_s = 0.0
        self._saved = SavedTensors([])

    def measure(self, step: Callable[[], Any]) -> dict[int, PartCost]:
        """The costs of the parts of the step that are this rank's; a collective of the pipeline.

        Args:
            step: runs the user's step on one micro-batch and returns its loss; called once for each stage of this
                rank to warm up, and then 3 times to be timed, or up to 10 times as long as that takes less than a
                second. Of each part the fastest time counts: others are those of a machine that is busy elsewhere.

        Raises:
            PipelineError: the step cannot be split; or whatever the step raises.
        """
        position, num_ranks = self._ownership.position, self._ownership.num_ranks
        with preserved_random_state(self._device), self._kept_gradients(), self._installed(), self._walk.installed():
            for stage in range(position, len(self._bounds), num_ranks):
                self._measure_stage(stage, step, (position - 1) % num_ranks, (position + 1) % num_ranks)
        if self._line is not None:
            self._line.finish()
        gc.collect()  # of what keeps graphs, which keep parameters from being exchanged
        return {part: self._fastest(costs) for part, costs in self._parts.items()}

    def _measure_stage(self, stage: int, step: Callable[[], Any], before: int, behind: int) -> None:
        start, stop = self._bounds[stage]
        self._walk.take(start, stop)
        arrived: list[Carried] = []

        def receive() -> Carried:
            if not arrived:
                assert self._line is not None
                arrived.append(self._line.receive_carried(before, self._device, gradients=True))
            return arrived[0]

        held = [*self._ownership.held(), *self._ownership.buffers()]
        for run in range(1 + _MOST_RUNS):
            if run == 1:
                begin_s = time.perf_counter()
            if run > _FEWEST_RUNS and time.perf_counter() - begin_s > _ENOUGH_S:
                break
            self._saved = SavedTensors(held if run == 0 else None)
            with self._saved.counted():
                left, result = self._walk.run(step, None if start == 0 else receive)
            if left:
                continue
            if not self._walk.is_last:
                raise PipelineError("training_step returned without running the split part; every step must run it")
            self._synchronise()
            forward_s = time.perf_counter() - self._part_start_s
            backward_s = self._backward(result) if isinstance(result, Tensor) else 0.0
            self._note(1 + len(self._chain), forward_s, backward_s, 0)
        self._saved = SavedTensors(None)
        if left:
            assert self._line is not None
            self._line.send_carried(Carried.of(result), behind)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Within the block the layers are called through this probe; a walk is to be installed around it."""
        before = [layer.__dict__.get("forward") for layer in self._chain.layers]
        for index, layer in enumerate(self._chain.layers):
            layer.__dict__["forward"] = functools.partial(self._call, index, layer.forward)
        try:
            yield
        finally:
            for layer, forward in zip(self._chain.layers, before, strict=True):
                if forward is None:
                    del layer.__dict__["forward"]
                else:
                    layer.__dict__["forward"] = forward

    def _call(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if index == 0:
            self._end_before((args, kwargs))
        self._saved.part = 1 + index
        # Copies, so that a layer may work in place, as on anything that is no leaf.
        args, kwargs = tree_map_only(Tensor, self._saved.detached_copy, (args, kwargs))
        again_bytes = self._inside_bytes(index, forward, args, kwargs) if index in self._recompute else 0
        self._synchronise()
        start_s = time.perf_counter()
        output = self._run_layer(index, forward, args, kwargs)
        self._synchronise()
        forward_s = time.perf_counter() - start_s
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self._note(1 + index, forward_s, self._backward(*tensors), _size_bytes(tensors), again_bytes)
        if index < len(self._chain) - 1:
            return output
        self._saved.part = 2 + index
        output = tree_map_only(Tensor, self._saved.detached_copy, output)
        self._synchronise()
        self._part_start_s = time.perf_counter()
        return output

    def _run_layer(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if index not in self._recompute:
            return forward(*args, **kwargs)
        begin = functools.partial(self._begin_part, 1 + index)
        return recomputed(self._chain.layers[index], forward, args, kwargs, begin)

    def _inside_bytes(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> int:
        """What the layer keeps besides its inputs if it does not run again; counted in the run that warms up."""
        if not self._saved.counts:
            return 0
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inside = SavedTensors([*self._ownership.held(), *self._ownership.buffers(), *inputs])
        args, kwargs = safe_inputs(self._chain.layers[index], args, kwargs)
        with inside.counted():
            forward(*args, **kwargs)
        self._begin_part(1 + index)
        return sum(inside.size_bytes.values())

    def _end_before(self, inputs: Any) -> None:
        self._synchronise()
        forward_s = time.perf_counter() - self._part_start_s
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self._note(0, forward_s, self._backward(*tensors), _size_bytes(tensors))

    def _backward(self, *outputs: Tensor) -> float:
        """Seconds that the backward pass from the outputs takes."""
        wanted = [output for output in outputs if output.requires_grad and output.grad_fn is not None]
        if not wanted:
            return 0.0
        gradients = [torch.ones_like(output) for output in wanted]
        self._synchronise()
        start_s = time.perf_counter()
        torch.autograd.backward(wanted, gradients)
        self._synchronise()
        return time.perf_counter() - start_s

    def _note(
        self, part: int, forward_s: float, backward_s: float, output_bytes: int, recomputed_bytes: int = 0
    ) -> None:
        saved_bytes, input_bytes = self._saved.size_bytes.get(part, 0), self._saved.input_bytes.get(part, 0)
        cost = PartCost(forward_s, backward_s, output_bytes, saved_bytes, input_bytes, recomputed_bytes)
        self._parts.setdefault(part, []).append(cost)

    @staticmethod
    def _fastest(costs: Sequence[PartCost]) -> PartCost:
        """Sizes from the run that warms up, in which they are counted; times from the others."""
        warm_up, *timed = costs
        return replace(
            warm_up,
            forward_s=min(cost.forward_s for cost in timed),
            backward_s=min(cost.backward_s for cost in timed),
        )

    def _begin_part(self, part: int) -> None:
        set_random_state(seed_of(self._seed, part), self._device)
        if part == 0:
            self._synchronise()
            self._part_start_s = time.perf_counter()

    @contextmanager
    def _kept_gradients(self) -> Iterator[None]:
        held: list[Parameter] = self._ownership.held()
        gradients = [parameter.grad for parameter in held]
        for parameter in held:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(held, gradients, strict=True):
                parameter.grad = gradient

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _size_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


_PROBE_BYTES = (4 << 10, 1 << 20)
_ROUND_TRIPS = 8


def slowest_link(line: PipelineGroup) -> LinkCost:
    """The slowest link between neighbouring ranks, from the fastest of a few round trips of 4 KiB and of 1 MiB.

    A collective of the pipeline; a rank without a link to the slowest pair knows of its own only.
    """
    slowest = LinkCost(0.0, 0.0)
    mine, num_ranks = dist.get_rank(line.group), line.num_ranks
    for position in range(num_ranks if num_ranks > 2 else 1):
        pair = (position, (position + 1) % num_ranks)
        if mine in pair:
            small_s, large_s = (_one_way_s(line, size, pair) for size in _PROBE_BYTES)
            per_byte = max(0.0, (large_s - small_s) / (_PROBE_BYTES[1] - _PROBE_BYTES[0]))
            found = LinkCost(max(0.0, small_s - per_byte * _PROBE_BYTES[0]), per_byte)
            slowest = max(slowest, found, key=lambda link: link.seconds(1 << 20))
    line.finish()
    return slowest


def _one_way_s(line: PipelineGroup, size_bytes: int, pair: tuple[int, int]) -> float:
    first = dist.get_rank(line.group) == pair[0]
    other = pair[1] if first else pair[0]
    message = torch.zeros(size_bytes, dtype=torch.uint8, device=line.device)
    seconds = []
    for _ in range(_ROUND_TRIPS):
        start_s = time.perf_counter()
        if first:
            line.send(message, other)
            line.receive(message, other)
        else:
            line.receive(message, other)
            line.send(message, other)
        line.finish()
        if line.device.type == "cuda":
            torch.cuda.synchronize(line.device)
        seconds.append((time.perf_counter() - start_s) / 2)
    return min(seconds)
