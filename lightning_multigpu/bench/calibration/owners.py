"""The transfers between the owners of parts, as ``ddp_sharded`` makes them, for the bench of collectives."""

from __future__ import annotations

import torch.distributed as dist

from lightning_multigpu.bench.collectives.implementations import Call, Implementation
from lightning_multigpu.bench.collectives.operations import Buffers


def transfers_of_owners(group: dist.ProcessGroup) -> dict[str, Call]:
    """A reduce to the owner of each part, and a broadcast from each owner."""
    rank = dist.get_rank(group)

    def to_owners(b: Buffers) -> None:
        parts = list(b.parts(b.input))
        for work in [dist.reduce(part, owner, group=group, async_op=True) for owner, part in enumerate(parts)]:
            work.wait()
        b.output.copy_(parts[rank])

    def back(b: Buffers) -> None:
        parts = list(b.parts(b.output))
        parts[rank].copy_(b.input)
        for work in [dist.broadcast(part, owner, group=group, async_op=True) for owner, part in enumerate(parts)]:
            work.wait()

    return {"reduce_scatter": to_owners, "all_gather": back}


OWNERS = Implementation(
    "owners",
    "gloo",
    transfers_of_owners,
    "the reduces and broadcasts of ddp_sharded, one for each owner of a part",
    ("reduce_scatter", "all_gather"),
    ("cpu",),
)
