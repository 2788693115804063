"""A fault in the loading of training batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from lightning_multigpu.faults.fault import Fault

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass
class FaultyCollate:
    """A collate function with a fault in one of its batches; workers of the loader hold copies of it."""

    inner: Callable[[Any], Any]
    fault: Fault
    batch: int = 0
    calls: int = 0
    struck: bool = False

    def aim(self, trainer: pl.Trainer) -> None:
        """Finds the batch of the coming epoch that the fault's step trains on; a negative number if that is over."""
        self.batch = (self.fault.step - trainer.global_step) * trainer.accumulate_grad_batches
        self.calls = 0

    def __call__(self, samples: Any) -> Any:
        worker = get_worker_info()
        # Workers put batches together in turn.
        batch = self.calls if worker is None else self.calls * worker.num_workers + worker.id
        self.calls += 1
        if batch == self.batch and not self.struck:
            self.struck = True
            self.fault.strike()
        return self.inner(samples)
