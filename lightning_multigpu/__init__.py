"""Multi-GPU training as PyTorch Lightning strategies.

Importing this package makes their names known to Lightning::

    import lightning as L
    import lightning_multigpu

    trainer = L.Trainer(strategy="ring_ddp", devices=2)
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lightning_multigpu.registry import STRATEGIES, StrategyRow, register_all, register_with_lightning

if TYPE_CHECKING:
    from lightning_multigpu.communication.metering.meter import Meter
    from lightning_multigpu.engine.errors import PipelineError
    from lightning_multigpu.job.checkpoint_files.last_checkpoint import find_last_checkpoint
    from lightning_multigpu.job.guardian import RankFailedError
    from lightning_multigpu.strategies import (
        CPUParameterServerStrategy,
        DataParallelStrategy,
        FaultTolerantDDPStrategy,
        HybridStrategy,
        MultiGPUStrategy,
        ParameterServerStrategy,
        PipelineStrategy,
        RingDDPStrategy,
        ShardedStrategy,
        TensorSplitStrategy,
    )

__version__ = version("lightning-multigpu")
__all__ = [
    "STRATEGIES",
    "CPUParameterServerStrategy",
    "DataParallelStrategy",
    "FaultTolerantDDPStrategy",
    "HybridStrategy",
    "Meter",
    "MultiGPUStrategy",
    "ParameterServerStrategy",
    "PipelineError",
    "PipelineStrategy",
    "RankFailedError",
    "RingDDPStrategy",
    "ShardedStrategy",
    "StrategyRow",
    "TensorSplitStrategy",
    "find_last_checkpoint",
    "register_all",
]

# Public names are imported when they are first used: most of them import Lightning.
_STRATEGIES = "lightning_multigpu.strategies"
_OTHER_MODULES = {
    "Meter": "lightning_multigpu.communication.metering.meter",
    "PipelineError": "lightning_multigpu.engine.errors",
    "RankFailedError": "lightning_multigpu.job.guardian",
    "find_last_checkpoint": "lightning_multigpu.job.checkpoint_files.last_checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_OTHER_MODULES.get(name, _STRATEGIES)), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_lightning()
