"""The guardian tells of a hang once, says when it is over, and ends ranks that are in different collectives."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_multigpu.job.guardian.hang.flight_recorder import PAGE_BYTES, FlightRecorder
from lightning_multigpu.job.guardian.hang.hang_watch import HangWatch
from lightning_multigpu.job.guardian.proc import RUNNING, STOPPED
from tests.job.guardian.job import WORK, Job, eventually
from tests.job.guardian.test_host_links import two_hosts

pytestmark = pytest.mark.launch

LEAVE = "client.leave()"
LIMIT_S = 1.0
END = "The wait that was reported has ended"
NOTE = "note = client.flight_recorder.began('{operation}', group='data', ranks='0-1'); "
# A rank that waits until it is told by the test.
UNTIL = "exec('''while not os.path.exists({file!r}): time.sleep(0.05)'''); "


def waits_in(operation: str, file: Path) -> str:
    return NOTE.format(operation=operation) + UNTIL.format(file=str(file)) + "note.ended(); "


class Terminal:
    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.text = ""

    def shows(self, text: str) -> bool:
        def found() -> bool:
            self.text += self._capfd.readouterr().err
            return text in self.text

        return eventually(found)


def test_ranks_of_two_hosts_in_one_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    terminal, go = Terminal(capfd), tmp_path / "go"
    work = UNTIL.format(file=str(go)) + "time.sleep(1); " + LEAVE
    with two_hosts(work, waits_in("all_reduce", go) + work, hang_report_s=LIMIT_S) as (one, two):
        assert terminal.shows("Rank 0 never came to all_reduce #1 of group data.")
        go.touch()
        assert terminal.shows(END)
        for job in (one, two):
            job.ends(0)
    assert terminal.text.count("No progress for") == 1, "on node 0 only"
    assert str(two.ranks[0].pid) in terminal.text


class Known(list[Any]):
    @property
    def at_work(self) -> list[Any]:
        return list(self)


class Watched:
    """A single host with two ranks, whose pages are written by the test, on a clock of the test."""

    def __init__(self, limit_s: float = 10.0) -> None:
        memory = bytearray(2 * PAGE_BYTES)
        self.now_s, self.state, self.answers = 0.0, RUNNING, True
        self.ranks: list[Any] = [FlightRecorder(memory, slot) for slot in range(2)]
        process = SimpleNamespace(pid=7, state=lambda: self.state)
        known: Any = Known(
            SimpleNamespace(rank=rank, slot=rank, process=process, finished=False, lost_since_s=None)
            for rank in range(2)
        )
        hosts: Any = SimpleNamespace(is_first=True)
        self.watch = HangWatch(limit_s, known, memory, hosts)

    def until(self, end_s: float) -> str | None:
        """Observes once a second; returns the failure that has been found."""
        while self.now_s < end_s:
            self.now_s += 1
            for rank in self.ranks if self.answers else ():
                rank.note_line()
            if (found := self.watch.observe(self.now_s)) is not None:
                return found.what
        return None


def headings(capfd: pytest.CaptureFixture[str]) -> list[str]:
    lines = capfd.readouterr().err.splitlines()
    return [line.split(" (")[0].split(",")[0] for line in lines if line.startswith(("No progress", "The wait"))]


def test_when_a_report_is_made_again(capfd: pytest.CaptureFixture[str]) -> None:
    """When what was waited for has ended; other waits that join it change nothing, and are reported if they go on."""
    watched = Watched()
    watched.until(5)
    notes = [watched.ranks[0].began("all_reduce", group="data", ranks="0-1")]
    watched.until(15)
    assert headings(capfd) == []
    watched.until(18)
    assert headings(capfd) == ["No progress for 11 s"]
    notes.append(watched.ranks[1].began("recv", group="pipeline", ranks="0-1"))
    watched.until(40)
    assert headings(capfd) == []
    notes[0].ended()
    watched.until(44)
    ended, again = headings(capfd)
    assert ended.startswith("The wait that was reported has ended after ")
    assert again.startswith("No progress for 2"), "the other wait"


def test_an_announcement_that_nobody_waits_for_is_no_hang(capfd: pytest.CaptureFixture[str]) -> None:
    watched = Watched()
    watched.ranks[0].began("all_gather", group="data", ranks="", awaited=False)
    watched.until(40)
    assert headings(capfd) == []


def test_two_looks_show_ranks_in_different_collectives(capfd: pytest.CaptureFixture[str]) -> None:
    """They waited until the timeout of 30 minutes. One look alone may see them at different times."""
    watched, text = Watched(), "ranks have called different collectives, and cannot go on: rank 0 "
    note = watched.ranks[0].began("all_reduce", group="data", ranks="0-1")
    watched.ranks[1].began("barrier", group="world", ranks="0-1")
    assert watched.until(11) is None
    assert headings(capfd) == [], "no report before the second look"
    note.ended()
    watched.ranks[0].began("all_reduce", group="data", ranks="0-1")
    assert watched.until(12) is None
    found = watched.until(40) or ""
    assert found.startswith(f"{text}all_reduce #2 of group data (")
    assert ", rank 1 barrier #1 of group world (" in found
    assert "The run ends" in capfd.readouterr().err


@pytest.mark.parametrize("paused", [RUNNING, STOPPED], ids=["with the guardian", "without it"])
def test_a_pause_of_the_whole_job_is_no_wait(paused: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A laptop that slept, and Ctrl-Z. A wait that was too long before goes on: it was reported once more after fg."""
    watched = Watched()

    def pause() -> None:
        watched.now_s += 60
        watched.state = paused
        watched.watch.restart_timers(watched.now_s)
        watched.until(watched.now_s + (0 if paused == RUNNING else 60))
        watched.state = RUNNING

    watched.ranks[0].began("all_reduce", group="data", ranks="0-1")
    watched.until(6)
    pause()
    watched.until(watched.now_s + 8)
    assert headings(capfd) == []
    watched.until(watched.now_s + 10)
    assert len(headings(capfd)) == 1
    pause()
    watched.until(watched.now_s + 20)
    assert headings(capfd) == []


def test_a_rank_that_cannot_note_where_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    watched = Watched()
    watched.answers = False
    watched.ranks[0].began("all_reduce", group="data", ranks="0-1")
    watched.until(16)
    assert capfd.readouterr().err.count("does not answer") == 2


def test_what_the_others_waited_in_when_a_rank_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = "told.wait(60); sys.exit(1)"
    broken = NOTE.format(operation="broadcast") + "note.broke(); "
    with Job(NOTE.format(operation="all_reduce") + told, broken + told, "time.sleep(1); os._exit(3)", WORK) as job:
        job.outcome()
    lines = capfd.readouterr().err.splitlines()
    patterns = [
        r"Meanwhile rank 0 waited in all_reduce #1 of group data for \d\.\d s",
        r"Meanwhile rank 1 waited in broadcast #1 of group data for \d\.\d s",
        r"The job failed: rank 2 .*",
    ]
    assert len(lines) == len(patterns), lines
    for pattern, line in zip(patterns, lines, strict=True):
        assert re.fullmatch(pattern, line), line
