"""Faults planted in a training job, to see how the job ends::

    from lightning_multigpu import faults

    L.Trainer(..., callbacks=[faults.at(rank=1, step=5).kill()])
    L.Trainer(..., callbacks=[faults.at(rank=0, where="validation").raise_(RuntimeError("out of luck"))])

The callbacks go into every rank's Trainer, as all callbacks do, and act on the one rank only. They work with every
strategy and launcher; ``rank`` is the global rank. A run that is resumed with the callback meets the fault again.
"""

import lightning.pytorch  # noqa: F401  # first: its import registers all strategies

from lightning_multigpu.faults.callback import PlantedFault
from lightning_multigpu.faults.fault import PLACES, Fault, Where
from lightning_multigpu.faults.spot import Spot, at

__all__ = ["PLACES", "Fault", "PlantedFault", "Spot", "Where", "at"]
