"""The base of every strategy that trains with several ranks: their number, their devices, and this rank's place."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from typing_extensions import override

from lightning_multigpu.job.run_context import RunContext
from lightning_multigpu.strategies.pack_strategy import PackStrategy

CHECKED_BATCHES = {0, *(10**power for power in range(12))}  # batches of a fit in which ranks compare their parameters


class StartedRanks(PackStrategy, ParallelStrategy):
    """A strategy of ranks that are a mesh with the axes data, pipeline and tensor, by default all on the data axis."""

    starts_ranks = True
    num_nodes = 1
    pipeline_parallel_size = 1
    tensor_parallel_size = 1

    @property
    def run_context(self) -> RunContext:
        """The ranks, devices and limits of the run, as they are set now."""
        raise NotImplementedError

    @property
    def is_distributed(self) -> bool:
        """True: Lightning then injects a distributed sampler, and reduces logs with ``sync_dist=True``."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def data_parallel_size(self) -> int:
        """Number of data ranks: of different batches in one step."""
        return max(1, self.num_nodes * self.num_processes // self._model_parallel_size)

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank's batch among them."""
        return self.global_rank // self._model_parallel_size

    @property
    def tensor_parallel_rank(self) -> int:
        """The index of this rank's part of each split layer."""
        return self.global_rank % self.tensor_parallel_size

    @property
    def _model_parallel_size(self) -> int:
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def set_world_ranks(self) -> None:
        """Tells the cluster environment and Lightning's rank-zero helpers which rank this is."""
        if self.cluster_environment is not None:
            self.run_context.tell_ranks()
