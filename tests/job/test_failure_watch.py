"""A rank that is told of a failure, without a job."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_multigpu._lightning_internals import EndOfRun
from lightning_multigpu.communication.rendezvous import RendezvousError
from lightning_multigpu.job.failure_watch import FailureWatch
from lightning_multigpu.job.guardian import Failure, RankFailedError
from lightning_multigpu.job.launchers.spawn_launcher import SpawnLauncher
from lightning_multigpu.job.run_context import RunContext
from lightning_multigpu.job.run_signals import RunSignals
from tests import preforked

LOST = RuntimeError("Connection closed by peer")
KILLED = Failure("was ended by SIGKILL", 1, "h", 7, 3)
RUN = RunContext(
    environment=LightningEnvironment(),
    devices=(torch.device("cpu"),) * 2,
    num_nodes=1,
    backend=None,
    failure_timeout_s=5.0,
    hang_report_s=None,
    join_timeout_s=60.0,
)


class Client:
    """The connection to a guardian, which may know of another failure when this rank tells its own."""

    def __init__(self, watch: FailureWatch, known: Failure | None = None) -> None:
        self.watch, self.known = watch, known
        self.told: list[Failure] = []

    def failed(self, failure: Failure) -> None:
        self.told.append(failure)
        self.watch.receive(self.known or failure)


@pytest.fixture
def watch() -> FailureWatch:
    return FailureWatch(RunSignals())


def under(watch: FailureWatch, known: Failure | None = None) -> Client:
    client: Any = Client(watch, known)
    watch.client = client
    return client  # type: ignore[no-any-return]


SILENT = Failure("node 1 has received nothing from node 0")


@pytest.mark.parametrize(
    ("error", "failure"),
    [(LOST, SILENT), (LOST, KILLED), (SIGTERMException(), KILLED)],
    ids=["a silent host", "a killed rank", "SIGTERM of a launcher that has seen a rank end"],
)
def test_what_the_end_of_another_rank_brings_is_the_failure_that_the_guardian_tells(
    error: BaseException, failure: Failure, watch: FailureWatch
) -> None:
    client = under(watch)
    cuts: list[int] = []
    watch.joined(lambda: cuts.append(1), 2)
    threading.Timer(0.2, watch.receive, [failure]).start()  # it tells later than the back end
    assert watch.settle(error, RUN, 3) is failure
    assert cuts == [1]
    assert not client.told, "this rank has not failed"


def test_a_spawned_rank_cannot_be_tuned(watch: FailureWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that has spawned it keeps its own module."""

    def tune() -> None:
        raise EndOfRun

    monkeypatch.setenv("LOCAL_RANK", "0")
    sent: list[bytes] = []
    launcher: Any = SimpleNamespace(run=RUN, joining=SimpleNamespace(watch=watch, begin=lambda run, address: None))
    answers: Any = SimpleNamespace(send_bytes=sent.append)
    with pytest.raises(SystemExit):
        SpawnLauncher.run_rank(launcher, None, tune, (), {}, None, 0, answers, "")
    assert "raised ValueError: a Tuner changes the module of the process" in pickle.loads(sent[0]).what


def test_news_of_a_worker_does_not_keep_a_failure_from_being_told(
    watch: FailureWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader's worker has died: reading from it fails, and a moment later torch raises from its signal handler."""

    def raise_(*_: Any) -> None:
        raise RuntimeError("a worker has died")

    def interrupted(*args: Any, **kwargs: Any) -> Failure:
        os.kill(os.getpid(), signal.SIGCHLD)
        return of(*args, **kwargs)

    client, of = under(watch), Failure.of
    monkeypatch.setattr(Failure, "of", interrupted)
    before = signal.signal(signal.SIGCHLD, raise_)
    try:
        assert watch.settle(ConnectionResetError("a queue"), RUN, 3) is None
        assert signal.getsignal(signal.SIGCHLD) is raise_
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert [failure.what for failure in client.told] == ["raised ConnectionResetError: a queue"]


def test_two_ranks_fail_at_once(watch: FailureWatch) -> None:
    """Where all ranks raised the same exception, each printed its traceback."""
    under(watch, known=KILLED)
    assert watch.settle(ValueError("spoilt"), RUN, 3) is KILLED
    assert watch.failure is KILLED
    watch.failure, error = None, ValueError("spoilt")
    under(watch, known=Failure.of(error, rank=1, step=3))
    assert watch.settle(error, RUN, 3) is None, "it raises its own exception"


def test_every_rank_says_itself_that_it_cannot_join(watch: FailureWatch) -> None:
    under(watch)
    error = RendezvousError("the models differ")
    watch.receive(Failure.of(error, rank=1, step=0))
    assert watch.settle(error, RUN, None) is None
    assert watch.settle(RendezvousError("rank 2 is missing"), RUN, 3) is not None, "at another step"


def test_without_a_guardian_a_rank_raises_what_torch_has_raised(watch: FailureWatch) -> None:
    begin = time.monotonic()
    assert watch.settle(LOST, RUN, 3) is None
    assert time.monotonic() - begin < 1


def test_a_failure_that_came_while_the_ranks_joined(watch: FailureWatch) -> None:
    watch.begin(lambda: None)
    watch.receive(KILLED)
    with pytest.raises(RankFailedError, match=r"rank 1 .* was ended by SIGKILL"):
        watch.joined(lambda: None, 2)


EXIT = """
import sys, threading, time
from lightning_multigpu.job.uncaught_errors import EXIT
def fail():
    error = ValueError("spoilt")
    EXIT.after(error, 0.2)
    raise error
def catch():
    try: fail()
    except ValueError: pass
{before}
threading.Thread(target=time.sleep, args=[{thread_s}]).start()
time.sleep(0.5)  # a program that goes on is left in peace
print("goes on", flush=True)
{ends}
"""


@pytest.mark.parametrize(
    ("before", "thread_s", "ends", "status"),
    [
        pytest.param("", 60, "fail()", -signal.SIGALRM, id="a failure"),
        pytest.param("sys.excepthook = print", 60, "fail()", -signal.SIGALRM, id="with the program's own hook"),
        pytest.param("catch()", 1, "", 0, id="a failure that the program survives"),
        pytest.param("EXIT.after(SystemExit(), 0.2)", 60, "sys.exit(1)", -signal.SIGALRM, id="a signal"),
        pytest.param("EXIT.after(SystemExit(), 0.2); EXIT.forget()", 1, "", 0, id="a further run after a signal"),
    ],
)
def test_the_exit_after_a_failure_ends(before: str, thread_s: float, ends: str, status: int) -> None:
    """A thread of the program, such as an uploader's, kept the first rank for ever: the limit began after all threads.

    After a failure that the program had caught, the end of a logger's upload was cut.
    """
    command = [sys.executable, "-c", EXIT.format(before=before, thread_s=thread_s, ends=ends)]
    with preforked.Process(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "goes on\n"
        begin = time.monotonic()
        assert process.wait(timeout=120) == status
    assert time.monotonic() - begin < 55
