"""Registry of the strategies: one row for each name that ``Trainer(strategy=...)`` accepts.

A row names its class and imports it when it is asked for, so that the table can be read without Lightning. Lightning's
registry holds the rows, which make their strategies, so that names can be registered before any class is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_multigpu.strategies import DataParallelStrategy, FaultTolerantDDPStrategy, MultiGPUStrategy

    AnyStrategy = MultiGPUStrategy | DataParallelStrategy | FaultTolerantDDPStrategy


@dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """A registered strategy: a name, its class and options, and a description.

    Args:
        name: the name that ``Trainer(strategy=...)`` accepts.
        class_path: the public path of the class behind the name.
        options: arguments of the class that the name fixes.
        summary: description in one line.
        compute: where the computation happens.
        gradients: how gradients travel.
        model: how the model travels.
        bytes_per_step: bytes that travel per optimizer step, as a formula in S (bytes of the gradients, equal to the
            bytes of the model), N (ranks), n (nodes), K (servers), P (devices of a pipeline), v (stages of each
            device), M (micro-batches), A (bytes of a batch's activations between two stages or blocks), and d, p and t
            (ranks of the mesh of ``hybrid`` along its data, pipeline and tensor axes).
        transport: "collectives" (shared memory inside a host, Gloo between hosts; NCCL on GPUs), "messages" (Gloo, or
            NCCL on GPUs), "collectives and messages", "servers" (shared memory or TCP), "host memory", "one process".
        synchronous: True if the strategy computes what one device computes at the same global batch.
    """

    name: str
    class_path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    summary: str
    compute: str
    gradients: str
    model: str
    bytes_per_step: str
    transport: str
    synchronous: bool = True

    @property
    def strategy(self) -> type[AnyStrategy]:
        """The class behind the name; imports Lightning."""
        module, _, name = self.class_path.rpartition(".")
        return getattr(import_module(module), name)  # type: ignore[no-any-return]

    def __call__(self, **options: Any) -> AnyStrategy:
        """A new strategy; Lightning's registry calls its entry with the options of the name."""
        return self.strategy(**options)


_RING_DDP: dict[str, Any] = {
    "compute": "all ranks, each on its share of the batch",
    "gradients": "during backward, through shared memory inside a host, around a ring between hosts",
    "model": "broadcast at the start; every rank makes the same update",
    "bytes_per_step": "2(n-1)/n x S sent by each node; S written to shared memory by each rank",
    "transport": "collectives",
}

_DDP_SHARDED: dict[str, Any] = {
    "compute": "all ranks, each on its share of the batch; each updates the parameters that it owns",
    "gradients": "during backward, each to the rank that owns its parameter",
    "model": "after each update, from the owners to all ranks",
    "bytes_per_step": "S sent by each rank: (N-1)/N x S of gradients, S/N of new weights",
    "transport": "messages",
}

_PARAMETER_SERVER: dict[str, Any] = {
    "compute": "all ranks, each on its share of the batch; the servers average and update",
    "gradients": "during backward, from each rank to the servers",
    "model": "after each update, from the servers to each rank",
    "bytes_per_step": "S sent and received by each rank; N x S / K by each server",
    "transport": "servers",
}

_PIPELINE: dict[str, Any] = {
    "gradients": "those of activations, to the stage before",
    "model": "broadcast at the start; each stage keeps its layers",
    "bytes_per_step": "A sent forward and A back at each of the P-1 cuts",
    "transport": "messages",
}

_LOOPED_PIPELINE = {**_PIPELINE, "bytes_per_step": "A sent forward and A back at each of the vP-1 cuts"}

STRATEGIES: tuple[StrategyRow, ...] = (
    StrategyRow(
        name="ring_ddp",
        class_path="lightning_multigpu.RingDDPStrategy",
        summary="data parallel training, gradients averaged by a ring all-reduce",
        **_RING_DDP,
    ),
    StrategyRow(
        name="ring_ddp_spawn",
        class_path="lightning_multigpu.RingDDPStrategy",
        options={"start_method": "spawn"},
        summary="ring_ddp with processes spawned from a running interpreter, for notebooks and REPLs",
        **_RING_DDP,
    ),
    StrategyRow(
        name="ddp_sharded",
        class_path="lightning_multigpu.ShardedStrategy",
        summary="data parallel training with 1/N of the gradients and of the optimizer's states on each rank",
        **_DDP_SHARDED,
    ),
    StrategyRow(
        name="ddp_sharded_spawn",
        class_path="lightning_multigpu.ShardedStrategy",
        options={"start_method": "spawn"},
        summary="ddp_sharded with processes spawned from a running interpreter, for notebooks and REPLs",
        **_DDP_SHARDED,
    ),
    StrategyRow(
        name="ft_ddp",
        class_path="lightning_multigpu.FaultTolerantDDPStrategy",
        summary="data parallel training that goes on when a rank is lost, on torchft",
        compute="all ranks that live, each on its share of the batch",
        gradients="after backward, summed over the ranks that live",
        model="broadcast at the start; every rank makes the same update; a rank that comes in takes another one's",
        bytes_per_step="2(N-1)/N x S sent by each rank",
        transport="collectives",
    ),
    StrategyRow(
        name="dp",
        class_path="lightning_multigpu.DataParallelStrategy",
        summary="data parallel training in one process, which drives all devices of one machine",
        compute="one process: each device in a thread, on its share of the batch; the first one updates",
        gradients="after backward, summed on the first device",
        model="for each batch, from the first device to the others; on CPUs not at all",
        bytes_per_step="(N-1) x S from the first of N devices and (N-1) x S back to it",
        transport="one process",
    ),
    StrategyRow(
        name="cpu_ps",
        class_path="lightning_multigpu.CPUParameterServerStrategy",
        summary="data parallel training, the optimizer on the host: its CPU averages gradients and updates the weights",
        compute="all ranks, each on its share of the batch; the host's CPU averages and updates",
        gradients="from devices to the host's memory",
        model="after each update, from the host to devices",
        bytes_per_step="S out and S in for each rank, in the host's memory",
        transport="host memory",
    ),
    StrategyRow(
        name="sync_ps",
        class_path="lightning_multigpu.ParameterServerStrategy",
        summary="data parallel training with a parameter server, a process that averages and updates",
        **_PARAMETER_SERVER,
    ),
    StrategyRow(
        name="sharded_ps",
        class_path="lightning_multigpu.ParameterServerStrategy",
        options={"num_servers": "nodes"},
        summary="sync_ps with a shard of the model on each of K servers, one a node and 2 at least",
        **_PARAMETER_SERVER,
    ),
    StrategyRow(
        name="async_ps",
        class_path="lightning_multigpu.ParameterServerStrategy",
        options={"mode": "async"},
        summary="asynchronous training with a parameter server: each rank at its own pace, each batch an update",
        **{**_PARAMETER_SERVER, "compute": "all ranks, each at its own pace; the servers update with what comes"},
        synchronous=False,
    ),
    StrategyRow(
        name="model_parallel",
        class_path="lightning_multigpu.PipelineStrategy",
        options={"schedule": "gpipe", "num_micro_batches": 1},
        summary="layers on different devices, which compute one after the other",
        compute="one stage at a time; each is idle for (P-1)/P of a step",
        **_PIPELINE,
    ),
    StrategyRow(
        name="gpipe",
        class_path="lightning_multigpu.PipelineStrategy",
        options={"schedule": "gpipe"},
        summary="layers on different devices; micro-batches flow through all forward, then all backward",
        compute="all stages at once; each is idle for (P-1)/(M+P-1) of a step",
        **_PIPELINE,
    ),
    StrategyRow(
        name="pipeline_1f1b",
        class_path="lightning_multigpu.PipelineStrategy",
        options={"schedule": "1f1b"},
        summary="gpipe with backward as soon as possible: at most P micro-batches are in memory, not M",
        compute="all stages at once; each is idle for (P-1)/(M+P-1) of a step",
        **_PIPELINE,
    ),
    StrategyRow(
        name="pipeline_interleaved",
        class_path="lightning_multigpu.PipelineStrategy",
        options={"schedule": "interleaved"},
        summary="pipeline_1f1b with v = 2 stages on each device, which shortens idle time",
        compute="all devices at once; each is idle for (P-1)/(vM+P-1) of a step",
        **_LOOPED_PIPELINE,
    ),
    StrategyRow(
        name="pipeline_zero_bubble",
        class_path="lightning_multigpu.PipelineStrategy",
        options={"schedule": "zero_bubble"},
        summary="pipeline_interleaved that computes the gradients of the weights where a device would be idle",
        compute="all devices at once, with little idle time; more micro-batches are in memory",
        **_LOOPED_PIPELINE,
    ),
    StrategyRow(
        name="tensor_split",
        class_path="lightning_multigpu.TensorSplitStrategy",
        summary="each large layer split over all devices, which train on the same batch",
        compute="each rank on its part of split layers; the rest on every rank",
        gradients="not at all",
        model="broadcast at the start; each rank keeps its part of split layers",
        bytes_per_step="2(N-1)/N x A twice forward and twice back for each transformer block",
        transport="collectives",
    ),
    StrategyRow(
        name="hybrid",
        class_path="lightning_multigpu.HybridStrategy",
        summary="pipelines side by side, with the layers of each stage split over devices: three sizes of a mesh",
        compute="each pipeline on its share of the batch, each rank on its part of its stage's layers",
        gradients="between pipelines those of a rank's part; between stages those of activations",
        model="broadcast at the start; each rank keeps its part of its stage's layers",
        bytes_per_step="2(d-1)/d x S/(p t) between pipelines; A forward and A back at each of the p-1 cuts; inside "
        "layers as tensor_split with t ranks",
        transport="collectives and messages",
    ),
)


def register_all() -> None:
    """Register every strategy with Lightning under its name; calling it again changes nothing."""
    from lightning.pytorch.strategies import StrategyRegistry

    for row in STRATEGIES:
        if row.name not in StrategyRegistry:
            StrategyRegistry.register(row.name, row, description=row.summary, override=False, **row.options)


def register_with_lightning() -> None:
    """Registers every strategy now if Lightning has been imported, else as soon as it is.

    Lightning has no entry point for strategies. Importing it here would take seconds and 400 MB of each process that
    needs none of it: the command line's help, parameter servers, ranks of a bench.
    """
    if _LIGHTNING in sys.modules:
        register_all()
    else:
        sys.meta_path.insert(0, _ImportWatch())


_LIGHTNING = "lightning.pytorch.strategies"


class _ImportWatch(MetaPathFinder):
    """Registers the strategies at the end of the import of Lightning's registry, and is gone then."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LIGHTNING or (spec := PathFinder.find_spec(fullname, path)) is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            sys.meta_path.remove(self)
            register_all()

        loader.exec_module = exec_module
        return spec
