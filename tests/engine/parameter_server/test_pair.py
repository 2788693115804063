"""Workers and servers of one host share memory, all others do not, and nothing is left of it."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.shared_memory.segment import OfferedSegment, mapped
from lightning_multigpu.engine.parameter_server import servers as servers_module
from lightning_multigpu.engine.parameter_server.pair import LastWords, Pair, PairEndedError
from tests.engine.parameter_server.test_asynchronous_updates import workers
from tests.engine.parameter_server.test_servers import job, server_step, train, vanish, wait_until
from tests.engine.parameter_server.updates import assert_equal, averaged, gradients, groups_of, on_one_device, weights

NOBODY = 65534


def num_mapped() -> int:
    """Segments in this process's memory."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:lightning_multigpu")


def test_last_words_arrive_although_no_further_message_can_be_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that fails sends its last words and closes the connection, perhaps before the worker expects more."""
    store, connections = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), Connections()

    def end(is_server: bool) -> Pair:
        own, label = TCPStore("127.0.0.1", store.port, is_master=False), "the worker" if is_server else "the server"
        return Pair(own, "pair", label=label, is_server=is_server, connections=connections, timeout_s=20.0)

    with ThreadPoolExecutor(2) as threads:
        worker, server = threads.map(end, (False, True))
    expected = worker.expect()  # which also expects the last words
    server.send("an answer")
    server.send(LastWords("the disk is full"))
    assert expected.get() == "an answer"
    closed = mock.Mock(side_effect=RuntimeError("Connection closed by peer"))
    monkeypatch.setattr(worker, "requests", SimpleNamespace(recv=closed))
    for words in ("the server has failed: the disk is full", "the server has ended, or the connection to it"):
        with pytest.raises(PairEndedError, match=words):
            worker.receive()


@pytest.mark.parametrize("is_synchronous", [True, False], ids=["sync", "async"])
def test_no_socket_carries_gradients_and_weights(is_synchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = ProcessGroupGloo.send
    monkeypatch.setattr(ProcessGroupGloo, "send", lambda g, t, *to: (sent.append(t[0].nbytes), send(g, t, *to))[1])
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
    assert max(sent) < parameters[0].nbytes / 2
    del found, connections, remote
    wait_until(lambda: num_mapped() == before)


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
        wait_until(lambda: bool(first.connections.staleness() is not None and first.connections.lost))
        del second.remote, second.connections
        wait_until(lambda: num_mapped() == before - 4)  # gradients and weights, in the worker and in the server
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
