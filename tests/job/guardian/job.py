"""A job of plain processes under a guardian."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from lightning_multigpu.job.guardian import Guardian
from lightning_multigpu.job.guardian.proc import read_stat
from lightning_multigpu.job.guardian.start import ADDRESS

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("rank_script.py")

# What a rank does until it receives a failure; without one it leaves. Nobody waits longer than this.
WORK = "told.wait(60) and sys.exit(1)"
DEADLINE_S = 60.0


class Job:
    """Ranks that each run some statements. What is left is killed at the end of the ``with`` block.

    If all ranks have ended by then, the guardian has to end too.
    """

    def __init__(
        self, *statements: str, first_rank: int = 0, failure_timeout_s: float = 4.0, hang_report_s: float | None = None
    ) -> None:
        self.guardian = Guardian.start(
            num_ranks=len(statements), failure_timeout_s=failure_timeout_s, hang_report_s=hang_report_s
        )
        address = self.guardian.address
        self.ranks = [start_rank(rank, text, address) for rank, text in enumerate(statements, first_rank)]

    def __enter__(self) -> "Job":
        try:
            for rank in self.ranks:
                assert line_of(rank) == "ready\n"
            self.go_on()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        has_ended = kind is not None or None in [rank.poll() for rank in self.ranks] or self.guardian_ends()
        for rank in self.ranks:
            rank.kill()
            rank.send_signal(signal.SIGCONT)
            rank.communicate()
        self.guardian.stop()
        if (kind is not None or not has_ended) and is_alive(self.guardian.pid):
            os.kill(self.guardian.pid, signal.SIGKILL)
        assert has_ended, "the guardian ends soon after the last rank"

    def go_on(self) -> None:
        """Ends the wait of all ranks for a line on their standard input."""
        for rank in self.ranks:
            go_on(rank)

    def outcome(self) -> tuple[list[int], list[str]]:
        printed = [rank.communicate(timeout=DEADLINE_S)[0] for rank in self.ranks]
        return [rank.returncode for rank in self.ranks], printed

    def ends(self, *codes: int) -> list[str]:
        """Waits for all ranks, which have to end with these exit codes; what they have printed."""
        found, printed = self.outcome()
        assert found == list(codes)
        return printed

    def guardian_ends(self) -> bool:
        return eventually(lambda: not is_alive(self.guardian.pid))


def start_rank(rank: int, statements: str, address: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", str(SCRIPT), str(REPOSITORY), str(rank), statements]
    return subprocess.Popen(
        command,
        env={**os.environ, ADDRESS: address},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def go_on(process: subprocess.Popen[str]) -> None:
    """Ends the wait of a process for a line on its standard input."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def is_alive(pid: int) -> bool:
    """Whether there is such a process, other than as a zombie that its new parent has not collected yet."""
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def eventually(condition: object, timeout_s: float = DEADLINE_S) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
