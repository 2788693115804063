"""What a rank does that is told of a failure, without a job."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from lightning_multigpu.communication.failure_board import RankFailure
from lightning_multigpu.guardian import Failure
from lightning_multigpu.runtime.failure_watch import FailureWatch

LOST = RuntimeError("Connection closed by peer")


class Board:
    """Rank 0's board, as rank 1 has it; it may be out of reach, and asking it then takes a minute."""

    rank, world_size = 1, 2

    def __init__(self, written: RankFailure | None) -> None:
        self.written = written
        self.asked = False

    def first(self) -> RankFailure | None:
        self.asked = True
        return self.written

    def acknowledge(self) -> None:
        self.asked = True


class NoWatching:
    """A guardian that is not there."""

    def failed(self, what: str, **fields: Any) -> None:
        raise AssertionError(f"this rank has not failed, but says that it {what}")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> FailureWatch:
    monkeypatch.setattr("lightning_multigpu.runtime.failure_watch._limit_exit", lambda timeout_s, *, from_exit: None)
    watch = FailureWatch(5.0)
    watch.watching = NoWatching()  # type: ignore[assignment]
    return watch


@pytest.mark.parametrize(
    "failure", [Failure("node 1 has heard nothing from node 0"), Failure("was ended by SIGKILL", 0, "h", 7, 3)]
)
def test_when_a_process_or_a_host_is_gone_the_board_is_not_asked(failure: Failure, watch: FailureWatch) -> None:
    board = Board(None)
    watch._board = board  # type: ignore[assignment]
    watch.seen_by_guardian(failure)
    found = watch.settle(LOST, 3)
    assert found is not None
    assert (found.rank, found.what) == (failure.rank, failure.what)
    assert not board.asked


def test_the_exception_of_another_rank_is_on_the_board(watch: FailureWatch) -> None:
    written = RankFailure(0, "h", 7, 3, "raised OwnError: spoilt", "Traceback: ...", b"pickled")
    board = Board(written)
    watch._board = board  # type: ignore[assignment]
    watch.seen_by_guardian(Failure("raised OwnError: spoilt", 0, "h", 7, 3, "Traceback: ..."))
    assert watch.settle(LOST, 3) is written


def test_a_failure_of_nobody_is_described_without_a_place() -> None:
    failure = RankFailure(None, "", None, None, "node 1 has heard nothing from node 0", "")
    assert failure.describe() == "the job failed: node 1 has heard nothing from node 0"
    assert not hasattr(failure.exception(), "__notes__"), "it was not raised on another rank"


EXIT = """
import atexit, sys, time
from lightning_multigpu.runtime.failure_watch import _limit_exit
atexit.register(time.sleep, {exit_s})  # as threads that wait for a host that is gone
_limit_exit({timeout_s}, from_exit=False)
time.sleep(1)  # a program that goes on is left in peace
print("goes on", flush=True)
"""


@pytest.mark.parametrize(("timeout_s", "exit_s", "status"), [(0.5, 60, -signal.SIGALRM), (60, 0, 0)])
def test_the_exit_after_a_failure_ends(timeout_s: float, exit_s: float, status: int) -> None:
    """Gloo's destructor joins a thread that waits for a host that is gone; the guardian has been told goodbye then."""
    code = EXIT.format(timeout_s=timeout_s, exit_s=exit_s)
    begin = time.monotonic()
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (finished.stdout, finished.returncode) == ("goes on\n", status), finished.stderr
    assert time.monotonic() - begin < 55
