"""Ranks, environment, devices and time limits of a run."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.utilities import rank_zero_only

_REPEATS = "Using `DistributedSampler` with the dataloaders"  # job/batch_feed.py says where it is true


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The facts about a run for its launcher, joining and failure watch; made by the strategy.

    ``devices`` are those of this host's ranks. ``backend`` is the user's option. In ``failure_timeout_s`` all ranks
    have to end after one has failed; in ``join_timeout_s`` after its start a rank has to join the others. With
    ``admits_others`` processes that are no ranks, perhaps of other hosts, join at the main address.
    """

    environment: ClusterEnvironment
    devices: tuple[torch.device, ...]
    num_nodes: int
    backend: str | None
    failure_timeout_s: float
    hang_report_s: float | None
    join_timeout_s: float
    admits_others: bool = False

    @property
    def ranks_per_host(self) -> int:
        return len(self.devices)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_host

    @property
    def node_rank(self) -> int:
        return self.environment.node_rank()

    @property
    def local_rank(self) -> int:
        return self.environment.local_rank()

    @property
    def rank(self) -> int:
        """The global rank; right once :meth:`tell_ranks` has run in this process."""
        return self.environment.global_rank()

    @property
    def device_type(self) -> str:
        return self.devices[0].type if self.devices else "cpu"

    def tell_ranks(self) -> None:
        """Sets this rank in the cluster environment and in Lightning's rank-zero helpers."""
        self.environment.set_global_rank(self.node_rank * self.ranks_per_host + self.local_rank)
        self.environment.set_world_size(self.world_size)
        rank_zero_only.rank = self.rank  # type: ignore[attr-defined]
        warnings.filterwarnings("ignore", _REPEATS, UserWarning)
