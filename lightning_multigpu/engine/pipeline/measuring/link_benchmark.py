"""Measures what a message between neighbouring ranks of a pipeline costs."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lightning_multigpu.engine.pipeline.stages.transfer import PipelineGroup
from lightning_multigpu.planning.stage_costs import LinkCost

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
