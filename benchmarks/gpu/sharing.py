"""The first question to a card: whether NCCL lets ranks share it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.gpu.card import Card
from tests.world import World, rank, world_size

_MOST_RANKS = 4
_LIMIT_S = 45.0  # with the start of CUDA in each rank


def tried(card: Card) -> tuple[Card, str]:
    """The card, with Gloo between ranks that share a GPU if NCCL refuses them; and what it said.

    A version that says that it can share may refuse all the same: on another driver, or in a container.
    """
    if not card.is_gpu or card.backend != "nccl" or card.count >= _MOST_RANKS:
        return card, ""
    world = World(card.count + 1, may_leak=True)
    try:
        world.run(_collectives, card, timeout_s=_LIMIT_S)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return replace(card, backend="gloo"), f"{type(error).__name__}: {' '.join(lines[:2])[:400]}"
    finally:
        world.close()
    return card, ""


def _collectives(card: Card) -> None:
    """What every strategy needs: an all-reduce, a group split off the world, and messages between two ranks."""
    device, ranks = card.device(rank()), list(range(world_size()))
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", rank=rank(), world_size=world_size(), timeout=timedelta(seconds=_LIMIT_S), device_id=device
    )
    for group in (dist.group.WORLD, dist.new_group(ranks)):
        total = torch.ones(1 << 20, dtype=torch.float64, device=device)
        dist.all_reduce(total, op=dist.ReduceOp.AVG, group=group)
        assert bool((total == 1).all()), total
    message = torch.full((1 << 20,), float(rank()), device=device)
    if rank() == 0:
        dist.send(message, 1)
    elif rank() == 1:
        dist.recv(message, 0)
        assert bool((message == 0).all()), message
    torch.cuda.synchronize()
