"""A fault: its place and its action."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

log = logging.getLogger(__name__)

Where = Literal["joining", "data", "training", "backward", "validation", "saving", "end of fit"]

PLACES: tuple[Where, ...] = get_args(Where)


@dataclass(frozen=True)
class Fault:
    """A fault of one rank; :meth:`strike` lets it happen to the process that calls it."""

    rank: int
    step: int
    where: Where
    what: str
    action: Callable[[], None] = field(repr=False)

    def describe(self) -> str:
        """One line for the log: ``rank 1, training, from step 5 on: receives SIGKILL``."""
        after = f", from step {self.step} on" if self.step else ""
        return f"rank {self.rank}, {self.where}{after}: {self.what}"

    def strike(self) -> None:
        """Logs the fault and lets it happen."""
        log.warning("Planted fault, pid %d: %s", os.getpid(), self.describe())
        self.action()


def send_signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def raise_error(error: BaseException) -> None:
    raise error


def hang() -> None:
    while True:
        time.sleep(3600)
