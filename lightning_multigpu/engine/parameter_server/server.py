"""A parameter server: a process that holds shards of weights, averages gradients and steps optimizers.

Each worker has a connection to each server, and one thread of the server reads it while another writes to it. The
thread whose message completes a bucket averages and updates it; the others go on receiving::

    worker 0  --push b--+                       +--weights b-->  worker 0
                        |  all pushes of b and  |
                        +- all steps are there: +
                        |  average, clip, step  |
    worker 1  --push b--+                       +--weights b-->  worker 1

Gradients are summed in the order of workers, so that a run repeats bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lightning_multigpu.communication.channel import Channel, ChannelError, Listener
from lightning_multigpu.engine.parameter_server.member import Member
from lightning_multigpu.engine.parameter_server.served_optimizer import ServedOptimizer, request_of
from lightning_multigpu.engine.parameter_server.wire import (
    WireError,
    bytes_of,
    room_for,
    unpacked,
)

_MAX_WORKERS = 65_536
_LAST_WORDS_S = 5.0


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
        self._changing = threading.Lock()
        self._members: dict[int, Member] = {}
        self._job: tuple[int, int] | None = None
        self._optimizers: dict[int, ServedOptimizer] = {}
        self._departed: set[int] = set()
        self._problem = ""
        self._is_over = threading.Event()
        self._listener = Listener(host, port, secret, self._welcome)

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return self._listener.port

    def serve(self) -> str:
        """Serves a job until all of its workers have left; returns what went wrong, or an empty text."""
        self._is_over.wait()
        self._listener.close()
        with self._changing:
            members = list(self._members.values())
        for member in members:
            if self._problem:
                member.post({"kind": "error", "text": self._problem})
            member.outbox.put(None)
        for member in members:
            member.writer.join(_LAST_WORDS_S)
            member.channel.shut_down()
        return self._problem

    def end(self, problem: str) -> None:
        """Ends :meth:`serve`; workers that are still there see their connections close."""
        if not self._is_over.is_set():
            self._problem = problem
            self._is_over.set()

    def _welcome(self, channel: Channel) -> None:
        member: Member | None = None
        try:
            with _usable():
                member = self._introduced(channel)
                while self._handle(member, *channel.receive()):
                    pass
            self._leaves(member)
            member.outbox.put(None)
        except ChannelError as error:
            if member is not None:
                self.end(f"worker {member.worker} is gone: {error}")
        except WireError as error:
            if member is not None:
                self.end(str(error))
            else:
                with suppress(ChannelError):
                    channel.send({"kind": "error", "text": str(error)})
        finally:
            if member is not None:
                member.writer.join(_LAST_WORDS_S)  # the last thing that it sends may be what went wrong
            channel.shut_down()
            channel.close()

    def _introduced(self, channel: Channel) -> Member:
        fields, payload_bytes = channel.receive()
        numbers = [fields.get(name) for name in ("worker", "num_workers", "num_servers")]
        worker, workers, servers = (n if type(n) is int and 0 <= n <= _MAX_WORKERS else -1 for n in numbers)
        if fields.get("kind") != "hello" or payload_bytes or not 0 <= worker < workers or servers < 1:
            raise WireError("not the greeting of a worker")
        with self._changing:
            if self._job not in (None, (workers, servers)):
                raise WireError(f"this server belongs to a job of {self._job} workers and servers")
            if worker in self._members:
                raise WireError(f"there is a worker {worker} already")
            self._job = (workers, servers)
            member = self._members[worker] = Member(worker, channel)
        member.writer.start()
        member.post({"kind": "welcome", "pid": os.getpid()})
        return member

    def _leaves(self, member: Member) -> None:
        with self._changing:
            self._departed.add(member.worker)
            assert self._job is not None
            if len(self._departed) == self._job[0]:
                self.end("")

    def _handle(self, member: Member, fields: dict[str, Any], payload_bytes: int) -> bool:
        """Does what a worker asks; False if it has said goodbye."""
        kind, worker, channel = fields.get("kind"), member.worker, member.channel
        if kind in ("configure", "load"):
            body = fields.get("body")
            tensors = room_for(body, payload_bytes)
            channel.receive_into([bytes_of(tensor) for tensor in tensors])
            value = unpacked(body, tensors)
            with self._changing:
                if kind == "configure":
                    served = self._optimizers.get(number := _optimizer_number(fields))
                    if served is None:
                        assert self._job is not None
                        served = self._optimizers[number] = ServedOptimizer(*self._job, self._members, number)
                    served.configure(worker, int(fields["number"]), fields["plan"], value)
                elif worker != 0:
                    raise WireError(f"worker {worker} sends a state, and not worker 0")
                else:
                    self._optimizer(fields).load(value["values"], value["state"])
            member.post({"kind": "done"})
            return True
        if kind == "push":
            served = self._optimizer(fields)
            with self._changing:
                room = served.room_for_push(fields.get("bucket"), fields.get("kinds"), payload_bytes)
            if room is not None:
                channel.receive_into([bytes_of(room)])
            with self._changing:
                served.push(worker, fields["bucket"], fields.get("round", -1), fields["kinds"], room)
            return True
        if kind == "replace" and worker == 0:
            with self._changing:
                room = self._optimizer(fields).room_for_weights(fields.get("bucket"), payload_bytes)
            channel.receive_into([bytes_of(room)])
            with self._changing:
                self._optimizer(fields).replace_weights(fields["bucket"], room)
            return True
        if payload_bytes:
            raise WireError(f"a message {str(kind)[:40]!r} came with {payload_bytes} bytes")
        if kind == "goodbye":
            return False
        with self._changing:
            served = self._optimizer(fields)
            if kind in ("step", "average"):
                served.request(worker, int(fields["round"]), request_of(fields))
            elif kind == "norm" and worker == 0:
                served.norm(float(fields["squares"]))
            elif kind == "state":
                member.post_value({"kind": "state"}, served.state(), "the state of an optimizer")
            else:
                raise WireError(f"a worker sends {str(kind)[:40]!r}")
        return True

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
    """Says so where a message cannot be used: it lacks a field, or has one that makes no sense."""
    try:
        yield
    except (ChannelError, WireError):
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise WireError(
            f"a message cannot be used ({type(error).__name__} at {where.name}:{where.lineno}: {error})"
        ) from error


def main() -> None:
    """Runs the server that a strategy has started, and tells it the port; ends with it.

    Standard input brings one line, ``{"host": ..., "secret": ..., "num_threads": ..., "path": ...}``, the last where
    modules are found. Its end means that the strategy's process has ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the workers, who leave in order
    settings = json.loads(sys.stdin.readline())
    sys.path[:] = settings["path"]
    torch.set_num_threads(int(settings["num_threads"]))
    server = Server(settings["host"], 0, bytes.fromhex(settings["secret"]))
    print(json.dumps({"port": server.port}), flush=True)

    def await_end() -> None:
        sys.stdin.read()
        server.end("the process that started it has ended")

    threading.Thread(target=await_end, name="parent", daemon=True).start()
    problem = server.serve()
    sys.stdout.flush()
    os._exit(1 if problem else 0)  # threads of members that are gone may still be receiving


if __name__ == "__main__":
    main()
