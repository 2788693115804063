"""Workers and servers of one host share memory, all others do not, and nothing is left of it."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_multigpu.communication.channel import Channel
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.shared_memory.segment import OfferedSegment, mapped
from lightning_multigpu.engine.parameter_server import bucket_memory, server_connections
from lightning_multigpu.engine.parameter_server.bucket_memory import BucketMemory
from lightning_multigpu.engine.parameter_server.consistency import Consistency
from lightning_multigpu.engine.parameter_server.remote_optimizer import RemoteOptimizer
from lightning_multigpu.engine.parameter_server.served_optimizer import Job as ServedJob
from lightning_multigpu.engine.parameter_server.served_optimizer import ServedOptimizer
from lightning_multigpu.engine.parameter_server.server import Server
from lightning_multigpu.engine.parameter_server.server_connections import ServerConnections
from lightning_multigpu.engine.parameter_server.wire import WireError, elementwise
from tests.engine.parameter_server.test_asynchronous_updates import workers
from tests.engine.parameter_server.test_host_optimizer import assert_equal, gradients, groups_of, on_one_device, weights
from tests.engine.parameter_server.test_servers import SECRET, Job, job, train

ASYNCHRONOUS = Consistency(is_synchronous=False)
NOBODY = 65534


def num_mapped() -> int:
    """Segments in this process's memory."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:lightning_multigpu")


def trained(found: Job) -> list[tuple[ServerConnections, int]]:
    """Two workers train as one device does; returns the connections of each, and the bytes that it pushed in memory."""
    expected, _ = on_one_device(lambda groups: optim.AdamW(groups, lr=0.1), steps=3)

    def work(worker: int) -> tuple[ServerConnections, int]:
        meter = Meter()
        with found.connections(worker, meter) as connections:
            parameters = weights()
            train(connections, parameters, optim.AdamW(groups_of(parameters), lr=0.1), range(3))
            assert_equal([p.detach() for p in parameters], [p.detach() for p in expected])
            meter.end_step()
        meter.flush()
        return connections, meter.steps[0].memory_bytes

    return found.workers.run(work)


@pytest.mark.parametrize("consistency", [Consistency(), ASYNCHRONOUS], ids=["sync", "async"])
def test_no_socket_carries_gradients_and_weights(consistency: Consistency, monkeypatch: pytest.MonkeyPatch) -> None:
    carried: list[tuple[str, int]] = []
    plainly = Channel.send

    def send(channel: Channel, fields: Any, payload: Any = ()) -> None:
        carried.append((fields["kind"], sum(part.nbytes for part in payload)))
        plainly(channel, fields, payload)

    monkeypatch.setattr(Channel, "send", send)
    with job(2, 1) as found, found.connections(0, consistency=consistency) as connections:
        parameters = weights()
        train(connections, parameters, optim.AdamW(parameters, lr=0.1), range(3))
        counted = connections.statistics()
        assert all(connection.memory for connection in connections._connections)
    size_bytes = 3 * sum(parameter.nbytes for parameter in parameters)
    assert sum(counted.bytes_in) > size_bytes < sum(counted.bytes_out), "they count all the same"
    assert {"push", "part"} < {kind for kind, _ in carried}
    assert {kind for kind, size_bytes in carried if size_bytes} == {"configure"}
    assert not any(connection.memory for connection in connections._connections), "it is given back at the end"


def test_ends_of_different_addresses_are_on_different_hosts() -> None:
    """As on emulated hosts, which share all else."""
    server = Server("127.0.0.2", 0, SECRET)  # the worker's address is 127.0.0.1
    threading.Thread(target=server.serve, daemon=True).start()
    address = [("127.0.0.2", server.port)]
    connections = ServerConnections(
        address, SECRET, worker=0, num_workers=1, meter=Meter(), gather=lambda value: [value]
    )
    connections.open(timeout_s=5.0)
    try:
        parameters = weights()
        train(connections, parameters, optim.SGD(parameters, lr=0.1), range(1)).close()
        assert not connections._connections[0].memory
        assert not connections.unshared
    finally:
        connections.close()
        server.end("")


def cannot(*_: Any) -> Any:
    raise PermissionError(errno.EACCES, "another user's")


@pytest.mark.parametrize("module", [server_connections, bucket_memory], ids=["no right", "no room"])
def test_memory_that_cannot_be_shared_is_told_of_and_sockets_carry_all(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = num_mapped()
    monkeypatch.setattr(module, "mapped" if module is server_connections else "OfferedSegment", cannot)
    with job(2) as found:
        for connections, memory_bytes in trained(found):
            assert memory_bytes == 0
            assert [*connections.unshared.values()] == ["[Errno 13] another user's"] * 2
            assert all(name.startswith("parameter server ") for name in connections.unshared)
        assert not any(served._offered for server in found.servers for served in server._optimizers.values())
    assert num_mapped() <= before + (2 if module is server_connections else 0), "the weights of two servers at most"


def test_what_a_lost_worker_shared_is_freed() -> None:
    with workers(number=2) as (first, second):
        before = num_mapped()
        second.vanish()
        first.connections.wait_until(lambda: bool(first.connections.lost))
        second.leave()
        deadline_s = time.monotonic() + 10
        while num_mapped() > before - 4 and time.monotonic() < deadline_s:  # its threads are about to end
            time.sleep(0.01)
        assert num_mapped() == before - 4, "gradients and weights, in the worker and in the server"
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
    def test_another_process_sees_what_is_written(self) -> None:
        segment = OfferedSegment(100)
        assert segment.memory.tolist() == [0] * 100
        pid = os.fork()
        if pid == 0:
            mapped(segment.offer)[1:3] = 7
            os._exit(0)
        os.waitpid(pid, 0)
        assert segment.memory.tolist() == [0, 7, 7] + [0] * 97

    def test_it_has_no_name_and_keeps_its_length(self) -> None:
        files, maps = len(os.listdir("/proc/self/fd")), num_mapped()
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
            mapped([pid, other.fileno(), token])
        with pytest.raises(OSError, match="different containers"):
            mapped([pid, descriptor, bytes(16).hex()])


def test_what_is_longer_than_the_memory_travels() -> None:
    """A single element, and the scale of its chunk, take more than its own bytes."""
    int8 = elementwise("int8")
    assert int8 is not None
    assert int8.encoded_bytes(1) > 4
    with job(num_workers=1) as found, found.connections(0) as connections:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = optim.SGD([weight], lr=1.0)
        RemoteOptimizer(optimizer, connections, compressor=int8)
        for _ in range(2):
            weight.grad = torch.ones(1)
            optimizer.step()
        assert weight.item() == pytest.approx(-2.0)


def served_alone(numel: int, compression: Any) -> ServedOptimizer:
    """A server's side without connections; its weights are zeros."""
    served = ServedOptimizer(ServedJob(1, 1, ASYNCHRONOUS), {}, 0)
    buckets = [{"dtype": "float32", "pieces": [[numel]]}]
    groups = [[[0, 0]]]
    plan = {
        "class": "torch.optim.sgd:SGD",
        "split": "elements",
        "buckets": buckets,
        "groups": groups,
        "compression": compression,
    }
    values = [dict(optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0).defaults)]
    served.configure(0, 0, plan, {"defaults": {}, "values": values, "weights": [torch.zeros(numel)], "state": []})
    return served


def test_a_push_that_cannot_be_in_the_memory_is_refused() -> None:
    served = served_alone(1, {"name": "int8"})
    memory = BucketMemory(*torch.zeros(2, 4, dtype=torch.uint8))
    with pytest.raises(WireError, match="a push of 5 bytes in memory of 4"):
        served.room_for_push(0, [1], 0, is_compressed=True, memory=memory)
    with pytest.raises(WireError, match="a push of 4 bytes for a bucket of 4"):
        served.room_for_push(0, [1], 4, memory=memory)


def test_rooms_of_the_server_are_its_own() -> None:
    """Memory of a worker is never lent to another one."""
    with job(in_memory=(0,)) as found:
        trained(found)
        [served] = found.servers[0]._optimizers.values()
        places = {memory.pushed.data_ptr() for memory in found.servers[0]._members[0].memory.values()}
        spare = [room.data_ptr() for rooms in served._spare.values() for room in rooms]
    assert places
    assert spare
    assert places.isdisjoint(spare)


def test_synchronous_workers_read_the_weights_of_the_server() -> None:
    """The server makes no copy for each of them."""
    with job() as found:
        trained(found)
        [served] = found.servers[0]._optimizers.values()
        members = found.servers[0]._members.values()
        for bucket in served._filled:
            places = {member.memory[0, bucket.number].weights.data_ptr() for member in members}
            assert places == {bucket.weights.data_ptr()}
            assert all(torch.equal(bucket.part(bucket.weights, i), p) for i, p in enumerate(bucket.pieces))
