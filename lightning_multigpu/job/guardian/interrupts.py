"""The interrupts (Ctrl-C) of a job: the first one ends it in order, the second one at once."""

from __future__ import annotations

import signal
import time
from types import FrameType

from lightning_multigpu.job.guardian.blocking import print_text

# Signals within this time are one: `timeout` and some wrappers signal the process and its group.
SAME_INTERRUPT_S = 0.3
INTERRUPTED_STATUS = 130

_LINE = "\nCtrl-C: the run ends in order, and callbacks may save. Another Ctrl-C ends it at once.\n"


class Interrupts:
    """Counter of interrupts in the guardian: a terminal signals it too, while Lightning ignores a second SIGINT.

    Ranks report interrupts that only they receive. ``counts`` is False if the user's program handles SIGINT itself;
    ``status`` is the exit status of a job that a second signal ends.
    """

    def __init__(self) -> None:
        self.counts = False
        self.status = INTERRUPTED_STATUS
        self._received = 0
        self._last_s = float("-inf")
        self._reported = 0
        self._shown = False

    def install(self) -> None:
        """Takes SIGINT over; called in the main thread."""
        signal.signal(signal.SIGINT, self._note)

    def restart(self) -> None:
        """Forgets all interrupts: a run has ended."""
        self.counts = self._shown = False
        self._received = self._reported = 0

    def reported(self, number: int, status: int) -> None:
        """Counts a rank's first or second signal."""
        if number > self._reported:
            self._reported, self.status = number, status

    @property
    def number(self) -> int:
        """The number of interrupts so far: this process's count, or the ranks' reports."""
        own_program = not self.counts and self.status == INTERRUPTED_STATUS
        return 0 if own_program else max(self._received, self._reported)

    def show_first(self) -> None:
        """Prints the effect of the first interrupt."""
        if self.number == 1 and not self._shown:
            self._shown = True
            print_text(_LINE)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s > SAME_INTERRUPT_S:
            self._received += 1
        self._last_s = now_s
