"""What ranks and hosts that are trusted say wrongly, and files that others have put in the way, end no guardian."""

from __future__ import annotations

import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from benchmarks.guardian_fuzz_trusted import Guarded
from lightning_multigpu.job.guardian import Guardian, proc
from lightning_multigpu.job.guardian.blocking import done_within
from lightning_multigpu.job.guardian.failure import Failure
from lightning_multigpu.job.guardian.hang import hang_reports, waits
from lightning_multigpu.job.guardian.hang.flight_recorder import AWAITED, PAGE_BYTES, Entry, parse_ranks
from lightning_multigpu.job.guardian.hang.waiting_graph import View, verdict
from lightning_multigpu.job.guardian.hang.waits import in_message
from lightning_multigpu.job.guardian.protocol import Connection, encode
from lightning_multigpu.job.guardian.shutdown import Shutdown
from lightning_multigpu.job.guardian.workers import Workers, remove_temporary
from tests.job.guardian.job import eventually
from tests.job.guardian.test_star import Network

pytestmark = pytest.mark.launch


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    guarded = Guarded()
    yield guarded
    guarded.end()


def test_who_never_stops_speaking_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guardian read on for as long as a rank or a host sent faster than it could read."""
    one, other = socket.socketpair()
    with other:
        connection = Connection(one)
        monkeypatch.setattr(connection, "_read", lambda: encode("alive"))
        assert len(list(itertools.islice(connection.arriving(), 1_000))) < 1_000
        connection.close()


@pytest.mark.parametrize("age_s", [math.nan, -1e308])
def test_a_failure_of_no_age_keeps_no_rank_alive(age_s: float) -> None:
    """The time at which ranks are killed was never over."""
    with Network(2) as network:
        network.nodes[1].connection_to(0).send("failure", failure=Failure("forged").to_message(), age_s=age_s)
        network.go_on(1)
        assert f"a failure is {age_s} s old; it must be 0 or more" in network.nodes[0].found[0]


def test_a_guardian_meets_the_hosts_once_and_a_number_that_can_be(guarded: Guarded) -> None:
    """A guardian of 2**40 hosts made room for all of them."""
    hosts = guarded.watchdog._hosts
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(ValueError, match=r"the job has 1099511627776 hosts; it must be 1 to 16384"):
            hosts.listen(listener, num_nodes=1 << 40, secret="s", now_s=0.0)
        with pytest.raises(ValueError, match="knows the other hosts already"):
            hosts.listen(listener, num_nodes=2, secret="other", now_s=0.0)


@pytest.mark.parametrize("text", ["0-99999999999", "0-" + "9" * 30, "5-x", "x", "0-9:0"])
def test_members_that_a_rank_has_spoilt_are_unknown(text: str) -> None:
    assert parse_ranks(text) == ()


def test_a_failure_and_many_long_waits_fit_into_a_message(guarded: Guarded) -> None:
    """A name, or the lines of many ranks, made the message too long, and nobody was told of the failure."""
    failure = Failure(
        "x" * 9_000, host="é" * 60_000, error_type="y" * 60_000, message="x" * 9_000, traceback="é" * 64_000
    )
    encode("failure", failure=failure.to_message(), waited=in_message(["é" * 1_000] * 1_000))
    guarded.watchdog._fail(failure, 0.0)
    for _ in range(2):
        guarded.watchdog._handle_host("a host", {"kind": "waited", "lines": ["é" * 1_000] * 1_000})
    assert guarded.watchdog._shutdown is not None
    assert len(guarded.watchdog._shutdown.waits) == 128


def test_stacks_are_asked_for_once_at_a_time(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question of a host was kept until the ones before it had been answered."""
    monkeypatch.setattr(waits._Round, "is_over", lambda self: False)
    for _ in range(3):
        guarded.watchdog._handle_host("a host", {"kind": "look"})
    assert len(guarded.watchdog._hang_watch._wanted) == 1


def test_many_who_have_not_come_are_counted() -> None:
    """One row of a page could name so many members that the report took minutes, and more memory than there was."""
    row = Entry("data", "0-16383", 2, AWAITED, 3, 3, "all_reduce", 8, 9.0, 7, "")
    (line,) = verdict([View(0, "h", 1, 2, (row,))])
    assert line.endswith("; nothing is known of rank 16; 16367 more ranks are not there")


def test_a_process_that_cannot_be_looked_at_ends_no_guardian(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a free descriptor, the word of the process that had started a rank ended the guardian."""

    def refuse(pid: int) -> NoReturn:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(proc, "read_stat", refuse)
    owner = Connection(guarded.owner)
    owner.send("started", rank=0, pid=os.getpid())
    guarded.turn()
    assert len(guarded.watchdog._ranks) == 0
    monkeypatch.undo()
    owner.send("started", rank=0, pid=os.getpid())
    guarded.turn()
    assert len(guarded.watchdog._ranks) == 1


def test_a_thread_that_cannot_be_started_ends_no_guardian(monkeypatch: pytest.MonkeyPatch) -> None:
    """At pids.max of a container: the guardian ended, and all ranks with it."""

    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        workers = Workers()
        with monkeypatch.context() as context:
            context.setattr(threading.Thread, "start", refuse)
            assert not done_within(1.0, lambda: None)
            workers.note(os.getpid(), ())
        workers.note(os.getpid(), ())
        assert child in workers._noted[os.getpid()], "read again as soon as a thread can be started"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_rank_cannot_cut_the_shared_memory_short() -> None:
    """The guardian's next look at it ended in SIGBUS."""
    guardian = Guardian.start(num_ranks=1)
    try:
        found = [
            entry for entry in Path(f"/proc/{guardian.pid}/fd").iterdir() if "guardian-pages" in os.readlink(entry)
        ]
        descriptor = os.open(found[0], os.O_RDWR)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        assert os.pwrite(descriptor, b"x", PAGE_BYTES - 1) == 1
        os.close(descriptor)
    finally:
        guardian.stop()


def test_a_process_that_has_left_its_connection_to_another_is_refused(guarded: Guarded) -> None:
    """The kernel cannot say any more in which container it was."""
    child = os.fork()
    if not child:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + guarded.address)
        if os.fork():
            os._exit(0)
        os._exit(b"it is a process that has ended" not in sock.recv(1_000))
    assert os.waitpid(child, 0)[1] == 0
    guarded.turn()
    assert not guarded.watchdog._strangers


def test_a_link_in_place_of_a_directory_is_not_followed(tmp_path: Path) -> None:
    """Whoever put it there, once a rank had removed its own, had the guardian remove this user's files."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    (tmp_path / "pymp-x").symlink_to("mine")
    remove_temporary(str(tmp_path / "pymp-x"))
    remove_temporary(str(tmp_path / "pymp-\0"))
    assert (tmp_path / "mine" / "precious").exists()


def test_a_link_in_place_of_a_report_is_not_written_through(
    tmp_path: Path, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others may write to the run's directory, they chose a file of this user, and the report went into it."""
    (tmp_path / "mine").write_text("precious")
    for name in ("hang.txt", f".failure.txt.{os.getpid()}"):
        (tmp_path / name).symlink_to("mine")
    printed: list[str] = []
    monkeypatch.setattr(hang_reports, "_print", printed.append)
    hang_reports._append(str(tmp_path / "hang.txt"), "report")
    assert "Too many levels of symbolic links" in printed[0]
    shutdown = Shutdown(Failure("x"), 0.0, 1.0)
    shutdown.write(str(tmp_path / "failure.txt"), guarded.watchdog._ranks)
    assert (tmp_path / "mine").read_text() == "precious"
    Shutdown(Failure("x"), 0.0, 1.0).write(str(tmp_path / "failure.txt"), guarded.watchdog._ranks)
    assert eventually(lambda: "The job failed: x" in (tmp_path / "failure.txt").read_text())
