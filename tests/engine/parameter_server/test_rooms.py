"""Workers and servers of one host share memory, all others do not, and nothing is left of it."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.distributed import TCPStore

from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.shared_memory.segment import OfferedSegment, mapped
from lightning_multigpu.engine.parameter_server import servers as servers_module
from lightning_multigpu.engine.parameter_server.pair import LastWords, Pair, PairEndedError
from lightning_multigpu.engine.parameter_server.servers import Servers
from tests.engine.parameter_server.test_asynchronous_updates import wait_until, workers
from tests.engine.parameter_server.test_servers import Job, job, train
from tests.engine.parameter_server.updates import assert_equal, averaged, gradients, groups_of, on_one_device, weights

NOBODY = 65534


def num_mapped() -> int:
    """Segments in this process's memory."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:lightning_multigpu")


def pairs(*, between: Callable[[Pair, Pair], None]) -> None:
    """Both ends of the connections between a worker and a server, in this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connections = Connections()

    def end(is_server: bool) -> Pair:
        own = TCPStore("127.0.0.1", store.port, is_master=False)
        options: dict[str, Any] = {"connections": connections, "timeout_s": 20.0}
        return Pair(own, "pair", label="the server" if not is_server else "the worker", is_server=is_server, **options)

    with ThreadPoolExecutor(2) as threads:
        worker, server = threads.map(end, (False, True))
    between(worker, server)


def test_last_words_arrive_although_no_further_message_can_be_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that fails sends its last words and closes the connection, perhaps before the worker expects more."""

    def between(worker: Pair, server: Pair) -> None:
        expected = worker.expect()  # which also expects the last words
        server.send("an answer")
        server.send(LastWords("the disk is full"))
        assert expected.get() == "an answer"

        def closed(*_: Any) -> Any:
            raise RuntimeError("Connection closed by peer")

        monkeypatch.setattr(worker, "requests", SimpleNamespace(recv=closed))
        with pytest.raises(PairEndedError, match="the server has failed: the disk is full"):
            worker.receive()
        with pytest.raises(PairEndedError, match="the server has ended, or the connection to it"):
            worker.receive()

    pairs(between=between)


def test_an_error_that_is_not_of_the_connection_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files, or no memory, was "the server has ended"."""
    text = "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:208] rv != -1. Too many open files"

    def between(worker: Pair, server: Pair) -> None:
        def refused(*_: Any) -> Any:
            raise RuntimeError(text)

        monkeypatch.setattr(worker, "_tensors", SimpleNamespace(send=refused))
        with pytest.raises(RuntimeError, match="Too many open files") as caught:
            worker.isend(torch.ones(1), 0)
        assert not isinstance(caught.value, PairEndedError)

    pairs(between=between)


def trained(found: Job) -> list[tuple[Servers, int]]:
    """Two workers train as one device does; returns the connections of each, and the bytes that it pushed in memory."""
    expected, _ = on_one_device(lambda groups: optim.AdamW(groups, lr=0.1), [averaged(step) for step in range(3)])

    def work(worker: int) -> tuple[Servers, int]:
        meter = Meter()
        with found.connections(worker, meter) as connections:
            parameters = weights()
            train(connections, parameters, optim.AdamW(groups_of(parameters), lr=0.1), range(3))
            assert_equal(parameters, expected)
            meter.end_step()
        meter.flush()
        return connections, meter.steps[0].memory_bytes

    return found.workers.run(work)


@pytest.mark.parametrize("is_synchronous", [True, False], ids=["sync", "async"])
def test_no_socket_carries_gradients_and_weights(is_synchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    carried: set[bool] = set()
    isend = Pair.isend

    def send(pair: Pair, tensor: Tensor, tag: int) -> Any:
        carried.add(not pair.shares_memory)
        return isend(pair, tensor, tag)

    monkeypatch.setattr(Pair, "isend", send)
    before = num_mapped()
    with job(2, 1, is_synchronous=is_synchronous) as found, found.connections(0) as connections:
        parameters = weights()
        train(connections, parameters, optim.AdamW(parameters, lr=0.1), range(3)).close()
        counted = connections.statistics()
        assert num_mapped() > before
    size_bytes = 3 * sum(parameter.nbytes for parameter in parameters)
    assert sum(counted.bytes_in) == size_bytes <= sum(counted.bytes_out), "they count all the same"
    assert carried == {False}
    del found, connections
    wait_until(lambda: num_mapped() == before)


def cannot(*_: Any) -> Any:
    raise PermissionError(errno.EACCES, "another user's")


def test_memory_that_cannot_be_shared_is_told_of_and_sockets_carry_all(monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_mapped()
    monkeypatch.setattr(servers_module, "mapped", cannot)
    with job(2) as found:
        for connections, memory_bytes in trained(found):
            assert memory_bytes == 0
            assert [*connections.unshared.values()] == ["[Errno 13] another user's"] * 2
            assert all(name.startswith("parameter server ") for name in connections.unshared)
    assert num_mapped() == before


def test_what_a_lost_worker_shared_is_freed() -> None:
    with workers(number=2) as (first, second):
        before = num_mapped()
        second.vanish()
        second.leave()
        wait_until(lambda: bool(first.connections.statistics() and first.connections.lost))
        del second.remote, second.connections
        wait_until(lambda: num_mapped() == before - 4)  # gradients and weights, in the worker and in the server
        first.step(gradients(0, 0))


def as_nobody(segment: OfferedSegment) -> int:
    """The exit status of a process of another user that maps the memory: 7 if it may not."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            mapped(segment.offer)
        except PermissionError:
            status = 7
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class TestSegment:
    def test_it_has_no_name_and_keeps_its_length(self) -> None:
        maps, files = num_mapped(), len(os.listdir("/proc/self/fd"))
        segment = OfferedSegment(100)
        pid, descriptor, _ = segment.offer
        mapped(segment.offer)
        assert len(os.listdir("/proc/self/fd")) == files + 1
        for size_bytes in (0, 10_000):
            with pytest.raises(PermissionError):
                os.truncate(f"/proc/{pid}/fd/{descriptor}", size_bytes)
        memory: Tensor = segment.memory
        del segment
        assert len(os.listdir("/proc/self/fd")) == files
        memory.fill_(1)
        del memory
        assert num_mapped() == maps

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
    def test_other_users_cannot_map_it(self) -> None:
        assert as_nobody(OfferedSegment(100)) == 7

    def test_only_what_was_offered_is_opened(self, tmp_path: Path) -> None:
        segment = OfferedSegment(100)
        pid, descriptor, token = segment.offer
        with (tmp_path / "other").open("w+b") as other, pytest.raises(OSError, match="different containers"):
            mapped((pid, other.fileno(), token))
        with pytest.raises(OSError, match="different containers"):
            mapped((pid, descriptor, bytes(16)))


def test_synchronous_workers_read_the_weights_of_the_server() -> None:
    """The server makes no copy for each of them."""
    with job() as found:
        trained(found)
        (shard,) = found.servers[0]._shards.values()
        for bucket in shard._buckets.values():
            assert {room.pulled.data_ptr() for room in bucket.rooms.values()} == {bucket.weights.data_ptr()}
            assert len({room.pushed.data_ptr() for room in bucket.rooms.values()}) == 2
            assert all(torch.equal(bucket.part(bucket.weights, i), p) for i, p in enumerate(bucket.pieces))
