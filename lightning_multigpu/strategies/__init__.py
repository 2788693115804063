"""Strategies for Lightning: thin adapters between its hooks and an engine."""

import lightning.pytorch  # noqa: F401  # first: its import registers all strategies

from lightning_multigpu.strategies.base import MultiGPUStrategy
from lightning_multigpu.strategies.data_parallel import DataParallelStrategy
from lightning_multigpu.strategies.fault_tolerant.strategy import FaultTolerantDDPStrategy
from lightning_multigpu.strategies.parameter_server.cpu_parameter_server import CPUParameterServerStrategy
from lightning_multigpu.strategies.parameter_server.parameter_server import ParameterServerStrategy
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy
from lightning_multigpu.strategies.ring_ddp import RingDDPStrategy
from lightning_multigpu.strategies.sharded import ShardedStrategy
from lightning_multigpu.strategies.tensor_parallel.hybrid import HybridStrategy
from lightning_multigpu.strategies.tensor_parallel.tensor_split import TensorSplitStrategy

__all__ = [
    "CPUParameterServerStrategy",
    "DataParallelStrategy",
    "FaultTolerantDDPStrategy",
    "HybridStrategy",
    "MultiGPUStrategy",
    "ParameterServerStrategy",
    "PipelineStrategy",
    "RingDDPStrategy",
    "ShardedStrategy",
    "TensorSplitStrategy",
]
