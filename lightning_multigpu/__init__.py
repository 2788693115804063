"""Multi-GPU training regimes as PyTorch Lightning strategies.

Importing this package makes their names known to Lightning::

    import lightning as L
    import lightning_multigpu

    trainer = L.Trainer(strategy="ring_ddp", devices=2)
"""

from importlib.metadata import version

from lightning_multigpu.communication.failure_board import RankFailedError
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.pipeline.errors import PipelineError
from lightning_multigpu.registry import REGIMES, Regime, register_all
from lightning_multigpu.strategies import MultiGPUStrategy, PipelineStrategy, RingDDPStrategy

__version__ = version("lightning-multigpu")
__all__ = [
    "REGIMES",
    "Meter",
    "MultiGPUStrategy",
    "PipelineError",
    "PipelineStrategy",
    "RankFailedError",
    "Regime",
    "RingDDPStrategy",
    "register_all",
]

register_all()
