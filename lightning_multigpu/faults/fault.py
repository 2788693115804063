"""What a planted fault is: where it happens, and what happens there."""

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
    """What happens, and where; :meth:`strike` lets it happen to the process that calls it."""

    rank: int
    step: int
    where: Where
    what: str
    action: Callable[[], None] = field(repr=False)

    def describe(self) -> str:
        """One line, in the log where the fault strikes: ``rank 1, training, from step 5 on: receives SIGKILL``."""
        after = f", from step {self.step} on" if self.step else ""
        return f"rank {self.rank}, {self.where}{after}: {self.what}"

    def strike(self) -> None:
        """Says so in the log and lets it happen."""
        log.warning("Planted fault, pid %d: %s", os.getpid(), self.describe())
        self.action()


@dataclass(frozen=True)
class Signal:
    number: signal.Signals

    def __call__(self) -> None:
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True)
class Exit:
    status: int

    def __call__(self) -> None:
        os._exit(self.status)


@dataclass(frozen=True)
class Raise:
    error: BaseException

    def __call__(self) -> None:
        raise self.error


def hang() -> None:
    while True:
        time.sleep(3600)
