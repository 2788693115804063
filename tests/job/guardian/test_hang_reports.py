"""The guardian tells of a hang once, says when it is over, and ends nothing."""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from lightning_multigpu.job.guardian.blocking import append, show
from lightning_multigpu.job.guardian.hang import hang_watch
from lightning_multigpu.job.guardian.hang.flight_recorder import AWAITED, BROKEN, PAGE_BYTES, Entry
from lightning_multigpu.job.guardian.hang.hang_reports import HangReports
from lightning_multigpu.job.guardian.hang.hang_watch import HangWatch
from lightning_multigpu.job.guardian.hang.stacks import Frame, Stacks
from lightning_multigpu.job.guardian.hang.waiting_graph import View
from lightning_multigpu.job.guardian.proc import RUNNING
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
    """What the guardians print."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.text = ""

    def shows(self, text: str, *, times: int = 1) -> bool:
        def found() -> bool:
            self.text += self._capfd.readouterr().err
            return self.text.count(text) >= times

        return eventually(found)


def test_one_report_and_one_line_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    terminal, go = Terminal(capfd), tmp_path / "go"
    with Job(
        waits_in("all_reduce", go) + "time.sleep(1); " + LEAVE,
        UNTIL.format(file=str(go)) + "time.sleep(1); " + LEAVE,
        hang_report_s=LIMIT_S,
        directory=tmp_path / "run",
    ) as job:
        assert terminal.shows("The stacks of all threads are in ")
        time.sleep(1.5 * LIMIT_S)
        go.touch()
        assert terminal.shows(END)
        assert job.outcome()[0] == [0, 0]
        assert job.guardian_ends()
    text = terminal.text
    assert text.count("No progress for") == 1, text
    assert "Rank 0 waits in all_reduce #1 of group data" in text
    assert "rank 1 has not come: it is at " in text
    assert re.search(r"has ended after \d s, and the run goes on", text)
    (file,) = (tmp_path / "run").iterdir()
    written = file.read_text()
    assert file.name == f"hang-{os.uname().nodename}.txt"
    assert "--- rank 1" in written
    assert written.count("guardian/client.py") >= 2, "all threads of both ranks"


def test_a_file_system_that_does_not_answer_keeps_no_guardian(tmp_path: Path) -> None:
    """Ranks hang just when it does not: here a FIFO is in the place of the file."""
    os.mkfifo(path := tmp_path / "hang.txt")
    answers = threading.Timer(10.0, lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    answers.start()
    since_s = time.monotonic()
    append(str(path), "report", "The report")
    assert time.monotonic() - since_s < 5
    answers.cancel()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert eventually(lambda: not any(t.name == "guardian-may-block" for t in threading.enumerate()))
    os.close(reader)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_that_nobody_reads_does_not_stop_the_guardian(is_terminal: bool) -> None:
    """Its standard error is a pipe that is full, or a terminal that has room for a few bytes only: select is ready."""
    read, write = os.openpty() if is_terminal else os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(write, b"x" * 64):
            pass
    while is_terminal and not select.select([], [write], [], 0.05)[1]:
        os.read(read, 64)
    os.set_blocking(write, True)
    saved = os.dup(2)
    os.dup2(write, 2)
    try:
        since_s = time.monotonic()
        show("text" * 100)
        assert time.monotonic() - since_s < 5
    finally:
        os.dup2(saved, 2)
        for descriptor in (saved, write, read):
            os.close(descriptor)
    assert eventually(lambda: not any(t.name == "guardian-may-block" for t in threading.enumerate()))


class Alone:
    """What reports need of the hosts, where there is one."""

    is_first = True

    def send(self, kind: str, **fields: Any) -> list[Any]:
        return []


class Watched:
    """Waits as a test says, in place of a host's ranks."""

    waits: ClassVar[dict[str, float]] = {}
    limit_s = 60.0
    views: list[View] | None = None

    def observe(self, now_s: float) -> dict[str, float]:
        return dict(self.waits)

    def look(self) -> None:
        self.views = [View(0, "host", 1, 2)]

    def seen(self) -> list[View] | None:
        views, self.views = self.views, None
        return views


A, B, C, D = {"a": 0.0}, {"b": 2.0}, {"c": 105.0}, {"d": 107.0}


@pytest.mark.parametrize(
    ("limit_s", "seen", "expected"),
    [
        (
            10,
            [(9, {}), (10, A), (11, A), (12, A | B), (109, A | B), (110, A | B), (111, A | B), (112, A), (113, {}),
             (114, {}), (115, C), (116, C), (117, D), (118, D), (119, D)],
            [
                (11, "No progress for 11 s (hang_report_s=10)"),
                (113, "The wait that was reported has ended after 113 s, and the run goes on"),
                (116, "No progress for 11 s (hang_report_s=10)"),
                (117, "The wait that was reported has ended after 12 s, and the run goes on"),
                (119, "No progress for 12 s (hang_report_s=10)"),
            ],
        ),
        (
            60,
            [(59, {}), (60, A), (61, A), (62, A | B), (63, A | B), (80, B), (81, B), (82, B), (83, B)],
            [
                (61, "No progress for 61 s (hang_report_s=60)"),
                (80, "The wait that was reported has ended after 80 s, and the run goes on"),
                (82, "No progress for 80 s (hang_report_s=60)"),
            ],
        ),
    ],
)  # fmt: skip
def test_when_a_report_is_made_again(
    limit_s: float,
    seen: list[tuple[int, dict[str, float]]],
    expected: list[tuple[int, str]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """When what was waited for has ended; other waits that join it change nothing, and are reported if they go on."""
    watch: Any = Watched()
    watch.limit_s = limit_s
    reports = HangReports(watch, Alone(), lambda: None)  # type: ignore[arg-type]
    told = []
    for now_s, waits in seen:
        watch.waits = waits
        reports.observe(float(now_s))
        lines = capfd.readouterr().err.splitlines()
        told += [(now_s, line.split(".")[0]) for line in lines if line.startswith(("No progress", "The wait"))]
    assert told == expected


class InCollective(Watched):
    """A rank whose stack ends in torch's function, and which has used ``ticks`` between two looks."""

    def __init__(self, ticks: int) -> None:
        self.waits = {"0": 0.0}  # type: ignore[misc]
        self.looks_s: list[float] = []
        self.now_s = 0.0
        self._ticks = ticks

    def observe(self, now_s: float) -> dict[str, float]:
        self.now_s = now_s
        return super().observe(now_s)

    def look(self) -> None:
        self.looks_s.append(self.now_s)
        main = (Frame("/x/torch/distributed/distributed_c10d.py", 1, "all_reduce"), Frame("train.py", 7, "step"))
        self.views = [View(0, "host", 1, 2, stacks=Stacks("", main), cpu_ticks=self._ticks * len(self.looks_s))]


@pytest.mark.parametrize("ticks", [0, 100])
def test_two_looks_at_a_collective_that_nobody_has_noted(ticks: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The second one is soon, so that the report is; and no third one, however the second one is."""
    watch: Any = InCollective(ticks)
    reports = HangReports(watch, Alone(), lambda: None)  # type: ignore[arg-type]
    for half_seconds in range(120, 240):
        reports.observe(half_seconds / 2)
    assert watch.looks_s == [60.0, 62.5]
    told = capfd.readouterr().err
    assert told.startswith("No progress for 63 s (hang_report_s=60).") if ticks == 0 else told == ""


def test_a_rank_under_way_or_at_work_is_no_hang(capfd: pytest.CaptureFixture[str]) -> None:
    """One has an announcement under way that nobody waits for, the other computes."""
    under_way = "client.flight_recorder.began('all_gather', group='data', ranks='', awaited=False); "
    busy = "end = time.time() + 3.5; exec('while time.time() < end: pass'); "
    with Job(under_way + "time.sleep(3.5); " + LEAVE, busy + LEAVE, hang_report_s=LIMIT_S) as job:
        assert job.outcome()[0] == [0, 0]
        assert job.guardian_ends()
    assert capfd.readouterr().err == ""


LIBRARY = """
import os, time
def all_reduce():
    while not os.path.exists({file!r}):
        time.sleep(0.05)
"""


def test_a_collective_that_nobody_has_noted_is_found_by_two_looks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No page has changed for the time, no processor is used, and a stack ends in torch's function twice."""
    terminal, go = Terminal(capfd), tmp_path / "go"
    code = LIBRARY.format(file=str(go))
    own = f"exec(compile({code!r}, '/x/torch/distributed/distributed_c10d.py', 'exec'), globals()); all_reduce(); "
    with Job(own + "time.sleep(1); " + LEAVE, UNTIL.format(file=str(go)) + LEAVE, hang_report_s=LIMIT_S) as job:
        assert terminal.shows("Rank 0 waits in all_reduce, called at ")
        assert terminal.shows("rank 1 has not come: it is at ")
        go.touch()
        assert job.outcome()[0] == [0, 0]
    assert terminal.text.count("No progress for") == 1


def test_ranks_of_two_hosts_in_one_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    terminal, go = Terminal(capfd), tmp_path / "go"
    work = UNTIL.format(file=str(go)) + "time.sleep(1); " + LEAVE
    with two_hosts(work, waits_in("all_reduce", go) + work, hang_report_s=LIMIT_S) as (one, two):
        assert terminal.shows("Rank 1 waits in all_reduce #1 of group data")
        assert terminal.shows("rank 0 has not come: it is at ")
        go.touch()
        assert terminal.shows(END)
        for job in (one, two):
            assert job.outcome()[0] == [0]
            assert job.guardian_ends()
    assert terminal.text.count("No progress for") == 1, "on node 0 only"


def watch_of_one(entries: list[Entry], monkeypatch: pytest.MonkeyPatch) -> HangWatch:
    """With a limit of 10 s; the rank computes nothing."""
    monkeypatch.setattr(hang_watch, "read_entries", lambda memory, slot: entries)
    process = SimpleNamespace(state=lambda: RUNNING, cpu_ticks=lambda: 7)
    ranks: Any = SimpleNamespace(at_work=[SimpleNamespace(rank=0, slot=0, process=process)])
    return HangWatch(10.0, ranks, bytes(PAGE_BYTES))


WAITING = Entry("world", "0-1", AWAITED, 14, 14, "barrier", 5.0, 1, "")


@pytest.mark.parametrize("noted", [True, False])
def test_a_pause_of_the_whole_job_is_no_wait(noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop that slept: clocks have gone on, ranks have not."""
    watch = watch_of_one([WAITING] * noted, monkeypatch)
    assert watch.observe(6.0) == {}
    watch.restart_timers(40.0)
    assert [watch.observe(now_s) for now_s in (41.0, 49.0)] == [{}, {}]
    assert len(watch.observe(52.0)) == 1


@pytest.mark.parametrize("noted", [True, False])
def test_a_wait_that_was_too_long_before_a_pause_has_not_ended(noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-Z and fg a hung run was said to go on, and reported once more."""
    watch = watch_of_one([WAITING] * noted, monkeypatch)
    for now_s in (5.0, 16.0):
        before = watch.observe(now_s)
    assert list(before.values()) == [5.0]
    watch.restart_timers(40.0)
    assert watch.observe(41.0) == before


@pytest.mark.parametrize("tick_s", [0.05, 0.5])
def test_a_rank_that_computes_is_not_asked(tick_s: float) -> None:
    """All ranks wrote their stacks several times in each step that was longer than ``hang_report_s``."""
    now_s = 0.0
    # It computes until second 30. Then it looks now and then whether others have come.
    process = SimpleNamespace(state=lambda: RUNNING, cpu_ticks=lambda: int(100 * min(now_s, 30.0) + 2 * now_s))
    ranks: Any = SimpleNamespace(at_work=[SimpleNamespace(rank=0, slot=0, process=process)])
    watch, first_s = HangWatch(10.0, ranks, bytes(PAGE_BYTES)), None
    for tick in range(int(60 / tick_s)):
        now_s = tick * tick_s
        if watch.observe(now_s) and first_s is None:
            first_s = now_s
    assert first_s == pytest.approx(40.0, abs=2 * tick_s)


def test_what_the_others_waited_in_when_a_rank_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = "told.wait(60); sys.exit(1)"
    broken = NOTE.format(operation="broadcast") + "note.broke(); "
    with Job(NOTE.format(operation="all_reduce") + told, broken + told, "time.sleep(1); os._exit(3)", WORK) as job:
        job.outcome()
        assert job.guardian_ends()
    lines = capfd.readouterr().err.splitlines()
    patterns = [
        r"Meanwhile rank 0 waited in all_reduce #1 of group data for \d\.\d s, \S+:\d+ in <module>",
        r"Meanwhile rank 1 waited in broadcast #1 of group data for \d\.\d s, \S+:\d+ in <module>",
        r"The job failed: rank 2 .*",
    ]
    assert len(lines) == len(patterns), lines
    for pattern, line in zip(patterns, lines, strict=True):
        assert re.fullmatch(pattern, line), line


def test_a_failing_rank_lets_a_guardian_that_takes_its_time_look(capfd: pytest.CaptureFixture[str]) -> None:
    """It cut its groups before the waits were read: here the guardian is stopped for a while."""
    stops = "import threading; time.sleep(0.3); os.kill(client.guardian_pid, 19); "
    goes_on = "threading.Timer(1.0, os.kill, (client.guardian_pid, 18)).start(); "
    fails = "client.failed(Failure('raised', 1)); print('seen', flush=True); os._exit(1)"
    with Job(NOTE.format(operation="all_reduce") + WORK, stops + goes_on + fails, failure_timeout_s=20) as job:
        assert job.outcome()[1][-1] == "seen\n"
        assert job.guardian_ends()
    assert "Meanwhile rank 0 waited" in capfd.readouterr().err


def test_another_host_says_what_its_ranks_waited_in(
    capfd: pytest.CaptureFixture[str],
) -> None:
    waits = NOTE.format(operation="all_reduce") + "told.wait(60) and time.sleep(1); sys.exit(1)"
    with two_hosts("time.sleep(1); os._exit(3)", waits) as (one, two):
        assert one.outcome()[0] == [3]
        assert two.outcome()[0] == [1]
        assert two.guardian_ends()
        assert one.guardian_ends()
    lines = capfd.readouterr().err.splitlines()
    assert any(line.startswith("Meanwhile rank 1 waited in all_reduce #1 of group data") for line in lines), lines
    assert sum(line.startswith("The job failed: rank 0") for line in lines) == 2, "a line of each host"


class Late:
    """A question to a rank that has just come onto a core when it is looked at for the third time."""

    def __init__(self, *_: object) -> None:
        self.looks = 0

    def is_answered(self) -> bool:
        self.looks += 1
        return self.looks > 2

    def answer(self) -> Stacks:
        return Stacks("", (Frame("train.py", 7, "step"),) if self.looks > 2 else ())


def test_a_rank_that_answers_late_on_a_busy_machine_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guardian had waited 0.4 s by the clock, most of them for a core, and told no place."""
    monkeypatch.setattr(hang_watch, "read_entries", lambda memory, slot: [WAITING])
    monkeypatch.setattr(hang_watch, "Question", Late)
    monkeypatch.setattr(hang_watch, "_PAUSE_S", 0.5)
    ranks: Any = SimpleNamespace(at_work=[SimpleNamespace(rank=0, slot=0, process=None, stack_signal=None)])
    assert HangWatch(None, ranks, b"").last_waits(failed=1, now_s=8.0) == [
        "rank 0 waited in barrier #14 of group world for 3.0 s, train.py:7 in step"
    ]


def test_a_hang_report_gives_ranks_three_seconds_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """They had the 0.4 s of a failure, by a second constant of the same name."""
    now_s = 0.0
    monkeypatch.setattr(hang_watch, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(hang_watch, "Question", lambda *_: SimpleNamespace(is_answered=lambda: False))
    monkeypatch.setattr(HangWatch, "_view", lambda self, rank, question: "view")
    process = SimpleNamespace(state=lambda: RUNNING)
    rank = SimpleNamespace(rank=0, finished=False, lost_since_s=None, process=process, stack_signal=None)
    ranks: Any = [rank]
    watch = HangWatch(None, ranks, b"")
    assert watch.seen() is None
    for _ in range(3):
        watch.look()  # one at a time
    now_s = 2.9
    assert watch.seen() is None
    now_s = 3.0
    assert watch.seen() == ["view"]
    assert watch.seen() is None


def test_a_rank_that_the_failure_reaches_meanwhile_is_named_where_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it is asked for its stack after it has left the collective."""
    looks = [[WAITING], [WAITING._replace(state=BROKEN, place="train.py:7 in validation_step")]]
    monkeypatch.setattr(
        "lightning_multigpu.job.guardian.hang.hang_watch.read_entries", lambda memory, slot: looks.pop(0)
    )
    process = SimpleNamespace(pid=1, state=lambda: "S")
    ranks: Any = SimpleNamespace(at_work=[SimpleNamespace(rank=0, slot=0, process=process, stack_signal=None)])
    assert HangWatch(None, ranks, b"").last_waits(failed=1, now_s=8.0) == [
        "rank 0 waited in barrier #14 of group world for 3.0 s, train.py:7 in validation_step"
    ]
