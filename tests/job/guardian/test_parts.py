"""Messages, /proc and the judgement of states, without a guardian."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from lightning_multigpu.job.guardian.blocking import done_within, print_text
from lightning_multigpu.job.guardian.failure import MAX_TRACEBACK, MAX_WHAT, Failure
from lightning_multigpu.job.guardian.hang.flight_recorder import PAGE_BYTES
from lightning_multigpu.job.guardian.proc import ENDED, RUNNING, STOPPED, WatchedProcess, parse_stat, read_stat
from lightning_multigpu.job.guardian.protocol import MAX_LINE_BYTES, Connection, ProtocolError, decode, encode
from lightning_multigpu.job.guardian.ranks import Ranks, Shutdown
from lightning_multigpu.job.guardian.watchdog import Watchdog
from tests.job.guardian.job import eventually


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    ends = [Connection(sock) for sock in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def test_messages_arrive_whole_and_in_order(pair: tuple[Connection, Connection]) -> None:
    line = encode("b", text="ä\n")
    pair[0].send("a", number=1)
    pair[0].socket.send(line[:5])
    assert list(pair[1].arriving()) == [{"kind": "a", "number": 1}]
    pair[0].socket.send(line[5:])
    assert list(pair[1].arriving()) == [{"kind": "b", "text": "ä\n"}]
    assert list(pair[1].arriving()) == []
    assert not pair[1].closed
    pair[0].send("leave")
    pair[0].close()
    assert list(pair[1].arriving()) == [{"kind": "leave"}], "what was sent before the end still arrives"
    assert pair[1].closed


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1", b"[]", b'{"kind": 3}', b"{}", b"\xff", b"[" * 100_000])
def test_what_is_no_message_closes_the_connection(line: bytes, pair: tuple[Connection, Connection]) -> None:
    with pytest.raises(ProtocolError, match="not a message of a guardian"):
        decode(line)
    pair[0].socket.send(line + b"\n")
    assert list(pair[1].arriving()) == []
    assert pair[1].closed


def test_a_line_without_end_is_not_read_for_ever(pair: tuple[Connection, Connection]) -> None:
    for _ in range(2):
        pair[0].socket.send(b"x" * (MAX_LINE_BYTES // 2 + 1))
        list(pair[1].arriving())
    assert pair[1].closed
    with pytest.raises(ProtocolError, match=f"the limit is {MAX_LINE_BYTES}"):
        encode("a", text="x" * MAX_LINE_BYTES)


def test_who_does_not_read_is_given_up(pair: tuple[Connection, Connection]) -> None:
    for _ in range(1000):
        pair[0].send("a", text="x" * 10_000)
    assert pair[0].closed


@pytest.mark.parametrize("char", ["a", "\0", "é", "\U0001f40d", "\ud800"])
def test_the_longest_failure_fits_into_a_message(char: str) -> None:
    """One of many emojis did not: in place of the user's error came that of a message that is too long."""
    text = char * 200_000
    failure = Failure(f"start{text}", 1, text, 2, 3, text, f"{text}end", error_type=text, message=f"start{text}")
    told = Failure(**decode(encode("failure", failure=failure.to_message()))["failure"])
    assert (told.rank, told.pid, told.step) == (1, 2, 3)
    assert [len(text) for text in (told.what, told.message, told.traceback)] == [MAX_WHAT, MAX_WHAT, MAX_TRACEBACK]
    assert told.what.startswith("start")
    assert told.traceback.endswith("end")


def test_a_program_may_have_any_name() -> None:
    fields = ["T", *["0"] * 18, "4711", *["0"] * 29, "9"]
    stat = parse_stat(f"12 (a) R (b c) {' '.join(fields)}")
    assert stat == ("T", 4711, 9)


def test_the_states_of_a_process(sleeper: subprocess.Popen[bytes]) -> None:
    watched = WatchedProcess(sleeper.pid)
    assert watched.state() == RUNNING
    assert watched.exit_code() is None
    sleeper.send_signal(signal.SIGSTOP)
    assert eventually(lambda: watched.state() == STOPPED)
    watched.kill()
    assert eventually(lambda: watched.state() == ENDED), "a zombie has ended"
    assert watched.exit_code() == -signal.SIGKILL
    sleeper.wait()
    assert watched.state() == ENDED
    assert watched.exit_code() == -signal.SIGKILL
    watched.close()
    with pytest.raises(ProcessLookupError):
        WatchedProcess(sleeper.pid)


def test_a_later_process_with_the_same_pid_is_another_one(sleeper: subprocess.Popen[bytes]) -> None:
    watched = WatchedProcess(sleeper.pid)
    stat = read_stat(sleeper.pid)
    assert stat is not None
    watched._start_ticks = stat.start_ticks - 1
    watched.close()
    assert watched.state() == ENDED
    watched.kill()
    assert sleeper.poll() is None, "not the one that was watched"


class FakeProcess:
    def __init__(self, pid: int) -> None:
        self.pid, self.now = pid, RUNNING
        self.code: int | None = None

    def state(self) -> str:
        return self.now

    def exit_code(self) -> int | None:
        return self.code


def _set(ranks: Any, rank: int, state: str, code: int | None = None) -> Any:
    watched = ranks.get(rank)
    watched.process.now, watched.process.code = state, code
    return watched


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two ranks that may be stopped for 5 s."""
    monkeypatch.setattr("lightning_multigpu.job.guardian.ranks.WatchedProcess", FakeProcess)
    found = Ranks(2, stopped_limit_s=5.0)
    for rank in range(2):
        found.add(rank, 100 + rank)
    return found


def test_a_rank_may_be_stopped_for_a_while(ranks: Any) -> None:
    _set(ranks, 1, STOPPED)
    assert [ranks.observe(now) for now in (10.0, 15.0)] == [None, None]
    found = ranks.observe(15.1)
    assert (found.rank, found.age_s) == (1, pytest.approx(5.1))


def test_a_failure_that_was_found_late_leaves_less_time() -> None:
    shutdown = Shutdown(Failure("is silent", age_s=5.0), 100.0, 10.0, [])
    assert [shutdown.is_late(now) for now in (103.9, 104.1)] == [False, True]


def test_the_guardians_own_pause_gives_everyone_a_fresh_allowance(ranks: Any) -> None:
    _set(ranks, 1, STOPPED)
    ranks.observe(10.0)
    ranks.restart_timers()
    assert [ranks.observe(now) for now in (60.0, 65.0)] == [None, None]
    assert ranks.observe(65.1) is not None


def test_when_all_are_stopped_nobody_waits_unless_there_are_other_hosts(ranks: Any) -> None:
    for rank in range(2):
        _set(ranks, rank, STOPPED)
    assert [ranks.observe(now) for now in (10.0, 60.0)] == [None, None]
    _set(ranks, 0, RUNNING)
    assert [ranks.observe(now) for now in (61.0, 66.0)] == [None, None]
    assert ranks.observe(66.1) is not None
    _set(ranks, 0, STOPPED)
    ranks.others_wait = True
    assert ranks.observe(70.0) is not None


@pytest.fixture
def watchdog(ranks: Any, pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A guardian's main loop in this process, on a clock that reads 1 s and then 61 s; the pair connects rank 1."""
    listener, link, *others = (*socket.socketpair(), *socket.socketpair())
    settings = {"num_ranks": 2, "owner_pid": os.getpid(), "failure_timeout_s": 10.0, "hang_report_s": None}
    pages = os.memfd_create("pages")
    os.ftruncate(pages, 2 * PAGE_BYTES)
    found: Any = Watchdog({**settings, "listener": listener.detach(), "owner_link": link.detach(), "pages": pages})
    found._ranks, found._connections[pair[0]] = ranks, ranks.get(1)
    monkeypatch.setattr(found, "_serve", lambda: None)
    monkeypatch.setattr("lightning_multigpu.job.guardian.watchdog.clock_s", iter([1.0, 61.0]).__next__)
    yield found
    os.close(pages)
    for each in (*others, found._listener, found._owner_link, found._owner, found._selector, found._pages):
        each.close()


def test_ranks_that_go_on_after_the_guardian_have_not_been_stopped_for_so_long(watchdog: Any) -> None:
    _set(watchdog._ranks, 1, STOPPED)
    for _ in range(2):
        watchdog.turn()
    assert watchdog._shutdown is None


def test_what_a_rank_has_said_before_its_end_counts_first(watchdog: Any, pair: tuple[Connection, Connection]) -> None:
    """It has left, and ended with an error, since the guardian read messages."""
    pair[1].send("leave", run=1)
    _set(watchdog._ranks, 1, ENDED, 3)
    watchdog.turn()
    assert watchdog._shutdown is None


def test_of_two_ends_the_signal_comes_first(ranks: Any) -> None:
    _set(ranks, 0, ENDED, 1)
    _set(ranks, 1, ENDED, -9)
    assert ranks.observe(1.0).rank == 1


def test_the_word_of_the_parent_counts_where_the_kernel_keeps_no_status(ranks: Any) -> None:
    rank = _set(ranks, 0, ENDED, None)
    assert ranks.observe(1.0) is None
    rank.reported_exit_code = 0
    assert ranks.observe(1.5) is None, "its last message may be on its way"
    rank.reported_exit_code = 3
    assert "ended with exit status 3" in ranks.observe(1.6).what
    rank.finished = True
    _set(ranks, 1, ENDED, None)
    assert ranks.observe(2.0) is None
    assert "unknown exit status" in ranks.observe(3.1).what


def test_a_rank_is_one_process(ranks: Any) -> None:
    assert ranks.add(0, 100) is ranks.get(0)
    with pytest.raises(ValueError, match="rank 0 is the process 100 already"):
        ranks.add(0, os.getpid())
    with pytest.raises(ValueError, match=r"rank 2 .* is one too many"):
        ranks.add(2, os.getpid())


def test_a_thread_that_cannot_be_started_ends_no_guardian(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At pids.max of a container: the guardian ended, and all ranks with it."""

    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not done_within(1.0, lambda: None)
    print_text("shown")
    assert capfd.readouterr().err == "shown"


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
        print_text("text" * 100)
        assert time.monotonic() - since_s < 5
    finally:
        os.dup2(saved, 2)
        for descriptor in (saved, write, read):
            os.close(descriptor)
    assert eventually(lambda: not any(t.name == "guardian-may-block" for t in threading.enumerate()))
