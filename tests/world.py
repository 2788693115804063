"""A world of ranks that lives as long as the test session, and starts in no time: see :mod:`tests.preforked`.

A test writes a function, and every rank runs it::

    def sum_of_ranks():
        init_group()
        total = torch.tensor([float(rank())])
        dist.all_reduce(total)
        return total.item()

    def test_sum(world4):
        assert world4.run(sum_of_ranks) == [6.0] * 4

Within a call ``LOCAL_RANK``, ``NODE_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set, so a Lightning
``Trainer(devices=4, ...)`` sees processes that were started from outside and starts none.
"""

import contextlib
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from tests import preforked
from tests.leaks import OWN_PROCESSES
from tests.rank import STACKS_SIGNAL, Call, init_group, rank, world_size

__all__ = ["DeadlineError", "LeakError", "RankDiedError", "RankError", "World", "init_group", "rank", "world_size"]

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_REPOSITORY = Path(__file__).resolve().parent.parent
_START_TIMEOUT_S = 180.0
_CLEAN_UP_TIMEOUT_S = 60.0  # as a call: a busy virtual machine was seen to let a process stand still for 20 s
_STACKS_TIMEOUT_S = 5.0
_CAUSE_TIMEOUT_S = 15.0
_OUTPUT_SHOWN = 6000  # characters a rank
_FIRST_PORT, _PORTS_OF_A_WORKER, _MAX_WORKERS = 20000, 750, 16


class RankError(RuntimeError):
    """A rank raised an exception that cannot be pickled; its text is in the message."""


class RankDiedError(RuntimeError):
    """A rank's process ended in the middle of a call."""


class DeadlineError(TimeoutError):
    """Some ranks did not finish in time; the message shows where they stood."""


class LeakError(AssertionError):
    """A call left something behind: a thread, a child process, an open file, a changed setting, a file."""


class World:
    """``num_ranks`` processes that run functions together.

    The processes start at the first :meth:`run`. After a failure they are killed, since the others may hang in a
    collective that the failed one never joined, and new ones start with the next call. If they ``may_leak``, a call may
    leave something behind in its process, as a GPU's driver does.
    """

    def __init__(self, num_ranks: int, *, may_leak: bool = False) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks}: a world has at least 1 rank")
        self.num_ranks = num_ranks
        self._may_leak = may_leak
        self.processes: list[preforked.Process] = []
        self._connections: list[Connection] = []
        self._death_watches: list[int] = []
        self._directory = Path()
        self._offsets: list[int] = []

    def run(self, function: Callable[..., T], *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[T]:
        """Runs ``function(*args, **kwargs)`` in every rank and returns what they returned, in rank order.

        The function may be a closure. The ranks share a fresh working directory that must be empty again afterwards,
        and the warning filters of the test. Where the function is to raise on every rank, see :meth:`run_raising`.

        Raises:
            DeadlineError: a rank has not returned after ``timeout_s``.
            RankDiedError: a process ended.
            RankError: a rank raised what cannot be pickled; any other exception arrives as itself, that of the rank
                that raised first, with that rank's traceback as a note.
            LeakError: the function returned everywhere, but left something behind.
        """
        with self._call(function, args, kwargs):
            answers = self._receive_all("result", timeout_s)
        return [pickle.loads(answer[1]) for answer in answers]

    def run_raising(
        self,
        error: type[E],
        match: str,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        **kwargs: Any,
    ) -> list[E]:
        """Runs the function as :meth:`run` does; every rank must raise ``error`` with a message that ``match`` finds.

        A rank that only ends because another one has raised may say so instead. The ranks live on, unless something is
        left of the call. Returns what the ranks raised that know the cause, in rank order.
        """
        with self._call(function, args, kwargs, may_raise=True):
            answers = self._receive_all("raised or result", timeout_s)
            raised = {r: answer for r, answer in enumerate(answers) if answer[0] == "raised"}
            causes = {r: answer for r, answer in raised.items() if _tells_the_cause(answer)}
            errors = [self._exception_of(r, *answer[2:4]) for r, answer in (causes or raised).items()]
            for found in errors:
                if not isinstance(found, error) or not re.search(match, str(found)):
                    raise found
            quiet = [r for r, answer in enumerate(answers) if answer[0] != "raised"]
            assert not quiet, f"rank(s) {quiet} of {self.num_ranks} did not raise {error.__name__}\n{self._outputs()}"
        return errors

    def output(self, rank: int) -> str:
        """What ``rank`` printed during the last call, stdout and stderr together."""
        path = self._output_path(rank)
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(self._offsets[rank])
            return file.read().decode(errors="replace")

    def kill(self) -> None:
        """Ends all ranks and what they started, at once."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self._collect()

    def close(self) -> None:
        """Lets the ranks end by themselves, and kills those that do not."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(("close",))
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        self.kill()

    @contextlib.contextmanager
    def _call(self, function: Any, args: Any, kwargs: Any, *, may_raise: bool = False) -> Iterator[None]:
        """Sends the call to all ranks; at the end of the block they clean up. After a failure they are killed."""
        payload = cloudpickle.dumps((function, args, kwargs))
        self._start()
        directory = tempfile.mkdtemp(prefix="call-", dir=self._directory)
        self._offsets = [self._output_path(r).stat().st_size for r in range(self.num_ranks)]
        call = Call(directory, free_port(), list(sys.path), list(warnings.filters), may_raise, self._may_leak)
        try:
            self._send_all(("call", payload, call))
            yield
            self._send_all(("clean up",))
            leaks = [answer[1] for answer in self._receive_all("clean", _CLEAN_UP_TIMEOUT_S)]
            if not may_raise:
                self._raise_leaks(leaks, directory)
        except BaseException:
            self.kill()
            raise
        if may_raise and any(leaks):
            self.kill()
        shutil.rmtree(directory, ignore_errors=True)  # a guardian may be writing why a run has failed on purpose

    def _start(self) -> None:
        if self.processes and all(process.poll() is None for process in self.processes):
            return
        self.kill()
        self._directory = Path(tempfile.mkdtemp(prefix=f"world{self.num_ranks}-"))
        self._offsets = [0] * self.num_ranks
        try:
            for r in range(self.num_ranks):
                self._start_rank(r)
            self._receive_all("ready", _START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    def _start_rank(self, r: int) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "LOCAL_RANK": str(r),
            "NODE_RANK": "0",
            "TESTS_WORLD_SIZE": str(self.num_ranks),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self._directory),  # a rank ends without removing what multiprocessing has put there
            "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        with theirs, self._output_path(r).open("wb") as output:
            process = preforked.Process(
                [sys.executable, "-c", f"from tests.rank import main; main({theirs.fileno()})"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd=self._directory,
            )
        OWN_PROCESSES.add(process.pid)
        self.processes.append(process)
        self._connections.append(Connection(ours.detach()))
        self._death_watches.append(os.pidfd_open(process.pid))

    def _collect(self) -> None:
        for process in self.processes:
            process.wait()
            OWN_PROCESSES.discard(process.pid)
        for connection in self._connections:
            connection.close()
        for watch in self._death_watches:
            os.close(watch)
        self.processes, self._connections, self._death_watches = [], [], []
        if self._directory != Path():
            shutil.rmtree(self._directory, ignore_errors=True)

    def _send_all(self, message: tuple[Any, ...]) -> None:
        for r, connection in enumerate(self._connections):
            try:
                connection.send(message)
            except OSError:
                raise self._death_of(r) from None

    def _receive_all(self, word: str, timeout_s: float) -> list[tuple[Any, ...]]:
        """The answer of every rank; raises for the first that fails, without waiting for the others.

        Where the call may raise, an exception is an answer like any other.
        """
        may_raise = word == "raised or result"
        deadline = time.monotonic() + timeout_s
        answers: dict[int, tuple[Any, ...]] = {}
        failures: dict[int, tuple[Any, ...]] = {}
        while missing := [r for r in range(self.num_ranks) if r not in answers and r not in failures]:
            ready = self._wait_for(missing, deadline)
            if not ready and not failures:
                raise self._lateness_of(missing, timeout_s)
            for r in ready:
                answer = self._receive(r)
                (failures if answer[0] == "raised" and not may_raise else answers)[r] = answer
            if not ready or any(_tells_the_cause(failure) for failure in failures.values()):
                break
            if failures:
                # A rank that exits because another one failed may be quicker than the one that knows why.
                deadline = min(deadline, time.monotonic() + _CAUSE_TIMEOUT_S)
        if failures:
            r, (_, _, pickled, text, _) = min(failures.items(), key=lambda f: (not _tells_the_cause(f[1]), f[1][1]))
            raise self._exception_of(r, pickled, text)
        assert all(answer[0] in word for answer in answers.values())
        return [answers[r] for r in range(self.num_ranks)]

    def _wait_for(self, ranks: Sequence[int], deadline: float) -> list[int]:
        """Those of ``ranks`` that have sent something or ended; empty when the deadline passes first."""
        watched: dict[Any, int] = {}
        for r in ranks:
            watched |= {self._connections[r]: r, self._death_watches[r]: r}
        return sorted({watched[event] for event in wait(list(watched), timeout=max(0.0, deadline - time.monotonic()))})

    def _receive(self, r: int) -> tuple[Any, ...]:
        # A message may have been sent just before the end: it tells more than the exit status.
        if not self._connections[r].poll():
            raise self._death_of(r)
        try:
            answer: tuple[Any, ...] = self._connections[r].recv()
        except (EOFError, ConnectionError):
            raise self._death_of(r) from None
        return answer

    def _exception_of(self, r: int, pickled: bytes | None, text: str) -> BaseException:
        error = RankError(text) if pickled is None else pickle.loads(pickled)
        error.add_note(f"raised first by rank {r} of {self.num_ranks}:\n{text}\n{self._outputs()}")
        return error  # type: ignore[no-any-return]

    def _death_of(self, r: int) -> RankDiedError:
        try:
            status: int | str = self.processes[r].wait(timeout=2)
        except subprocess.TimeoutExpired:
            status = "unknown: it closed its connection, but runs on"
        return RankDiedError(f"rank {r} of {self.num_ranks} died, exit status {status}\n{self._outputs()}")

    def _lateness_of(self, missing: Sequence[int], timeout_s: float) -> DeadlineError:
        sizes = {r: self._output_path(r).stat().st_size for r in missing}
        for r in missing:
            with contextlib.suppress(ProcessLookupError):
                self.processes[r].send_signal(STACKS_SIGNAL)
        deadline = time.monotonic() + _STACKS_TIMEOUT_S
        while time.monotonic() < deadline and any(self._output_path(r).stat().st_size == sizes[r] for r in missing):
            time.sleep(0.05)
        time.sleep(0.3)
        return DeadlineError(
            f"rank(s) {', '.join(map(str, missing))} of {self.num_ranks} had not finished after {timeout_s} s; their "
            f"stacks are below\n{self._outputs()}"
        )

    def _raise_leaks(self, leaks: list[list[str]], directory: str) -> None:
        lines = [f"rank {r}: {leak}" for r, found in enumerate(leaks) for leak in found]
        names = sorted(os.listdir(directory)) if not self._may_leak else []
        lines += [f"file left in the working directory: {name}" for name in names]
        if lines:
            raise LeakError("the call left behind:\n" + "\n".join(f"  {line}" for line in lines))

    def _outputs(self) -> str:
        shown = [(r, self.output(r)) for r in range(len(self.processes))]
        return "\n".join(f"--- output of rank {r} ---\n{text[-_OUTPUT_SHOWN:]}" for r, text in shown if text)

    def _output_path(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.log"


def _tells_the_cause(answer: tuple[Any, ...]) -> bool:
    return not answer[4]


def free_port() -> int:
    """A TCP port that nobody listens on, below the kernel's ephemeral range: no outgoing connection can take it.

    Each worker of pytest-xdist has a range of its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _MAX_WORKERS
    first = _FIRST_PORT + worker * _PORTS_OF_A_WORKER
    generator = random.SystemRandom()
    for _ in range(100):
        port = generator.randrange(first, first + _PORTS_OF_A_WORKER)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free TCP port between {first} and {first + _PORTS_OF_A_WORKER} found in 100 tries")
