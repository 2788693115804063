"""The broadcasts of the ranks that own parts of a model, as ``ddp_sharded`` makes them: a bench of them."""

from __future__ import annotations

import torch.distributed as dist

from lightning_multigpu.bench.collectives.implementations import Call, Implementation
from lightning_multigpu.bench.collectives.operations import Buffers


def broadcasts(group: dist.ProcessGroup) -> dict[str, Call]:
    """A broadcast from each owner at once, which brings all ranks all parts."""
    rank = dist.get_rank(group)

    def gather(b: Buffers) -> None:
        parts = list(b.parts(b.output))
        parts[rank].copy_(b.input)
        for work in [dist.broadcast(part, owner, group=group, async_op=True) for owner, part in enumerate(parts)]:
            work.wait()

    return {"all_gather": gather}


OWNERS = Implementation(
    "owners", "gloo", broadcasts, "the broadcasts of ddp_sharded, one from each owner", ("all_gather",), ("cpu",)
)
