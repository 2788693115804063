"""Workers and servers of one host share memory, all others do not, and nothing is left of it."""

import gc
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.shared_memory.segment import OfferedSegment, mapped
from lightning_multigpu.engine.parameter_server import pair as pair_module
from lightning_multigpu.engine.parameter_server import servers as servers_module
from lightning_multigpu.engine.parameter_server.pair import (
    _HEADER,
    LastWords,
    Pair,
    PairEndedError,
    Room,
    accepted,
    connected,
)
from tests.engine.parameter_server.test_asynchronous_updates import workers
from tests.engine.parameter_server.test_servers import job, server_step, train, vanish
from tests.engine.parameter_server.updates import assert_equal, averaged, gradients, groups_of, on_one_device, weights
from tests.job.guardian.job import eventually

NOBODY = 65534


def num_mapped() -> int:
    """Segments in this process's memory."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:lightning_multigpu")


@pytest.fixture
def pair() -> Iterator[tuple[Pair, Pair]]:
    """Both ends of the connections between a worker and a server, in this process."""
    with ThreadPoolExecutor(1) as threads:
        found: Future[str] = Future()
        server = threads.submit(accepted, "127.0.0.1", 1, 20.0, found.set_result)
        with socket.create_connection(("127.0.0.1", int(found.result().split()[1]))) as stranger:
            stranger.sendall(bytes(1000))
            worker = connected(found.result(), 0, "here", label="the server", timeout_s=20.0)
            [(other, address)] = server.result()
    assert address == "here"
    yield worker, other
    for end in (worker, other):
        end.close()


def test_last_words_arrive_although_the_connection_has_ended(pair: tuple[Pair, Pair]) -> None:
    """A server that fails sends its last words and ends, perhaps while the worker sends it something else."""
    worker, server = pair
    server.send("an answer")
    server.send(LastWords("the disk is full"))
    server.close()
    for act in (lambda: worker.take(0), worker.receive):
        with pytest.raises(PairEndedError, match="the server has failed: the disk is full"):
            act()


@pytest.mark.parametrize("is_cut_here", [True, False], ids=["here", "there"])
@pytest.mark.parametrize("sends", [True, False], ids=["send", "take"])
def test_a_transfer_that_is_under_way_ends_with_its_connection(sends: bool, is_cut_here: bool) -> None:
    """Gloo told nobody: a rank waited for ever after another one had failed."""
    ends = zip(socket.socketpair(), socket.socketpair(), strict=True)
    worker, server = (Pair(*end, label="the server", reads_ahead=False) for end in ends)
    room = Room(worker, 0, large := torch.ones(10_000_000), large)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(room.send if sends else room.take)
        if not sends:  # the other end sends a header, and less than a tensor
            server.connections[1].sendall(_HEADER.pack(0, large.nbytes) + bytes(100_000))
        assert not wait([waiting], 0.3).done
        (worker if is_cut_here else server).cut()
        with pytest.raises(PairEndedError, match="the server has ended, or the connection to it"):
            waiting.result(20)
    for end in (worker, server):
        end.close()


@pytest.mark.parametrize("is_synchronous", [True, False], ids=["sync", "async"])
def test_no_socket_carries_gradients_and_weights(is_synchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    pack = pair_module._bytes_of
    monkeypatch.setattr(pair_module, "_bytes_of", lambda tensor: (sent.append(tensor.nbytes), pack(tensor))[1])
    before = num_mapped()
    with job(2, 1, is_synchronous=is_synchronous) as found, found.connections(0) as connections:
        parameters = [nn.Parameter(torch.ones(100, 100))]
        optimizer = optim.AdamW(parameters, lr=0.1)
        remote = server_step(optimizer, connections)
        remote.place_new()
        assert num_mapped() > before
        sent.clear()
        for _ in range(3):
            parameters[0].grad = torch.ones(100, 100)
            optimizer.step()
        remote.close()
        assert parameters[0].mean() < 0.8
    assert not sent
    del found, connections, remote
    assert eventually(lambda: num_mapped() == before)


def test_sockets_carry_all_where_memory_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_mapped()
    monkeypatch.setattr(servers_module, "mapped", mock.Mock(side_effect=PermissionError(13, "another user's")))
    expected, _ = on_one_device(lambda groups: optim.AdamW(groups, lr=0.1), [averaged(step) for step in range(3)])
    with job(2) as found:

        def work(worker: int) -> None:
            meter = Meter()
            with found.connections(worker, meter) as connections:
                parameters = weights()
                train(connections, parameters, optim.AdamW(groups_of(parameters), lr=0.1), range(3))
                assert_equal([p.detach() for p in parameters], expected)
                meter.end_step()
            meter.flush()
            assert meter.steps[0].memory_bytes == 0

        found.workers.run(work)
    assert num_mapped() == before


def test_what_a_lost_worker_shared_is_freed() -> None:
    with workers() as (first, second):
        before = num_mapped()
        vanish(second.connections)
        second.leave()
        assert eventually(lambda: bool(first.connections.staleness() is not None and first.connections.lost))
        del second.remote, second.connections
        # Gradients and weights, in the worker and in the server.
        assert eventually(lambda: num_mapped() == before - 4)
        first.step(gradients(0, 0))


def is_refused_to_others(segment: OfferedSegment) -> bool:
    """Whether a process of another user may not map the memory."""
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
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


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

    def test_only_what_was_offered_is_opened_and_by_the_same_user(self, tmp_path: Path) -> None:
        segment = OfferedSegment(100)
        pid, descriptor, token = segment.offer
        with (tmp_path / "other").open("w+b") as other, pytest.raises(OSError, match="different containers"):
            mapped((pid, other.fileno(), token))
        with pytest.raises(OSError, match="different containers"):
            mapped((pid, descriptor, bytes(16)))
        if os.geteuid() == 0:
            assert is_refused_to_others(segment)
