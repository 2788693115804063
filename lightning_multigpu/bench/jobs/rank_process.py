"""What runs in the process of one rank: its place in the world, and the requests that it answers."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from lightning_multigpu.communication.interface import interface_towards

_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
_RANKS = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"}
_END = "end"
_LINGER_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rank sits.

    Args:
        rank, local_rank, node_rank: of this process.
        world_size: ranks of the job.
        devices: ranks a host.
        num_nodes: hosts.
        threads: intra-op threads.
        address: of the first host.
        store_port: where torch's store for the bench is.
        job: names what this job keeps in the store.
        main_port: a port of the first host that the job may take, ``MASTER_PORT``.
        verbose: what ranks print goes to standard error, and nowhere otherwise.
    """

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    devices: int
    num_nodes: int
    threads: int
    address: str
    store_port: int
    job: str
    main_port: int
    verbose: bool


class Requests:
    """What this rank is asked, one request after another; each needs one answer.

    While there is none, the rank sleeps. When the process that asks has ended, so does this one, wherever it stands.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._receive, name="bench-requests", daemon=True).start()

    def __iter__(self) -> Iterator[Any]:
        while (request := self.next()) is not None:
            yield request

    def next(self) -> Any:
        """The next request, or None when there is nothing left to do."""
        request = self._queue.get()
        return None if isinstance(request, str) and request == _END else request

    def answer(self, value: Any) -> None:
        """Answers the request before."""
        self._connection.send(("answer", value))

    def _receive(self) -> None:
        while True:
            try:
                self._queue.put(self._connection.recv())
            except (EOFError, OSError):
                os._exit(1)


Entry = Callable[[Any, Seat, Requests], None]
"""What a rank runs: settings, its seat, its requests. A function of a module, since it is sent by its name."""


def run_rank(entry: Entry, settings: Any, seat: Seat, connection: Connection) -> None:
    """Runs ``entry``; what it raises becomes its last answer."""
    _redirect(seat.verbose)
    _set_environment(seat)
    torch.set_num_threads(seat.threads)
    try:
        entry(settings, seat, Requests(connection))
    except BaseException as error:
        traceback.print_exc()
        connection.send(("raised", f"{type(error).__name__}: {error}"))
        # Ending now would close connections that others wait in: they would seem to have failed by themselves.
        time.sleep(_LINGER_S)
        sys.exit(1)
    connection.send(("ended", None))


def end_request() -> str:
    """The request after which :meth:`Requests.next` returns None."""
    return _END


def _redirect(verbose: bool) -> None:
    if not verbose:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    os.dup2(2, 1)


def _set_environment(seat: Seat) -> None:
    """As if a user had started this rank by hand: nothing of the launcher that has started the bench."""
    for name in list(os.environ):
        if name in _RANKS or name.startswith(_LAUNCHERS):
            del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = str(seat.threads)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = seat.address, str(seat.main_port)
    interface = interface_towards(seat.address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
