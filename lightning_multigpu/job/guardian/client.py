"""A rank's end of the connection to the guardian of its host."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from lightning_multigpu.job.guardian.failure import MAX_WHAT, Failure, host_name
from lightning_multigpu.job.guardian.hang.flight_recorder import PAGE_BYTES, FlightRecorder
from lightning_multigpu.job.guardian.protocol import (
    MAX_LINE_BYTES,
    Connection,
    Message,
    ProtocolError,
    decode,
    encode,
    foreign,
)
from lightning_multigpu.job.guardian.start import Guardian, GuardianError

OnFailure = Callable[[Failure], None]

_LONGEST_LOOK_S = 0.5
_PRINT_S = 5.0  # beyond the time in which the other ranks end
_SHORTEST_POLL_S, _POLL_S = 0.005, 0.1
_BACKLOG = 256  # strangers may queue before the other hosts


class GuardianClient:
    """A rank's connection to the guardian of its host.

    A thread reads the guardian's messages. It calls ``on_failure`` once, with the failure of another rank or host, or
    with the end of the guardian itself: then nobody would end this process, which ends itself after 0.9
    ``failure_timeout_s``.

    Args:
        timeout_s: how long the guardian at ``address`` may take to answer.
        start_timeout_s: how long it may take to start: at the address of a job its first rank on the host starts it.

    Attributes:
        failure: the failure that ``on_failure`` was called with, or None.
        find_failure: called twice a second in a run, in another thread; a failure that it finds is reported.
        flight_recorder: the record of this rank's steps and collectives, for the guardian to read.
        started: the guardian, if this process has started it; ``place``: its address and number of ranks.
        rests: the process is between two runs: neither its end nor the guardian's is a failure, until a rank begins the
            next run.

    Raises:
        GuardianError: no guardian listens there in time, it refuses this rank, or it is another user's.
    """

    def __init__(
        self, address: str, *, rank: int, on_failure: OnFailure, timeout_s: float = 30.0, start_timeout_s: float = 0.0
    ) -> None:
        self.rank = rank
        self.failure: Failure | None = None
        self.find_failure: Callable[[], Failure | None] = lambda: None
        self.rests = False
        self.started: Guardian | None = None
        self.place: tuple[object, ...] = ()
        self._run = 1
        self._on_failure = on_failure
        self._leaving, self._all_at_end, self._printed = threading.Event(), threading.Event(), threading.Event()
        self._is_printed = False
        self._sending = threading.RLock()  # a signal's handler may send while its thread does
        self._process = os.getpid()
        self._connection = Connection(_connected(address, rank, start_timeout_s))
        try:
            self._connection.send("hello", rank=rank)
            welcome = self._welcome(time.monotonic() + timeout_s)
            self.guardian_pid, failure_timeout_s = welcome["pid"], welcome["failure_timeout_s"]
            descriptor = self._connection.take_descriptor()
            self._pages, self._slot = mmap.mmap(descriptor, PAGE_BYTES * welcome["num_slots"]), welcome["slot"]
            os.close(descriptor)
            self.flight_recorder = FlightRecorder(self._pages, self._slot)
        except BaseException:
            self._connection.close()
            raise
        self._set_limits(failure_timeout_s)
        self._thread = threading.Thread(target=self._listen, name="guardian-client", daemon=True)
        self._thread.start()

    def begin(self, on_failure: OnFailure, *, failure_timeout_s: float, hang_report_s: float | None) -> None:
        """Begins a further run, with its own limits, after :meth:`rest`; all ranks have to come to it."""
        self._run += 1
        self._all_at_end.clear()
        self._set_limits(failure_timeout_s)
        self.flight_recorder = FlightRecorder(self._pages, self._slot)
        self._on_failure, self.rests = on_failure, False
        self._send("begin", run=self._run, failure_timeout_s=failure_timeout_s, hang_report_s=hang_report_s)
        if self.failure is not None:
            on_failure(self.failure)
            self._all_at_end.set()

    def rest(self, advice: str = "") -> None:
        """Ends a run: see :attr:`rests`."""
        self.rests = True
        self.flight_recorder.detach()
        self._pages[PAGE_BYTES * self._slot : PAGE_BYTES * (self._slot + 1)] = bytes(PAGE_BYTES)
        self._send("rest", run=self._run, advice=advice[:MAX_WHAT])

    def failed(self, failure: Failure) -> None:
        """Reports a failure to the guardian, which informs the other ranks; all have to end."""
        self._send("failed", failure=failure.to_message())

    def can_be_lost(self) -> None:
        """Declares that the job goes on without this rank, however it ends: no other waits for it from now on.

        Raises ValueError on rank 0.
        """
        if self.rank == 0:
            raise ValueError("rank 0 cannot be lost, since it has the results: call can_be_lost on other ranks only")
        self._send("can be lost")

    def leave_failed_run(self, advice: str) -> bool:
        """Ends a run that has failed; returns when all ranks have, and the guardian has printed why, and ``advice``.

        False if the guardian has ended before that.
        """
        self.rest(advice)
        self._printed.wait(self._end_s + _PRINT_S)
        return self._is_printed

    def joining(self, limit_s: float | None) -> None:
        """Reports that this rank joins the others, and has failed after ``limit_s``; None once it has joined them."""
        self._send("joining", limit_s=limit_s)

    def signalled(self, status: int, number: int) -> None:
        """Reports this rank's first, second... SIGINT or SIGTERM, or by the number 0 that it acts on one.

        After the first, ranks have ``failure_timeout_s`` to act; the second ends the job with that exit status at once.
        """
        self._send("signalled", status=status, number=number)

    def finish(self) -> Failure | None:
        """Waits until all ranks have reached the end of their run; the failure if one has failed, else None."""
        self._send("at end")
        if not self._leaving.is_set():
            self._all_at_end.wait()
        return self.failure

    def listen_for_hosts(self, address: str, *, num_nodes: int, secret: str) -> int:
        """On node 0, by one rank: makes the guardian listen for the other hosts at ``address``; returns the port."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.create_server((address, 0), family=family, backlog=num_nodes + _BACKLOG) as listener:
                self._send("listen", descriptors=(listener.fileno(),), num_nodes=num_nodes, secret=secret)
                return int(listener.getsockname()[1])
        except OSError as error:
            raise GuardianError(
                f"the guardian cannot listen at {address}: {error}; give an address of {host_name()}"
            ) from error

    def join_hosts(self, address: str, port: int, *, node_rank: int, secret: str, timeout_s: float = 30.0) -> None:
        """On each other node, by one rank: connects this host's guardian to node 0's, where its end is a failure then.

        Raises GuardianError if node 0's cannot be reached within ``timeout_s``, or refuses this host's.
        """
        who, where = f"node {node_rank} ({host_name()})", f"at {address} port {port}"
        try:
            with socket.create_connection((address, port), timeout=timeout_s) as sock:
                sock.sendall(encode("hello", secret=secret, node_rank=node_rank, host=host_name()))
                with sock.makefile("rb", buffering=0) as file:  # what follows the line is for the guardian
                    answer = decode(file.readline(MAX_LINE_BYTES))
                if answer["kind"] != "welcome":
                    raise GuardianError(f"the guardian of node 0 {where} has refused {who}: {answer.get('why')}")
                self._send("join", descriptors=(sock.fileno(),), node_rank=node_rank, host=answer["host"])
        except (OSError, ProtocolError) as error:
            raise GuardianError(
                f"{who} cannot reach the guardian of node 0 {where}: {error}; is the address right, and the port open "
                "between the hosts?"
            ) from error

    def leave(self) -> None:
        """Ends the connection: from now on this rank's end is no failure, and it receives no failure."""
        if self._leaving.is_set() or os.getpid() != self._process:
            return
        self._leaving.set()  # before the message: the guardian may end at once, which is no failure then
        with self._sending:
            self._connection.send("leave", run=self._run)
        with contextlib.suppress(OSError):  # wakes the thread; sent messages still arrive
            self._connection.socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self._connection.close()
        self.flight_recorder.detach()

    # The other thread

    def _listen(self) -> None:
        while not self._connection.closed:
            for message in self._connection.arriving():
                kind = message["kind"]
                if kind == "printed":
                    self._is_printed = True
                    self._printed.set()
                elif kind == "all at end":
                    self._all_at_end.set()
                elif kind == "end now" and not self._leaving.is_set():
                    os._exit(message["status"])
                elif kind == "failure":
                    self._report(Failure(**message["failure"]))
            if not self._connection.closed:
                if not self.rests:
                    self.flight_recorder.note_line()
                if self.failure is None and not self.rests and (found := self.find_failure()) is not None:
                    self.find_failure = lambda: None
                    self.failed(found)
                select.select([self._connection.socket], [], [], self._look_s)
        self._printed.set()
        if self._leaving.is_set():
            return
        what = f"the guardian (pid {self.guardian_pid}) has ended, and nobody watches the ranks any more"
        self._report(Failure(what, host=host_name()))
        if not self._leaving.wait(self._end_s) and not self.rests and self.failure is not None:
            why = f"{self.failure.describe()}, and rank {self.rank} has not ended {self._end_s:g} s later"
            sys.stderr.write(f"The job failed: {why}\n")
            os.kill(self._process, signal.SIGKILL)

    def _report(self, failure: Failure) -> None:
        if self.failure is None and not self._leaving.is_set():
            self.failure = failure
            if not self.rests:
                self._on_failure(failure)
                self._all_at_end.set()

    def _set_limits(self, failure_timeout_s: float) -> None:
        self._end_s = 0.9 * failure_timeout_s
        self._look_s = min(_LONGEST_LOOK_S, failure_timeout_s / 20)

    def _send(self, kind: str, *, descriptors: tuple[int, ...] = (), **fields: object) -> None:
        """Sends a message, but none from a forked child: it shares the connection, but is not this rank."""
        if not self._leaving.is_set() and os.getpid() == self._process:
            with self._sending:
                self._connection.send(kind, descriptors=descriptors, **fields)

    def _welcome(self, deadline_s: float) -> Message:
        why = "it does not answer in time"
        while (left_s := deadline_s - time.monotonic()) > 0 and not self._connection.closed:
            select.select([self._connection.socket], [], [], left_s)
            for message in self._connection.arriving():
                if message["kind"] == "welcome":
                    return message
                why = str(message.get("why"))
        raise GuardianError(f"the guardian does not take rank {self.rank}: {why}")


def _connected(address: str, rank: int, start_timeout_s: float) -> socket.socket:
    """A socket that is connected to the guardian; waits for its start."""
    began_s, pause_s = time.monotonic(), _SHORTEST_POLL_S
    while True:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect("\0" + address)
            if not (why := foreign(sock)):
                return sock
            problem = f"the guardian's address belongs to {why}: it is not the guardian of rank {rank}"
        except OSError as error:
            problem = f"rank {rank} finds no guardian on {host_name()} within {start_timeout_s:g} s: {error}" + (
                ". The first rank of a host starts it: are MASTER_ADDR, MASTER_PORT and NODE_RANK the same for all "
                "ranks of the host, and has one of them LOCAL_RANK=0?"
            ) * (start_timeout_s > 0)
        sock.close()
        if time.monotonic() - began_s > start_timeout_s:
            raise GuardianError(problem)
        time.sleep(pause_s)
        pause_s = min(_POLL_S, 1.5 * pause_s)
