"""What runs in the guardian: one loop over its connections and over the states of the ranks."""

from __future__ import annotations

import mmap
import os
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Any

from lightning_multigpu.guardian.ending import Ending
from lightning_multigpu.guardian.failure import Failure, host_name
from lightning_multigpu.guardian.hosts import Hosts
from lightning_multigpu.guardian.proc import ENDED, STOPPED, WatchedProcess, clock_s, ended_text
from lightning_multigpu.guardian.protocol import Connection, Message, nonce, proof, proves
from lightning_multigpu.guardian.ranks import Ranks, WatchedRank

STEP_BYTES = 8
_CREDENTIALS = "3i"
_MAX_STRANGERS = 64
_SHORTEST_PAUSE_S = 1.0


class Process:
    """The guardian of one host.

    Args:
        settings: what :meth:`lightning_multigpu.guardian.Guardian.start` has sent.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._secret = bytes.fromhex(settings["secret"])
        self._timeout_s: float = settings["failure_timeout_s"]
        self._join_timeout_s: float = settings["join_timeout_s"]
        self._directory: str | None = settings["directory"]
        self._tick_s = min(0.5, self._timeout_s / 20)
        self._now_s = self._started_s = clock_s()
        self._owner = WatchedProcess(settings["owner_pid"])
        self._owner_gone = self._stopping = False
        self._ranks = Ranks(settings["num_ranks"], self._timeout_s / 2)
        self._connections: dict[Connection, WatchedRank] = {}
        self._strangers: dict[Connection, str] = {}
        self._ending: Ending | None = None
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(fileno=settings["listener"])
        self._listener.setblocking(False)
        self._watch(self._listener, self._accept)
        self._owner_link = Connection(socket.socket(fileno=settings["owner_link"]))
        self._watch(self._owner_link.socket, self._read_owner)
        self._steps_descriptor: int = settings["steps"]
        self._steps = mmap.mmap(self._steps_descriptor, STEP_BYTES * self._ranks.num_ranks, prot=mmap.PROT_READ)
        self._hosts = Hosts(
            silence_s=self._timeout_s / 2, join_timeout_s=self._join_timeout_s, watch=self._watch, forget=self._forget
        )

    def run(self) -> None:
        """Watches until all ranks have finished, or until all have ended after a failure."""
        while not self._is_over():
            for key, _ in self._selector.select(self._tick_s):
                key.data()
            now_s = clock_s()
            if now_s - self._now_s > max(_SHORTEST_PAUSE_S, 4 * self._tick_s):
                # This process was stopped, or the machine asleep; so were the ranks, and they go on at other moments.
                self._started_s += now_s - self._now_s
                self._ranks.forgive()
                self._hosts.forgive(now_s)
            self._now_s = now_s
            self._observe()
        self._hosts.close()
        if self._ending is not None:
            self._ending.report(self._directory)

    def _is_over(self) -> bool:
        if self._ending is not None:
            return self._ending.progress(self._ranks, self._now_s)
        if self._ranks.at_work:
            return False
        everybody_came = len(self._ranks) == self._ranks.num_ranks
        if not (everybody_came or self._owner_gone or self._stopping):
            return False
        self._hosts.finish()
        return self._hosts.all_done

    def _observe(self) -> None:
        self._ranks.others_wait = self._hosts.others_wait
        # What ranks have said before they ended comes first, and so does what other hosts have found.
        found = self._hosts.observe(self._now_s, paused=self._ranks.all_stopped) if self._ending is None else None
        if self._ending is None and found is None:
            found = self._ranks.observe(self._now_s)
            if found is not None:
                for connection in list(self._connections):
                    self._read(connection)
                found = self._ranks.observe(self._now_s)
        if found is not None:
            self._fail(found.failure, found.since_s)
        if self._ending is None:
            self._observe_joining()

    def _observe_joining(self) -> None:
        missing = self._ranks.num_ranks - len(self._ranks)
        if not self._owner_gone and self._owner.state() == ENDED:
            self._owner_gone = True
            exit_code = self._owner.exit_code()
            is_rank = any(rank.process.pid == self._owner.pid for rank in self._ranks)
            if exit_code != 0 and self._ranks.at_work and not is_rank:
                what = f"the process {self._owner.pid}, which started the ranks, {ended_text(exit_code)}"
                self._fail(Failure(what, host=host_name()), self._now_s)
        elif missing and len(self._ranks) and self._now_s - self._started_s > self._join_timeout_s:
            came = ", ".join(str(rank.rank) for rank in self._ranks)
            what = (
                f"{missing} of {self._ranks.num_ranks} ranks have not come within {self._join_timeout_s:g} s; "
                f"there are: {came}"
            )
            self._fail(Failure(what, host=host_name()), self._now_s)

    def _fail(self, failure: Failure, since_s: float) -> None:
        """The first failure is the job's; what comes later follows from it."""
        if self._ending is not None:
            return
        failed = self._ranks.get(failure.rank)
        if failed is not None and failure.step is None:
            failure = failure._replace(step=self._step(failed))
        self._ending = Ending(failure, since_s, self._timeout_s)
        self._hosts.tell(failure, since_s)
        for connection, rank in self._connections.items():
            # The one that failed knows; if it is stopped, it hears of it should it ever go on.
            if rank is not failed or rank.process.state() == STOPPED:
                connection.send("failure", failure=failure.to_message())

    def _step(self, rank: WatchedRank) -> int:
        """Steps that the rank has completed, as it counted them in the shared memory."""
        (steps,) = struct.unpack_from("q", self._steps, STEP_BYTES * rank.slot)
        return int(steps)

    # Connections

    def _watch(self, sock: socket.socket, read: Callable[[], None]) -> None:
        self._selector.register(sock, selectors.EVENT_READ, read)

    def _forget(self, sock: socket.socket | int) -> None:
        if self._selector.get_map().get(sock) is not None:
            self._selector.unregister(sock)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        connection = Connection(sock)
        if len(self._strangers) >= _MAX_STRANGERS:  # who does not introduce itself makes room for others
            self._close(next(iter(self._strangers)))
        self._strangers[connection] = nonce()
        self._watch(sock, lambda: self._read(connection))
        connection.send("challenge", nonce=self._strangers[connection])

    def _close(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._connections.pop(connection, None)
        self._forget(connection.socket)
        connection.close()

    def _read(self, connection: Connection) -> None:
        """Reads what a rank says. That it closes its connection means nothing: only its process counts."""
        for message in connection.receive():
            try:
                if connection in self._strangers:
                    self._welcome(connection, message)
                else:
                    self._handle(connection, message)
            except (ValueError, KeyError, TypeError) as error:
                connection.send("refused", why=str(error))
                connection.closed = True
        if connection.closed:
            self._close(connection)

    def _welcome(self, connection: Connection, message: Message) -> None:
        challenge = self._strangers[connection]
        credentials = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS))
        pid, user, _ = struct.unpack(_CREDENTIALS, credentials)  # as the kernel saw them when the rank connected
        if user != os.getuid() or not proves(message, self._secret, "rank", challenge):
            raise ValueError(
                "the secret is not this job's; let the rank inherit the environment of the guardian's starter"
            )
        number = message.get("rank")
        if not isinstance(number, int):
            raise ValueError(f"the rank is {number!r:.80}; it must be an integer")
        try:
            rank = self._add(number, pid, introduced=True)
        except ProcessLookupError:
            connection.closed = True
            return
        del self._strangers[connection]
        self._connections[connection] = rank
        connection.send(
            "welcome",
            descriptors=(self._steps_descriptor,),
            proof=proof(self._secret, "guardian", str(message.get("nonce"))),
            pid=os.getpid(),
            slot=rank.slot,
            num_slots=self._ranks.num_ranks,
            failure_timeout_s=self._timeout_s,
        )
        if self._ending is not None:
            connection.send("failure", failure=self._ending.failure.to_message())

    def _add(self, number: int, pid: int, *, introduced: bool) -> WatchedRank:
        known = self._ranks.get(number)
        before = None if known is None else known.process
        rank = self._ranks.add(number, pid, introduced=introduced)
        if rank.process is not before and rank.process.pidfd is not None:
            descriptor = rank.process.pidfd
            self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._forget(descriptor))
        return rank

    def _handle(self, connection: Connection, message: Message) -> None:
        rank, kind = self._connections[connection], message["kind"]
        if kind == "goodbye":
            rank.finished = True
        elif kind == "failed":
            self._fail(Failure.from_message(message.get("failure")), self._now_s)
        elif kind == "announced" and self._ending is not None:
            self._ending.announce(rank)
        elif kind in ("listen", "join"):
            descriptor = connection.take_descriptor()
            if descriptor is not None:
                self._meet_hosts(connection, message, socket.socket(fileno=descriptor))

    def _meet_hosts(self, connection: Connection, message: Message, sock: socket.socket) -> None:
        secret = bytes.fromhex(message["secret"])
        if message["kind"] == "listen":
            self._hosts.listen(sock, num_nodes=int(message["num_nodes"]), secret=secret, now_s=self._now_s)
        else:
            node_rank = int(message["node_rank"])
            self._hosts.join(
                sock, node_rank=node_rank, secret=secret, now_s=self._now_s, on_met=lambda: connection.send("met")
            )

    def _read_owner(self) -> None:
        """What the process that started the guardian says of the ranks that it starts."""
        for message in self._owner_link.receive():
            kind = message["kind"]
            if kind == "started":
                try:
                    self._add(message["rank"], message["pid"], introduced=False)
                except ProcessLookupError:
                    what = "ended before it could be watched"
                    self._fail(Failure(what, message["rank"], host_name(), message["pid"]), self._now_s)
            elif kind == "ended" and (rank := self._ranks.get(message["rank"])) is not None:
                rank.told_exit_code = message["exit_code"]
            elif kind == "directory":
                self._directory = message["directory"]
            elif kind == "stop":
                self._stopping = True
        if self._owner_link.closed:
            self._forget(self._owner_link.socket)
