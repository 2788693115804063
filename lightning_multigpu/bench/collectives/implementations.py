"""The implementations of collectives: the back ends of this build of torch, and this pack's own algorithms.

The table can be read without torch, which each function imports by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lightning_multigpu.bench.collectives.operations import Buffers

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Call = Callable[[Buffers], object]
"""Does one operation on prepared tensors, until it returns (on a GPU: until the current stream gets there)."""


@dataclass(frozen=True)
class Implementation:
    """One way to do collectives.

    Args:
        backend: the back end of torch.distributed whose process group it gets.
        make: returns the operations over such a group, by name, if there are so many ranks on each host. A function of
            a module, since it is sent to ranks by its name.
        own: the only operation of an algorithm of this pack, on CPU tensors; "" for a back end, where trying decides.
    """

    name: str
    backend: str
    make: Callable[..., Mapping[str, Call]]
    summary: str
    own: str = ""

    def is_for(self, device_type: str) -> bool:
        """Whether it is built and meant for "cpu" or "cuda" tensors."""
        import torch.distributed as dist

        meant = ["cpu"] if self.own else dist.Backend.backend_capability.get(self.backend, ())
        return self.is_built and device_type in meant

    def has(self, operation: str) -> bool:
        return self.own in ("", operation)

    @property
    def is_built(self) -> bool:
        import torch.distributed as dist

        return dist.is_backend_available(self.backend)


def torch_collectives(group: dist.ProcessGroup, ranks_per_host: int = 1) -> dict[str, Call]:
    """The collectives of ``torch.distributed``."""
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def send_recv(b: Buffers) -> None:
        neighbours = [
            dist.P2POp(dist.isend, b.input, (rank + 1) % size, group=group),
            dist.P2POp(dist.irecv, b.output, (rank - 1) % size, group=group),
        ]
        for work in dist.batch_isend_irecv(neighbours):
            work.wait()

    def at_root(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        return tensors if rank == 0 else None

    return {
        "all_reduce": lambda b: dist.all_reduce(b.output, group=group),
        "reduce_scatter": lambda b: dist.reduce_scatter_tensor(b.output, b.input, group=group),
        "all_gather": lambda b: dist.all_gather_into_tensor(b.output, b.input, group=group),
        "broadcast": lambda b: dist.broadcast(b.output, 0, group=group),
        "reduce": lambda b: dist.reduce(b.output, 0, group=group),
        "gather": lambda b: dist.gather(b.input, at_root(b.parts(b.output)), 0, group=group),
        "scatter": lambda b: dist.scatter(b.output, at_root(b.parts(b.input)), 0, group=group),
        "all_to_all": lambda b: dist.all_to_all_single(b.output, b.input, group=group),
        "send_recv": send_recv,
        "barrier": lambda b: dist.barrier(group=group),
    }


def ring_ddp(kind: str, group: dist.ProcessGroup, ranks_per_host: int) -> dict[str, Call]:
    """The all-reduces of ``ring_ddp`` on CPUs. The bench's numbers are exact in bf16, which "compressed" sends."""
    import torch.distributed as dist

    from lightning_multigpu.communication.compression import CompressedAllReduce, make_compressor
    from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
    from lightning_multigpu.communication.ring import RingAllReduce
    from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
    from lightning_multigpu.engine.data_parallel.gradient_transport import layout

    if kind == "compressed":
        coded = CompressedAllReduce(group, make_compressor("bf16"))

        def call(b: Buffers) -> None:
            coded(b.output, "tensor")
            coded.end_step()

        return {"all_reduce": call}
    if kind != "hierarchy":
        alone = (SharedMemoryAllReduce if kind == "shared_memory" else RingAllReduce)(group)
        return {"all_reduce": lambda b: alone(b.output)}
    inside, between = (
        dist.new_subgroups_by_enumeration(groups)[0] if groups else None  # type: ignore[no-untyped-call]
        for groups in layout([list(range(dist.get_world_size(group)))], lambda rank: rank // ranks_per_host)
    )
    all_reduce = HierarchicalAllReduce(
        None if inside is None else SharedMemoryAllReduce(inside),
        None if between is None else RingAllReduce(between),
    )
    return {"all_reduce": lambda b: all_reduce(b.output)}


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *(
        Implementation(kind, "gloo", partial(ring_ddp, kind), f"this pack's {summary}", own="all_reduce")
        for kind, summary in {
            "shared_memory": "shared memory, for the ranks of one host",
            "ring": "ring, over gloo's messages",
            "hierarchy": "shared memory inside each host and ring between hosts",
            "compressed": "compressed all-reduce, in bf16",
        }.items()
    ),
    Implementation("gloo", "gloo", torch_collectives, "torch's back end for CPUs"),
    Implementation("nccl", "nccl", torch_collectives, "NVIDIA's back end for GPUs"),
    Implementation("mpi", "mpi", torch_collectives, "the MPI that torch was built with"),
    Implementation("ucc", "ucc", torch_collectives, "UCC, where torch was built with it"),
)
