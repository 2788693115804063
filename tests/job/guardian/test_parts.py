"""Messages, /proc and the judgement of states, without a guardian."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from lightning_multigpu.job.guardian import protocol
from lightning_multigpu.job.guardian.failure import MAX_TRACEBACK, MAX_WHAT, Failure
from lightning_multigpu.job.guardian.proc import (
    ENDED,
    RUNNING,
    STOPPED,
    WatchedProcess,
    parse_stat,
    read_stat,
)
from lightning_multigpu.job.guardian.protocol import (
    MAX_LINE_BYTES,
    Connection,
    ProtocolError,
    decode,
    encode,
)
from lightning_multigpu.job.guardian.ranks import Ranks
from tests.job.guardian.job import eventually


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    """Two ends of a connection."""
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


def test_what_was_sent_before_the_end_still_arrives(pair: tuple[Connection, Connection]) -> None:
    pair[0].send("leave")
    pair[0].close()
    assert list(pair[1].arriving()) == [{"kind": "leave"}]
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
    failure = Failure(
        f"start{char * 20_000}", 1, char * 64, 2, 3, f"{char * 200_000}end", message=f"start{char * 200_000}"
    )
    told = Failure.from_message(decode(encode("failure", failure=failure.to_message()))["failure"])
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
    watched.kill()
    watched.close()


def test_a_later_process_with_the_same_pid_is_another_one(sleeper: subprocess.Popen[bytes]) -> None:
    watched = WatchedProcess(sleeper.pid)
    stat = read_stat(sleeper.pid)
    assert stat is not None
    watched._start_ticks = stat.start_ticks - 1
    watched.close()
    assert watched.state() == ENDED
    watched.kill()
    assert sleeper.poll() is None, "not the one that was watched"


def test_a_process_that_cannot_be_looked_at_is_what_it_was(sleeper: subprocess.Popen[bytes]) -> None:
    """At EMFILE, ENFILE and ENOMEM: healthy ranks were taken for dead."""
    watched = WatchedProcess(sleeper.pid)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            read_stat(sleeper.pid)
        assert watched.state() == RUNNING
        sleeper.kill()
        assert eventually(lambda: watched.state() == ENDED), "its pidfd tells"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert watched.state() == ENDED
    watched.close()


def test_a_guardian_without_a_descriptor_left_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has connected stays at the listener, which is ready at once again."""
    pauses: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(False)
        monkeypatch.setattr(time, "sleep", pauses.append)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
        try:
            assert list(protocol.accepted(listener)) == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert len(pauses) == 1
        for accepted in protocol.accepted(listener):
            accepted.close()
        assert len(pauses) == 1, "nor does it wait otherwise"


def test_a_process_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    process.wait()
    with pytest.raises(ProcessLookupError):
        WatchedProcess(process.pid)


class FakeProcess:
    """A process in a state that the test sets."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.now = RUNNING
        self.code: int | None = None

    def state(self) -> str:
        return self.now

    def exit_code(self) -> int | None:
        return self.code


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Two ranks that may be stopped for 5 s."""
    monkeypatch.setattr("lightning_multigpu.job.guardian.ranks.WatchedProcess", FakeProcess)
    found = Ranks(2, stopped_limit_s=5.0)
    for rank in range(2):
        found.add(rank, 100 + rank)
    return found


def _set(ranks: Ranks, rank: int, state: str, code: int | None = None) -> None:
    watched = ranks.get(rank)
    assert watched is not None
    assert isinstance(watched.process, FakeProcess)
    watched.process.now, watched.process.code = state, code


def test_a_rank_may_be_stopped_for_a_while(ranks: Ranks) -> None:
    _set(ranks, 1, STOPPED)
    assert [ranks.observe(now) for now in (10.0, 15.0)] == [None, None]
    found = ranks.observe(15.1)
    assert found is not None
    assert (found.failure.rank, found.since_s) == (1, 10.0)


def test_the_guardians_own_pause_gives_everyone_a_fresh_allowance(ranks: Ranks) -> None:
    _set(ranks, 1, STOPPED)
    ranks.observe(10.0)
    ranks.restart_timers()
    assert [ranks.observe(now) for now in (60.0, 65.0)] == [None, None]
    assert ranks.observe(65.1) is not None


def test_when_all_are_stopped_nobody_waits_unless_there_are_other_hosts(ranks: Ranks) -> None:
    for rank in range(2):
        _set(ranks, rank, STOPPED)
    assert [ranks.observe(now) for now in (10.0, 60.0)] == [None, None]
    _set(ranks, 0, RUNNING)
    assert [ranks.observe(now) for now in (61.0, 66.0)] == [None, None]
    assert ranks.observe(66.1) is not None
    _set(ranks, 0, STOPPED)
    ranks.others_wait = True
    assert ranks.observe(70.0) is not None


def test_of_two_ends_the_signal_comes_first(ranks: Ranks) -> None:
    _set(ranks, 0, ENDED, 1)
    _set(ranks, 1, ENDED, -9)
    found = ranks.observe(1.0)
    assert found is not None
    assert found.failure.rank == 1


def test_the_word_of_the_parent_counts_where_the_kernel_keeps_no_status(ranks: Ranks) -> None:
    _set(ranks, 0, ENDED, None)
    assert ranks.observe(1.0) is None
    rank = ranks.get(0)
    assert rank is not None
    rank.reported_exit_code = 0
    assert ranks.observe(1.5) is None, "its last message may be on its way"
    rank.reported_exit_code = 3
    found = ranks.observe(1.6)
    assert found is not None
    assert "ended with exit status 3" in found.failure.what
    rank.finished = True
    _set(ranks, 1, ENDED, None)
    assert ranks.observe(2.0) is None
    found = ranks.observe(3.1)
    assert found is not None
    assert "unknown exit status" in found.failure.what


def test_when_a_rank_ends_without_an_error(ranks: Ranks) -> None:
    rank = ranks.get(0)
    assert rank is not None
    _set(ranks, 0, ENDED, 0)
    for joining_until_s, introduced, when in (
        (None, True, "in the middle of the run"),
        (60.0, True, "before it joined the run"),
        (None, False, "before it joined the run"),
    ):
        rank.joining_until_s, rank.introduced, rank.ended_since_s = joining_until_s, introduced, 0.0
        found = ranks.observe(2.0)
        assert found is not None
        assert found.failure.what == f"ended with exit status 0 {when}"


def test_who_has_finished_is_not_looked_at(ranks: Ranks) -> None:
    rank = ranks.get(1)
    assert rank is not None
    rank.finished = True
    _set(ranks, 1, ENDED, 3)
    assert ranks.observe(1.0) is None
    assert [rank.rank for rank in ranks.at_work] == [0]


def test_two_processes_are_not_one_rank(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="rank 0 is the process 100 already"):
        ranks.add(0, os.getpid())


def test_who_starts_a_rank_may_have_started_only_its_parent(ranks: Ranks) -> None:
    """A wrapper such as numactl starts the rank; what it says first counts, whatever its parent says later."""
    more = Ranks(2, stopped_limit_s=5.0)
    more.add(0, 500, introduced=False)
    rank = more.add(0, 501)
    assert (rank.process.pid, rank.slot, len(more)) == (501, 0, 1)
    rank.finished = True
    assert more.add(0, 500, introduced=False) is rank
    assert rank.finished
    with pytest.raises(ValueError, match="rank 0 is the process 501 already"):
        more.add(0, os.getpid())
    assert more.add(1, 502, introduced=False) is more.add(1, 502)
    with pytest.raises(ValueError, match="rank 1 is the process 502 already"):
        more.add(1, os.getpid())
