"""A parameter server: a process that holds shards of weights, averages gradients and steps optimizers.

It is connected to each worker by a :class:`~.pair.Pair`. Synchronous workers ask together::

    worker 0  --push b--+                       +--weights b-->  worker 0
                        |  all pushes of b and  |
                        +- all steps are there: +
                        |  average, clip, step  |
    worker 1  --push b--+                       +--weights b-->  worker 1

Each asynchronous worker has a thread of its own in the server.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.interface import own_address
from lightning_multigpu.communication.shared_memory.segment import OfferedSegment
from lightning_multigpu.engine.parameter_server.batch_queue import BatchQueue
from lightning_multigpu.engine.parameter_server.pair import LastWords, PairEndedError, accepted
from lightning_multigpu.engine.parameter_server.served_shard import Plan, ServedShard, UpdateError

RUNS = "lightning_multigpu/servers"
"""The key under which a job's store counts the fits with servers."""
EXTERNAL = "lightning_multigpu/external servers"
"""The key of the fit that servers may join which are started by hand."""

_LOOK_S = 1.0  # between two checks for machines that have vanished
_PROBE_S = 0.5
_LAST_WORDS_S = 2
_OF_ALL = ("place", "step", "goodbye")
"""What synchronous workers ask for together."""
_WITHOUT_ANSWER = ("trained", "give back", "pause", "replace")


@dataclass(frozen=True)
class Job:
    """A job as its servers know it.

    Attributes:
        name: of this fit, in the job's store.
        address: of rank 0.
        join_timeout_s: how long all wait for each other.
        silence_s: how long a machine may be silent before it counts as down.
        is_synchronous: an update takes the average of all workers' gradients. Otherwise each worker's gradients are an
            update of their own.
        max_staleness: how many steps an asynchronous worker may be ahead of the slowest one; None for any number.
    """

    name: str
    address: str
    num_workers: int
    num_servers: int
    join_timeout_s: float
    silence_s: float
    is_synchronous: bool = True
    max_staleness: int | None = None


class Server:
    """A parameter server of a job; the constructor waits for the workers.

    Raises:
        PairEndedError: a worker has not come in time.
    """

    def __init__(self, store: Store, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self._connections = Connections()
        self._changing = threading.Condition()
        self._ended = threading.Event()
        self._problem = ""
        own = own_address(job.address)
        key = f"{job.name}/server {number}"
        workers = accepted(own, job.num_workers, job.join_timeout_s, partial(store.set, key))
        self._pairs = {worker: pair for worker, (pair, _) in enumerate(workers)}
        for pair, address in workers:
            self._connections.note(*pair.connections)
            segment = OfferedSegment(1) if address == own else None  # the worker tries to map it
            pair.send(None if segment is None else segment.offer)
            pair.shares_memory = pair.receive()
        self._shards: dict[int, ServedShard] = {}
        # Asynchronous training
        self._queue = BatchQueue()
        self._told: dict[str, dict[int, Any]] = defaultdict(dict)
        self._lost: list[dict[str, int]] = []

    def serve(self) -> str:
        """Serves the job until all of its workers have left; returns what went wrong, or an empty text.

        Afterwards threads may still be computing: leave the process by :func:`os._exit`.

        Raises:
            KeyboardInterrupt: the server was interrupted; the workers have been told.
        """
        serving = [self._serve_together] if self.job.is_synchronous else [
            (lambda worker=worker: self._serve_alone(worker)) for worker in self._pairs
        ]  # fmt: skip
        for serve in serving:
            threading.Thread(target=serve, name="workers", daemon=True).start()
        try:
            while not self._ended.wait(_LOOK_S):
                self._connections.cut_silent(self.job.silence_s)
        except KeyboardInterrupt:
            self.end("the server was interrupted")
            raise
        finally:
            for pair in [*self._pairs.values()] if self._problem else []:
                with suppress(PairEndedError):
                    pair.send(LastWords(self._problem), timeout_s=_LAST_WORDS_S)
            for pair in [*self._pairs.values()]:
                pair.close()
        return self._problem

    def end(self, problem: str) -> None:
        """Ends :meth:`serve`; ``problem`` tells why, and is empty where all is well."""
        if not self._ended.is_set():
            self._problem = problem
            self._ended.set()
            with self._changing:
                self._changing.notify_all()

    def parent_has_ended(self) -> None:
        """Ends :meth:`serve`, unless the job goes on without the worker that started this server."""
        with self._changing:
            if self.job.is_synchronous or 0 not in self._pairs:
                self.end("the process that started it has ended")

    def _serve_together(self) -> None:
        """Serves synchronous workers, for which worker 0 speaks, but for what they ask for together."""
        try:
            while True:
                messages = {0: self._pairs[0].receive()}
                if messages[0][0] in _OF_ALL:
                    messages |= {worker: pair.receive() for worker, pair in self._pairs.items() if worker != 0}
                if len(kinds := {message[0] for message in messages.values()}) > 1:
                    raise UpdateError(f"workers ask for different things: {', '.join(sorted(kinds))}")
                if kinds == {"goodbye"}:
                    return self.end("")
                if kinds == {"step"}:
                    version = self._shards[messages[0][1]].update({w: message[2] for w, message in messages.items()})
                    answers = dict.fromkeys(messages, version)
                else:
                    answers = {worker: self._answer(worker, *message) for worker, message in messages.items()}
                for worker, answer in answers.items():
                    if messages[0][0] not in _WITHOUT_ANSWER:
                        self._pairs[worker].send(answer)
        except Exception as error:
            self.end(_problem_of(error))

    def _serve_alone(self, worker: int) -> None:
        """Serves one asynchronous worker until it leaves, or is lost."""
        pair = self._pairs[worker]
        try:
            while (message := pair.receive())[0] != "goodbye":
                answer = self._answer(worker, *message)
                if message[0] not in _WITHOUT_ANSWER:
                    with self._changing:
                        news = bool(self._told["stop"]), self._lost if worker == 0 else []
                    pair.send(answer, news)
        except Exception as error:
            problem = _problem_of(error)
            if worker == 0 or self._ended.is_set():
                return self.end(problem)
            with suppress(PairEndedError):
                pair.send(LastWords(problem), timeout_s=_LAST_WORDS_S)
            self._leaves(worker, is_lost=True)
        else:
            self._leaves(worker, is_lost=False)

    def _leaves(self, worker: int, *, is_lost: bool) -> None:
        with self._changing:
            pair = self._pairs.pop(worker)
            batches = self._queue.lose(worker)
            for shard in self._shards.values():
                shard.loses(worker)
            if is_lost:
                for told in self._told.values():
                    told.pop(worker, None)
                self._lost.append({"worker": worker, "batches": batches, "left": len(self._pairs)})
            if not self._pairs:
                self.end("")
            self._changing.notify_all()
        pair.close()

    # Answers

    def _answer(self, worker: int, kind: str, *arguments: Any) -> Any:
        """The answer to a worker; for some kinds after a wait for other workers."""
        if kind in ("step", "pull"):  # which lock what they change
            shard = self._shards[arguments[0]]
            return shard.update({worker: arguments[1]}) if kind == "step" else shard.pull(worker)
        with self._changing:
            if kind in ("state", "load", "replace"):
                return getattr(self._shards[arguments[0]], kind)(*arguments[1:])
            return self._ANSWERS[kind](self, worker, *arguments)

    def _wait_for(self, is_true: Callable[[], bool]) -> None:
        """Waits for what other workers change."""
        self._changing.wait_for(lambda: is_true() or self._ended.is_set())
        if self._ended.is_set():
            raise UpdateError(self._problem)

    def _place(self, worker: int, optimizer: int, number: int, plan: Plan) -> Any:
        """Takes new parameters; worker 0 has their weights."""
        if optimizer not in self._shards:
            self._shards[optimizer] = ServedShard(self._pairs, self.job, self._changing)
        shard = self._shards[optimizer]
        if worker == 0:
            shard.place(plan)
            self._changing.notify_all()
        self._wait_for(lambda: number < len(shard.plans))
        return shard.welcome(worker, number, plan)

    def _staleness(self, worker: int) -> dict[int, Counter[int]]:
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for shard in self._shards.values():
            for each, found in shard.staleness.items():
                counts[each].update(found)
        return dict(sorted(counts.items()))

    def _pause(self, worker: int) -> None:
        for shard in self._shards.values():
            shard.pauses(worker)

    def _next(self, worker: int, epoch: int, first: int, num_batches: int, waits: bool) -> tuple[int | None, bool]:
        """A worker's next batch; and whether worker 0 may get batches that others have, if they are lost.

        Worker 0 waits, if it asks so, until it gets such a batch, or no other worker has one.
        """
        while True:
            number = self._queue.next(worker, epoch, first, num_batches)
            may_return = worker == 0 and number is None and self._queue.others_have(worker, epoch)
            if not (waits and may_return) or self._ended.is_set():
                return number, may_return
            self._changing.wait()

    def _trained(self, worker: int, epoch: int, number: int) -> None:
        self._queue.trained(worker, epoch, number)
        self._changing.notify_all()

    def _give_back(self, worker: int, epoch: int) -> None:
        self._queue.give_back(worker, epoch)
        self._changing.notify_all()

    def _tell(self, worker: int, name: str, value: Any, awaited: Literal["nobody", "first", "all"]) -> list[Any]:
        """Takes a worker's value of a name, and waits for that of worker 0, or of all workers that are there.

        Worker 0 gets the values of all that have told one, in the order of workers; another worker gets worker 0's.
        """
        told = self._told[name]
        told[worker] = value
        self._changing.notify_all()
        if awaited != "nobody":
            self._wait_for(lambda: told.keys() >= ({0} if awaited == "first" else self._pairs.keys()))
        return [told[each] for each in sorted(told) if worker == 0 or each == 0]

    _ANSWERS: ClassVar[dict[str, Callable[..., Any]]] = {
        "place": _place, "staleness": _staleness, "pause": _pause, "next": _next, "trained": _trained,
        "give back": _give_back, "tell": _tell,
    }  # fmt: skip


def _problem_of(error: Exception) -> str:
    known = isinstance(error, PairEndedError | UpdateError)
    return str(error) if known else "".join(traceback.format_exception(error))


def joined(address: str, port: int) -> Server:
    """The next server of the job at an address, which may be yet to start.

    Raises:
        RuntimeError: the job has all of its servers.
        PairEndedError: a worker has not come in time.
    """
    while True:
        try:
            with socket.create_connection((address, port), timeout=_PROBE_S):
                pass
            store = TCPStore(
                address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_PROBE_S)
            )
            while not store.check([EXTERNAL]):
                time.sleep(_PROBE_S)
            break
        except (OSError, RuntimeError):
            time.sleep(_PROBE_S)
    name = store.get(EXTERNAL).decode()
    job: Job = pickle.loads(store.get(f"{name}/job"))
    number = store.add(f"{name}/servers", 1) - 1
    if number >= job.num_servers:
        raise RuntimeError(f"the job has its {job.num_servers} servers already (num_servers)")
    return Server(store, job, number)


def main(host: str, port: int, name: str, number: int, num_threads: int) -> None:
    """Runs a server for the process that has started it, and ends with that process.

    The end of standard input means that the process has ended. ``name`` is that of the job in its store.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the workers, who leave in order
    torch.set_num_threads(num_threads)
    ended = threading.Event()
    servers: list[Server] = []

    def await_end() -> None:
        sys.stdin.read()
        ended.set()
        if servers:
            servers[0].parent_has_ended()
        else:
            os._exit(1)

    threading.Thread(target=await_end, name="parent", daemon=True).start()
    store = TCPStore(host, port, is_master=False)
    job: Job = pickle.loads(store.get(f"{name}/job"))
    servers.append(Server(store, job, number))
    if ended.is_set():
        servers[0].parent_has_ended()
    problem = servers[0].serve()
    os._exit(1 if problem else 0)
