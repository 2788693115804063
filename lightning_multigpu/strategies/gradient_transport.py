"""How gradients get from rank to rank: by which reducer, and in buckets of which size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch.nn import Module

from lightning_multigpu.communication.compression import Compressor
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.data_parallel import bucket_size
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer
from lightning_multigpu.runtime.process_groups import ProcessGroups
from lightning_multigpu.strategies.automatic_compression import reducer_of_choice
from lightning_multigpu.strategies.compressed_gradients import pieces_of
from lightning_multigpu.strategies.gradient_path import gradient_all_reduce

if TYPE_CHECKING:
    import lightning.pytorch as pl

_DDP_BUCKET_CAP_MB = 25.0


@dataclass(frozen=True, kw_only=True)
class GradientTransport:
    """What a run and its options say about the transport of gradients; every method is a collective of the world.

    Attributes:
        module: whose gradients they are.
        groups: of the run.
        meter: told of what travels.
        device: of the gradients.
        num_hosts: of the run.
        ranks_per_host: of the run.
        compressor: what travels between hosts in place of gradients; None for gradients.
        compress_inside_hosts: compress between ranks of one host as well.
        shared_memory: let ranks of one host reduce through memory that they share.
        hook: a user's own communication hook and its state, in place of all that.
    """

    module: pl.LightningModule
    groups: ProcessGroups
    meter: Meter
    device: torch.device
    num_hosts: int
    ranks_per_host: int
    compressor: Compressor | None
    compress_inside_hosts: bool
    shared_memory: bool
    hook: tuple[Any, Callable[..., Any]] | None

    def reducer(self) -> GradientReducer:
        """Averages gradients over the data axis as the options say."""
        group = self.groups.new("data")
        # On GPUs NCCL moves the gradients, unless they are to be compressed: that is done in the host's memory.
        if self.hook is not None or (dist.get_backend(group) == "nccl" and self.compressor is None):
            return GradientReducer(group, self.meter, hook=self.hook)
        all_reduce = self._all_reduce_of_hosts()
        if all_reduce.compressed is None:
            return GradientReducer(group, self.meter, all_reduce=all_reduce)
        return GradientReducer(group, self.meter, all_reduce=all_reduce, pieces=pieces_of(self.module))

    def reducer_of_choice(
        self, plain: GradientReducer, bucket_cap_mb: float | None, ranks: MeteredGroup
    ) -> GradientReducer:
        """``plain``, or one with the compression that a measurement recommends.

        Args:
            plain: compresses nothing.
            bucket_cap_mb: MiB of gradients that travel together; None for what DDP has.
            ranks: of the data axis.
        """
        all_reduce = plain.all_reduce
        if all_reduce is None and (self.num_hosts > 1 or self.compress_inside_hosts):
            all_reduce = self._all_reduce_of_hosts()  # the way around NCCL that a compression would take
        if all_reduce is None:
            return plain
        bucket_bytes = (bucket_cap_mb or _DDP_BUCKET_CAP_MB) * 2**20
        return reducer_of_choice(
            self.module, plain, all_reduce, bucket_bytes=bucket_bytes, ranks=ranks, device=self.device
        )

    def bucket_cap_mb(
        self, model: Module, reducer: GradientReducer, asked: float | Literal["auto"] | None
    ) -> float | None:
        """``asked``, or what suits the way that gradients take, or what a measurement recommends; None is for DDP.

        Args:
            model: whose parameters are put into buckets.
            reducer: moves the buckets.
            asked: MiB; "auto" measures, None goes by where the gradients travel.
        """
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        total_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        if asked is None:
            all_reduce = reducer.all_reduce
            if all_reduce is None or self.hook is not None:
                return None
            return bucket_size.usual_bucket_bytes(total_bytes, between_hosts=all_reduce.between is not None) / 2**20
        if asked != "auto":
            return asked
        cost = bucket_size.measure(reducer.average, self.device)
        chosen_mb = bucket_size.best_bucket_bytes(cost, total_bytes) / 2**20
        rank_zero_info(
            f"bucket_cap_mb='auto': {chosen_mb:.2f} MiB, for {total_bytes / 2**20:.1f} MiB of gradients that take "
            f"{cost.latency_s * 1e6:.0f} us a bucket and {cost.s_per_byte * 2**20 * 1e3:.2f} ms a MiB"
        )
        self.meter.discard()
        return chosen_mb

    def _all_reduce_of_hosts(self) -> HierarchicalAllReduce:
        """For gradients in the hosts' memory."""
        return gradient_all_reduce(
            self.groups,
            "data",
            ranks_per_host=self.ranks_per_host,
            compressor=self.compressor,
            shared_memory=self.shared_memory,
            compress_inside_hosts=self.compress_inside_hosts,
        )
