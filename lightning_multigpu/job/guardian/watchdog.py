"""The guardian's main loop over its connections and over the states of the ranks."""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import signal
import socket
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from lightning_multigpu.job.guardian.blocking import print_text
from lightning_multigpu.job.guardian.failure import Failure, closing_lines, host_name
from lightning_multigpu.job.guardian.hang.flight_recorder import PAGE_BYTES, read_steps
from lightning_multigpu.job.guardian.hang.hang_watch import HangWatch
from lightning_multigpu.job.guardian.host_links import Hosts
from lightning_multigpu.job.guardian.proc import ENDED, WatchedProcess, clock_s, ended_text
from lightning_multigpu.job.guardian.protocol import INTERRUPTED_STATUS, Connection, Message, accepted, foreign, peer_of
from lightning_multigpu.job.guardian.ranks import OWN_TIME, Ranks, Shutdown, WatchedRank

_FIRST_INTERRUPT = "\nCtrl-C: the run ends in order, and callbacks may save. Another Ctrl-C ends it at once.\n"
_SHORTEST_PAUSE_S = 1.0
_SHORTEST_ROUND_S = 0.05


class Watchdog:
    """The guardian of one host, with the settings of :meth:`.Guardian.start`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._timeout_s: float = settings["failure_timeout_s"]
        self._tick_s = min(0.5, self._timeout_s / 20)
        self._now_s = clock_s()
        self._owner = WatchedProcess(settings["owner_pid"])
        self._owner_gone = False
        self._ranks = Ranks(settings["num_ranks"], self._timeout_s / 2)
        self._connections: dict[Connection, WatchedRank] = {}
        self._shutdown: Shutdown | None = None
        self._signals, self._status = 0, INTERRUPTED_STATUS  # the ranks' first or second one, and its exit status
        self._act_by_s = float("inf")
        self._hurries = self._released = self._looks_now = False
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(fileno=settings["listener"])
        self._listener.setblocking(False)
        self._watch(self._listener, self._accept)
        self._owner_link = Connection(socket.socket(fileno=settings["owner_link"]))
        self._watch(self._owner_link.socket, self._read_owner)
        self._pages_descriptor: int = settings["pages"]
        self._pages = mmap.mmap(self._pages_descriptor, PAGE_BYTES * self._ranks.num_ranks, prot=mmap.PROT_READ)
        self._hosts = Hosts(
            silence_s=self._timeout_s / 2, watch=self._watch, forget=self._forget, on_message=self._handle_host
        )
        self._hang_watch = HangWatch(settings["hang_report_s"], self._ranks, self._pages, self._hosts)

    def run(self) -> None:
        """Watches until all ranks have finished, or until all have left a failed run; then prints the failure."""
        while not self._is_over():
            self.turn()
        self._hosts.close()
        if self._shutdown is not None:
            self._shutdown.print(self._ranks)
            for connection in (*self._connections, self._owner_link):
                connection.send("printed")

    def turn(self) -> None:
        """Handles messages until the next look at the ranks, and looks at them."""
        self._serve()
        now_s = clock_s()
        if now_s - self._now_s > max(_SHORTEST_PAUSE_S, 4 * self._tick_s):
            # This process and the ranks were stopped, or the machine asleep; they are resumed at other times.
            self._ranks.restart_timers()
            self._hosts.restart_timers(now_s)
            self._hang_watch.restart_timers(now_s)
        self._now_s = now_s
        self._observe()

    def _serve(self) -> None:
        """Handles messages until the next look at the ranks: a tick later, or sooner if messages arrive.

        It looks at once when a rank has ended, and when all have come to the end of the run. Not so for other messages:
        strangers that connect one after another would make it look all the time.
        """
        since_s = clock_s()
        until_s = since_s + self._tick_s
        self._looks_now = False
        while True:
            events = self._selector.select(max(0.0, until_s - clock_s()))
            for key, _ in events:
                key.data()
            if events:
                until_s = min(until_s, since_s + _SHORTEST_ROUND_S)
            if self._looks_now or clock_s() >= until_s:
                return

    def _is_over(self) -> bool:
        if self._shutdown is not None:
            # Without a guardian, ranks that have yet to connect would wait for long.
            if len(self._ranks) < self._ranks.num_ranks and not self._shutdown.is_late(self._now_s):
                return False
            ended = self._shutdown.progress(self._ranks, self._now_s) and self._workers_have_ended(self._ranks.at_work)
            if ended:
                self._read_rest()
            return ended and self._lost_have_ended()
        if not self._lost_have_ended() or self._ranks.at_work or self._ranks.resting:
            return False
        self._read_rest()
        everybody_came = len(self._ranks) == self._ranks.num_ranks
        if not (everybody_came or self._owner_gone or self._owner_link.closed):
            return False
        return self._released or not self._hosts.connected()

    def _read_rest(self) -> None:
        """Reads the last messages of ranks that have ended."""
        for connection in list(self._connections):
            self._read(connection)

    def _observe(self) -> None:
        self._observe_interrupts()
        self._ranks.others_wait = bool(self._hosts.connected())
        if self._shutdown is None and (found := self._find()) is not None:
            self._fail(found)
        pids = {rank.process.pid for rank in self._ranks}
        for rank in self._ranks.at_work:
            rank.workers.note(pids)

    def _find(self) -> Failure | None:
        """The job's failure, if there is one; else releases the ranks once all have reached the end of their run."""
        # Messages that ranks sent before they ended count first, and so do failures that other hosts have found.
        found = self._hosts.observe(self._now_s)
        if found is None and self._ranks.observe(self._now_s) is not None:
            self._read_rest()
            found = self._ranks.observe(self._now_s)
        found = found or self._owner_failure()
        if found is None and self._shutdown is None:
            self._observe_end()
            found = self._hang_watch.observe(self._now_s)
        return found

    def _observe_end(self) -> None:
        """Releases the ranks once all have reached the end: until then the failure of one fails all."""
        if not self._released and self._ranks.all_at_end and self._hosts.come_to_end():
            self._released = True
            for connection in self._connections:
                connection.send("all at end")

    def _observe_interrupts(self) -> None:
        if not self._hurries and (self._signals > 1 or self._hosts.end_now):
            self._hurries = True
            status = self._hosts.end_now or self._status
            name = "Ctrl-C" if status == INTERRUPTED_STATUS else "SIGTERM"
            self._hosts.send("end now", status=status)
            for connection in self._connections:  # before the failure, which ranks would raise first
                connection.send("end now", status=status)
            failure = Failure(f"a second {name} has ended the job at once", host=host_name())
            self._fail(failure)
            assert self._shutdown is not None
            if self._shutdown.failure.signal:  # the first one, which a rank has acted on alone
                self._shutdown.failure = failure
            self._shutdown.hurry(self._now_s)
        elif self._now_s > self._act_by_s:  # they wait for each other, or train no more: each one acts alone
            number = signal.Signals(self._status - 128)
            what = f"the ranks have agreed on no batch within {self._timeout_s:g} s after {number.name}"
            self._act_by_s = float("inf")
            self._fail(Failure(what, host=host_name(), signal=number))

    def _workers_have_ended(self, ranks: list[WatchedRank]) -> bool:
        pids = {rank.process.pid for rank in self._ranks}
        return not [rank for rank in ranks if not rank.workers.end(pids)]

    def _lost_have_ended(self) -> bool:
        """Kills lost ranks whose time is over, and ends their workers; a rank that has left ends itself."""
        lost = {rank: rank.lost_since_s for rank in self._ranks if rank.lost_since_s is not None}
        ended = [rank for rank in lost if rank.process.state() == ENDED]
        left = [rank for rank in lost if rank not in ended and not rank.has_left]
        for rank in left:
            if self._now_s - lost[rank] > OWN_TIME * self._timeout_s:
                rank.process.kill()
        return self._workers_have_ended(ended) and not left

    def _owner_failure(self) -> Failure | None:
        if self._owner_gone or self._owner.state() != ENDED:
            return None
        self._owner_gone, exit_code = True, self._owner.exit_code()
        is_rank = any(rank.process.pid == self._owner.pid for rank in self._ranks)
        if exit_code == 0 or is_rank or not self._ranks.at_work:
            return None
        what = f"the process {self._owner.pid}, which started the ranks, {ended_text(exit_code)}"
        return Failure(what, host=host_name())

    def _fail(self, failure: Failure) -> None:
        """Ends the job with a failure, if it is the first: later ones are its consequences."""
        if self._shutdown is not None:
            return
        failed = self._ranks.get(failure.rank)
        if failed is not None and failure.step is None:
            failure = failure._replace(step=read_steps(self._pages, failed.slot))
        # Ctrl-C ends the job.
        if failed is not None and failed.can_be_lost and failure.signal != signal.SIGINT:
            failed.finished = failed.at_end = True  # the job goes on without it
            failed.lost_since_s = self._now_s
            lines = failure.traceback, *closing_lines(failure, [], goes_on=True)
            print_text("".join(f"{line}\n" for line in lines if line))
            return
        # Before the failure is sent: ranks that receive it stop waiting.
        waits = self._hang_watch.last_waits(failure.rank)
        self._shutdown = Shutdown(failure, self._now_s, self._timeout_s, waits)
        self._hosts.send("failure", failure=failure.to_message())
        for connection in self._connections:
            connection.send("failure", failure=failure.to_message())

    def _begin(self, run: int, failure_timeout_s: float, hang_report_s: float | None) -> None:
        """Begins a further run, if it is one, with the limits of the first rank that comes."""
        if self._shutdown is None and run > self._ranks.run:
            self._observe_end()  # node 0 may have told the end of the run before a moment ago
        if not self._ranks.begin(run):
            return
        self._released = False
        self._timeout_s, self._tick_s = failure_timeout_s, min(0.5, failure_timeout_s / 20)
        self._ranks.stopped_limit_s = self._hosts.silence_s = failure_timeout_s / 2
        self._hang_watch.limit_s = hang_report_s
        self._hosts.begin(run, self._now_s)

    def _handle_host(self, host: Hashable, message: Message) -> None:
        if message["kind"] == "views":
            self._hang_watch.receive(host, message, self._now_s)
        elif message["kind"] == "begin":
            self._begin(int(message["run"]), self._timeout_s, self._hang_watch.limit_s)

    # Connections

    def _watch(self, sock: socket.socket, read: Callable[[], None]) -> None:
        self._selector.register(sock, selectors.EVENT_READ, read)

    def _forget(self, sock: socket.socket | int) -> None:
        # It may be closed already, by an earlier event of the same round.
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def _accept(self) -> None:
        for sock in accepted(self._listener):
            connection = Connection(sock)
            if why := foreign(sock):
                connection.send("refused", why=f"it is {why}")
                connection.close()
            else:
                self._watch(sock, partial(self._read, connection))

    def _read(self, connection: Connection) -> None:
        """Reads a rank's messages. A closed connection means nothing: only the rank's process counts."""
        for message in connection.arriving():
            try:
                if connection in self._connections:
                    self._handle(connection, message)
                else:
                    self._welcome(connection, message)
            except Exception as error:  # no message of a rank may end the guardian of the others
                connection.send("refused", why=f"{error!s:.1000}")
                connection.closed = True
        if connection.closed:
            self._connections.pop(connection, None)
            self._forget(connection.socket)
            connection.close()

    def _welcome(self, connection: Connection, message: Message) -> None:
        number = int(message["rank"])
        try:
            rank = self._add(number, peer_of(connection.socket)[0])
        except ProcessLookupError:
            connection.closed = True
            return
        except ValueError as error:
            if len(self._ranks) < self._ranks.num_ranks:  # a missing rank has sent a wrong number
                self._fail(Failure(str(error), host=host_name()))
            raise
        self._connections[connection] = rank
        settings = {"num_slots": self._ranks.num_ranks, "failure_timeout_s": self._timeout_s}
        connection.send("welcome", descriptors=(self._pages_descriptor,), pid=os.getpid(), slot=rank.slot, **settings)
        if self._shutdown is not None:
            connection.send("failure", failure=self._shutdown.failure.to_message())

    def _add(self, number: int, pid: int) -> WatchedRank:
        num_known, rank = len(self._ranks), self._ranks.add(number, pid)
        if len(self._ranks) > num_known and (descriptor := rank.process.pidfd) is not None:
            self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._see_end(descriptor))
        return rank

    def _see_end(self, descriptor: int) -> None:  # at once, before a launcher ends the others
        self._forget(descriptor)
        self._looks_now = True

    def _handle(self, connection: Connection, message: Message) -> None:
        rank, kind = self._connections[connection], message["kind"]
        if kind == "begin":
            self._begin(message["run"], message["failure_timeout_s"], message["hang_report_s"])
        elif kind in ("rest", "leave"):
            rank.has_left = kind == "leave"
            rank.advice = message.get("advice", "")
            # Others may have begun a further run: then this one has to come, or its end is a failure.
            if self._shutdown is not None or message["run"] == self._ranks.run:
                rank.finished = rank.at_end = True
            if not self._ranks.at_work:
                self._signals, self._act_by_s = 0, float("inf")
        elif kind == "at end":
            rank.at_end = True
            self._looks_now |= self._ranks.all_at_end
        elif kind == "joining":
            limit_s = message["limit_s"]
            rank.joining_until_s = None if limit_s is None else self._now_s + limit_s
        elif kind == "can be lost":
            rank.can_be_lost = True
        elif kind == "signalled":
            number, status = message["number"], message["status"]
            if number == 0:
                self._act_by_s = float("inf")
            elif number > self._signals:
                self._signals, self._status, self._act_by_s = number, status, self._now_s + self._timeout_s
                if (number, status) == (1, INTERRUPTED_STATUS):
                    print_text(_FIRST_INTERRUPT)
        elif kind == "failed":
            self._fail(Failure(**message["failure"]))
        elif kind == "listen":
            sock, secret = socket.socket(fileno=connection.take_descriptor()), message["secret"]
            self._hosts.listen(sock, num_nodes=message["num_nodes"], secret=secret, now_s=self._now_s)
        elif kind == "join":
            sock, host = socket.socket(fileno=connection.take_descriptor()), message["host"]
            self._hosts.join(sock, node_rank=message["node_rank"], host=host, now_s=self._now_s)

    def _read_owner(self) -> None:
        for message in self._owner_link.arriving():
            kind = message["kind"]
            if kind == "started":
                number, pid = message["rank"], message["pid"]
                try:
                    self._add(number, pid)
                except ProcessLookupError:
                    self._fail(Failure("ended before it could be watched", number, host_name(), pid))
                except (OSError, ValueError) as error:  # another process has sent a wrong number
                    self._fail(Failure(str(error), host=host_name()))
            elif kind == "ended" and (rank := self._ranks.get(message["rank"])) is not None:
                rank.reported_exit_code = message["exit_code"]
        if self._owner_link.closed:
            self._forget(self._owner_link.socket)
