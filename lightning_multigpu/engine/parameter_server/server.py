"""A parameter server: a process that holds shards of weights, averages gradients and steps optimizers.

Each worker has a connection to each server, and one thread of the server reads it while another writes to it. The
thread whose message completes a bucket averages and updates it; the others go on receiving::

    worker 0  --push b--+                       +--weights b-->  worker 0
                        |  all pushes of b and  |
                        +- all steps are there: +
                        |  average, clip, step  |
    worker 1  --push b--+                       +--weights b-->  worker 1

A worker with which the server shares no memory has a second connection, for requests of a step: on the first one they
would wait behind gradients that are on their way.

Gradients are summed in the order of workers, so that a run repeats bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lightning_multigpu.communication.channel import Channel, ChannelError, Listener
from lightning_multigpu.communication.checksums import bytes_of
from lightning_multigpu.engine.parameter_server.batch_queue import BatchQueue
from lightning_multigpu.engine.parameter_server.consistency import Consistency
from lightning_multigpu.engine.parameter_server.member import Member
from lightning_multigpu.engine.parameter_server.served_optimizer import Job, ServedOptimizer, request_of
from lightning_multigpu.engine.parameter_server.wire import (
    WireError,
    room_for,
    unpacked,
)

_MAX_WORKERS = 65_536
_MAX_NAMES = 1000
_LAST_WORDS_S = 5.0
_LOOK_S = 1.0  # between two checks for machines that have vanished
_SILENCE_S = 0.5, 86_400.0
_LATE_S = 2.0


class Server:
    """A parameter server, which listens as soon as it is made. See :meth:`serve`.

    Args:
        host: the address to listen at.
        port: 0 for a free one.
        secret: of the job.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._changing = threading.Condition()
        self._members: dict[int, Member] = {}
        self._job: Job | None = None
        self._optimizers: dict[int, ServedOptimizer] = {}
        self._departed: set[int] = set()
        self._num_come = 0
        self._bytes_in = self._bytes_out = 0  # of workers that have left
        self._num_steps, self._waited_s = 0, 0.0
        self._told: dict[str, dict[int, Any]] = defaultdict(dict)
        self._asked_for: tuple[str, bool] | None = None
        self._queue = BatchQueue()
        self._run = 0
        self._await_run: dict[int, int] = {}
        self._awaited_batch: dict[str, Any] | None = None
        self._last_word: Any = None
        self._await_last_word: set[int] = set()
        self._is_stopping = False
        self._problem = ""
        self._is_over = threading.Event()
        self._listener = Listener(host, port, secret, self._welcome)

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return self._listener.port

    def serve(self) -> str:
        """Serves a job until all of its workers have left; returns what went wrong, or an empty text."""
        while not self._is_over.wait(_LOOK_S):
            with self._changing:
                members = list(self._members.values())
            for member in members:
                member.channel.end_if_silent()
        with self._changing:
            members = list(self._members.values())
            for served in self._optimizers.values():
                served.end_offers()
        for member in members:
            if self._problem:
                member.post({"kind": "error", "text": self._problem})
            member.outbox.put(None)
        for member in members:
            member.writer.join(_LAST_WORDS_S)
            member.shut_down()
        if self._problem:
            with self._changing:  # workers that connect late get the error, too
                self._changing.wait_for(self._all_have_come, _LATE_S)
        self._listener.close()
        return self._problem

    def _all_have_come(self) -> bool:
        return self._job is None or self._num_come >= self._job.num_workers

    def end(self, problem: str) -> None:
        """Ends :meth:`serve`; workers that are still there see their connections close.

        Args:
            problem: why; an empty text where all is well.
        """
        if not self._is_over.is_set():
            self._problem = problem
            self._is_over.set()
            with self._changing:
                self._changing.notify_all()

    def _welcome(self, channel: Channel) -> None:
        member: Member | None = None
        try:
            with _usable():
                member = self._introduced(channel)
                while self._handle(member, channel, *channel.receive()):
                    pass
            if channel is member.channel:
                self._leaves(member)
                member.outbox.put(None)
        except ChannelError as error:
            if member is not None:
                self._is_gone(member, str(error))
        except WireError as error:
            if member is not None and self._may_lose_workers and member.worker != 0:
                member.post({"kind": "error", "text": str(error)})
                self._is_gone(member, str(error))
            elif member is not None:
                self.end(str(error))
            else:
                with suppress(ChannelError):
                    channel.send({"kind": "error", "text": str(error)})
                with self._changing:
                    self._num_come += 1
                    self._changing.notify_all()
        finally:
            if member is not None and channel is member.channel:
                member.writer.join(_LAST_WORDS_S)  # its last frame may be the error
            channel.shut_down()
            channel.close()

    def _introduced(self, channel: Channel) -> Member:
        fields, payload_bytes = channel.receive()
        if "requests_of" in fields and not payload_bytes:
            return self._member_with_requests(fields["requests_of"], channel)
        numbers = [fields.get(name) for name in ("worker", "num_workers", "num_servers")]
        worker, workers, servers = (n if type(n) is int and 0 <= n <= _MAX_WORKERS else -1 for n in numbers)
        rules = fields.get("consistency")
        if fields.get("kind") != "hello" or payload_bytes or min(worker, workers - 1 - worker, servers - 1) < 0:
            raise WireError("the first message is no worker's hello")
        given = Consistency(**rules) if isinstance(rules, dict) else Consistency()
        job = Job(workers, servers, given)
        with self._changing:
            if self._job not in (None, job):
                raise WireError(f"this server belongs to another job: {self._job}, and not {job}")
            if worker in self._members:
                raise WireError(f"there is a worker {worker} already")
            self._job = job
            if self._is_over.is_set():  # the thread that writes to the worker would never end
                raise WireError(self._problem or "the job of this server has ended")
            member = self._members[worker] = Member(worker, channel)
            self._num_come += 1
            silence_s = fields.get("silence_s")
            if isinstance(silence_s, float) and _SILENCE_S[0] <= silence_s <= _SILENCE_S[1]:
                channel.watch(silence_s)
            member.shares_memory = fields.get("shares_memory") is True and channel.is_within_host
            member.writer.start()
            member.post({"kind": "welcome"})
            return member

    def _member_with_requests(self, worker: Any, channel: Channel) -> Member:
        """The worker that opens a second connection, where its requests do not wait behind its gradients."""
        with self._changing:
            member = self._members.get(worker) if type(worker) is int else None
            if member is None:
                raise WireError(f"there is no worker {str(worker)[:40]}")
            member.requests = channel
        channel.send({"kind": "welcome"})
        return member

    @property
    def _may_lose_workers(self) -> bool:
        return self._job is not None and not self._job.consistency.is_synchronous

    def _leaves(self, member: Member) -> None:
        with self._changing:
            self._departed.add(member.worker)
            self._changing.notify_all()
            assert self._job is not None
            if self._may_lose_workers:
                self._forget(member)
            elif len(self._departed) == self._job.num_workers:
                self.end("")

    def _is_gone(self, member: Member, why: str) -> None:
        """A worker's connection has broken: the others go on without it where they may."""
        with self._changing:
            if self._members.get(member.worker) is not member:
                return  # its other connection has ended before
            if not self._may_lose_workers or member.worker == 0:
                self.end(f"worker {member.worker} is gone: {why}")
            elif not self._is_over.is_set():
                member.outbox.put(None)
                for told in self._told.values():
                    told.pop(member.worker, None)
                self._forget(member)
                self._changing.notify_all()

    def _forget(self, member: Member) -> None:
        worker = member.worker
        del self._members[worker]
        if member.requests is not None:
            member.requests.shut_down()
        self._bytes_in += member.channel.bytes_in + member.memory_in
        self._bytes_out += member.channel.bytes_out + member.memory_out
        self._await_run.pop(worker, None)
        self._await_last_word.discard(worker)
        batches = self._queue.lose(worker)
        for served in self._optimizers.values():
            served.loses(worker)
        first = self._members.get(0)
        if first is not None and worker not in self._departed:
            first.post({"kind": "lost", "worker": worker, "batches": batches, "left": len(self._members)})
        self._answer_worker_0()
        self._tell_what_workers_told()
        self._tell_of_stop()
        if 0 in self._departed and not self._members:
            self.end("")

    def _handle(self, member: Member, channel: Channel, fields: dict[str, Any], payload_bytes: int) -> bool:
        """Handles a worker's message; False after the last one of a connection, "goodbye"."""
        kind, worker = fields.get("kind"), member.worker
        if kind in ("configure", "load", "over"):
            body = fields.get("body")
            tensors = room_for(body, payload_bytes)
            channel.receive_into([bytes_of(tensor) for tensor in tensors])
            with self._changing:
                self._handle_value(member, fields, unpacked(body, tensors))
            return True
        if kind == "push":
            self._push(member, channel, fields, payload_bytes)
            return True
        if kind == "replace" and worker == 0:
            with self._changing:
                room = self._optimizer(fields).room_for_weights(fields.get("bucket"), payload_bytes)
            channel.receive_into([bytes_of(room)])
            with self._changing:
                self._optimizer(fields).replace_weights(fields["bucket"], room)
            return True
        if kind in ("step", "average"):
            tensors = room_for(fields.get("values", []), payload_bytes)
            channel.receive_into([bytes_of(tensor) for tensor in tensors])
        elif payload_bytes:
            raise WireError(f"a message {str(kind)[:40]!r} came with {payload_bytes} bytes")
        if kind == "goodbye":
            return False
        with self._turn():
            if kind == "statistics":
                member.post({"kind": "statistics", **self._statistics()})
                return True
            if self._may_lose_workers and self._handle_asynchronous(member, fields):
                return True
            served = self._optimizer(fields)
            if kind in ("step", "average"):
                self._num_steps += kind == "step"
                served.request(worker, int(fields["round"]), request_of(fields, tensors))
            elif kind == "pull":
                served.pull(worker)
            elif kind == "memory":
                served.memory_is_mapped(worker, int(fields["number"]), is_mapped=fields["is_mapped"] is True)
            elif kind == "norm":
                served.norm(worker, float(fields["squares"]))
            elif kind == "state":
                member.post_value({"kind": "state"}, served.state(), "the state of an optimizer")
            else:
                raise WireError(f"a worker sends {str(kind)[:40]!r}")
        return True

    def _handle_value(self, member: Member, fields: dict[str, Any], value: Any) -> None:
        """Handles a message with a value: parameters that are new, a checkpoint's state, or the end of training."""
        kind, worker = fields["kind"], member.worker
        if kind == "configure":
            self._configure(member, fields, value)
            self._changing.notify_all()
        elif worker != 0:
            raise WireError(f"worker {worker} sends {kind!r}, and not worker 0")
        elif kind == "over":
            self._is_told_the_end(value)
        else:
            self._optimizer(fields).load(value["values"], value["state"])
            member.post({"kind": "done"})

    def _configure(self, member: Member, fields: dict[str, Any], value: Any) -> None:
        """Takes the plan of parameters that are new; a worker of this host is told of memory for them."""
        worker, plan, optimizer = member.worker, int(fields["number"]), _optimizer_number(fields)
        if optimizer not in self._optimizers:
            assert self._job is not None
            self._optimizers[optimizer] = ServedOptimizer(self._job, self._members, optimizer)
        served = self._optimizers[optimizer]
        if self._may_lose_workers and worker != 0:  # it may have connected before worker 0
            self._changing.wait_for(
                lambda: not served.lacks(plan) or self._is_stopping or 0 in self._departed or self._is_over.is_set()
            )
        served.configure(worker, plan, fields["plan"], value)
        offered = {"memory": served.offer_memory(worker, plan)} if member.shares_memory else {}
        member.post({"kind": "done", **offered})

    def _push(self, member: Member, channel: Channel, fields: dict[str, Any], payload_bytes: int) -> None:
        """Takes the gradients of a bucket, from the connection or from memory that the worker shares."""
        worker, served = member.worker, self._optimizer(fields)
        memory = member.memory[served.number, fields["bucket"]] if fields.get("in_memory") is True else None
        with self._turn():
            room = served.room_for_push(
                fields.get("bucket"),
                fields.get("kinds"),
                payload_bytes,
                is_compressed=fields.get("is_compressed") is True,
                memory=memory,
            )
        if memory is None and room is not None:
            channel.receive_into([bytes_of(room)])
        with self._turn():
            if memory is not None and room is not None:
                member.memory_in += room.nbytes
            served.push(
                worker,
                fields["bucket"],
                fields.get("round", -1),
                fields["kinds"],
                room,
                rows=served.rows(fields["bucket"], fields.get("rows", ())),
                is_in_memory=memory is not None,
            )

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Holds the lock while a worker's message is handled, after messages of other workers."""
        start_s = time.perf_counter()
        with self._changing:
            self._waited_s += time.perf_counter() - start_s
            yield

    def _statistics(self) -> dict[str, Any]:
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for served in self._optimizers.values():
            for worker, found in served.staleness.items():
                counts[worker].update(found)
        return {
            "bytes_in": self._bytes_in + sum(m.channel.bytes_in + m.memory_in for m in self._members.values()),
            "bytes_out": self._bytes_out + sum(m.channel.bytes_out + m.memory_out for m in self._members.values()),
            "num_steps": self._num_steps,
            "waited_s": self._waited_s,
            "staleness": [[worker, sorted(found.items())] for worker, found in sorted(counts.items())],
        }

    # Asynchronous workers

    def _handle_asynchronous(self, member: Member, fields: dict[str, Any]) -> bool:
        """Handles messages of asynchronous workers; False for any other message."""
        kind, worker = fields.get("kind"), member.worker
        if kind == "next":
            if fields.get("limit") is not None and not self._queue.is_limited:
                self._queue.limit_to(int(fields["limit"]))
            self._send_batch(member, fields)
        elif kind in ("start", "await start"):
            run = int(fields["run"])
            if kind == "await start":
                self._await_run[worker] = run
            elif worker == 0:
                self._run, self._queue, self._last_word = run, BatchQueue(), None
            for waiting in [w for w, awaited in self._await_run.items() if awaited <= self._run]:
                del self._await_run[waiting]
                self._members[waiting].post({"kind": "start"})
        elif kind == "trained":
            self._queue.trained(worker, int(fields["epoch"]), int(fields["number"]))
            self._answer_worker_0()
        elif kind == "give back":
            self._queue.give_back(worker, int(fields["epoch"]))
            self._answer_worker_0()
        elif kind == "stop" and worker == 0:
            self._is_stopping = True
            self._changing.notify_all()  # a worker may wait for worker 0's parameters
            self._queue.end_with(int(fields["epoch"]))
            for other in self._members.values() if fields["at_once"] else ():
                other.post({"kind": "stop"})
            self._tell_of_stop()
        elif kind == "await over":
            if self._last_word is None:
                self._await_last_word.add(worker)
                self._tell_of_stop()
            else:
                member.post_value({"kind": "over"}, self._last_word, "the end of training")
        elif kind == "tell":
            if len(self._told) >= _MAX_NAMES and fields["name"] not in self._told:
                raise WireError(f"worker {worker} tells values under more than {_MAX_NAMES} names")
            self._told[str(fields["name"])][worker] = fields["value"]
            self._tell_what_workers_told()
        elif kind == "told" and worker == 0:
            self._asked_for = str(fields["name"]), bool(fields["of_all"])
            self._tell_what_workers_told()
        elif kind == "pause":
            for served in self._optimizers.values():
                served.pauses(worker)
        else:
            return False
        return True

    def _send_batch(self, member: Member, question: dict[str, Any]) -> None:
        """Sends a worker its next batch; a waiting worker 0 gets the answer once no other worker can lose a batch."""
        worker = member.worker
        epoch, first, number_of = (int(question[name]) for name in ("epoch", "first", "num_batches"))
        number = self._queue.next(worker, epoch, first=first, num_batches=number_of)
        may_return = worker == 0 and number is None and self._queue.may_return(worker, epoch)
        if may_return and question.get("waits") is True:
            self._awaited_batch = question
            return
        is_over = number is None and self._queue.is_over(worker, epoch)
        member.post({"kind": "batch", "number": number, "is_over": is_over, "may_return": may_return})

    def parent_has_ended(self) -> None:
        """Ends :meth:`serve`, unless the job goes on without the worker that started this server."""
        with self._changing:
            if not (self._may_lose_workers and 0 in self._members):
                self.end("the process that started it has ended")

    def _is_told_the_end(self, value: Any) -> None:
        self._last_word = value
        for worker in self._await_last_word:
            self._members[worker].post_value({"kind": "over"}, value, "the end of training")
        self._await_last_word.clear()

    def _answer_worker_0(self) -> None:
        """Answers a waiting worker 0, if it gets a batch that came back, or if no other worker has one any more."""
        first = self._members.get(0)
        if self._awaited_batch is not None and first is not None:
            question, self._awaited_batch = self._awaited_batch, None
            self._send_batch(first, question)

    def _tell_what_workers_told(self) -> None:
        """Sends worker 0 the values of a name, if worker 0 has asked for them: once all workers have sent one, if
        worker 0 waits for all."""
        first = self._members.get(0)
        if self._asked_for is None or first is None:
            return
        name, of_all = self._asked_for
        told = self._told.get(name, {})
        if of_all and not told.keys() >= self._members.keys():
            return
        self._asked_for = None
        first.post({"kind": "told", "values": [told[worker] for worker in sorted(told)]})
        if of_all:
            self._told.pop(name, None)

    def _tell_of_stop(self) -> None:
        """Tells worker 0, which has stopped training, that all other workers have stopped."""
        first = self._members.get(0)
        if self._is_stopping and first is not None and self._await_last_word >= self._members.keys() - {0}:
            self._is_stopping = False
            first.post({"kind": "stopped"})

    def _optimizer(self, fields: Mapping[str, Any]) -> ServedOptimizer:
        served = self._optimizers.get(_optimizer_number(fields))
        if served is None:
            raise WireError(f"there is no optimizer {str(fields.get('optimizer'))[:40]}")
        return served


def _optimizer_number(fields: Mapping[str, Any]) -> int:
    number = fields.get("optimizer")
    if type(number) is not int or not 0 <= number < 1000:
        raise WireError(f"there is no optimizer {str(number)[:40]}")
    return number


@contextmanager
def _usable() -> Iterator[None]:
    """Raises WireError for a message that lacks a field, or has a field that makes no sense."""
    try:
        yield
    except (ChannelError, WireError):
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise WireError(
            f"a message cannot be used ({type(error).__name__} at {where.name}:{where.lineno}: {error})"
        ) from error


def main(host: str, secret: str, num_threads: int) -> None:
    """Runs a server for the process that has started it: prints the port, and ends with that process.

    The end of standard input means that the process has ended.

    Args:
        host: the address at which it listens.
        secret: the secret of the job, in hexadecimal.
        num_threads: threads for averages and updates.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the workers, who leave in order
    torch.set_num_threads(num_threads)
    server = Server(host, 0, bytes.fromhex(secret))
    print(json.dumps({"port": server.port}), flush=True)

    def await_end() -> None:
        sys.stdin.read()
        server.parent_has_ended()

    threading.Thread(target=await_end, name="parent", daemon=True).start()
    problem = server.serve()
    sys.stdout.flush()
    os._exit(1 if problem else 0)  # threads of lost workers may still be receiving
