"""Servers update as the optimizer itself would; what they are sent may be anything.

Workers are threads of the test here, and so are the servers: the same objects, over the same sockets.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_multigpu.communication.channel import Channel, ChannelError, connect
from lightning_multigpu.communication.checksums import checksums, device_checksum
from lightning_multigpu.communication.compression.compressors import ElementwiseCompressor
from lightning_multigpu.communication.compression.factory import make_compressor
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.optimizer_split import Split
from lightning_multigpu.engine.parameter_server import server as server_module
from lightning_multigpu.engine.parameter_server import server_connections
from lightning_multigpu.engine.parameter_server.bucket_memory import copy_in
from lightning_multigpu.engine.parameter_server.consistency import Consistency
from lightning_multigpu.engine.parameter_server.remote_optimizer import RemoteOptimizer
from lightning_multigpu.engine.parameter_server.served_optimizer import Job as ServedJob
from lightning_multigpu.engine.parameter_server.served_optimizer import ServedOptimizer, request_of
from lightning_multigpu.engine.parameter_server.server import Server
from lightning_multigpu.engine.parameter_server.server_connections import ServerConnections, ServerError
from lightning_multigpu.engine.parameter_server.server_statistics import ServerStatistics
from lightning_multigpu.engine.parameter_server.wire import WireError, packed
from tests.engine.parameter_server.test_host_optimizer import (
    OPTIMIZERS,
    STEPS,
    VALUES,
    DecayingSGD,
    NormedSGD,
    assert_equal,
    averaged,
    gradients,
    groups_of,
    hooked_steps,
    hooks_of_all_optimizers,
    on_one_device,
    scheduled_steps,
    sparse_on_one_device,
    sparse_steps_of,
    weights,
)
from tests.world import free_port

T = TypeVar("T")
SECRET = bytes(range(32))
SMALL = 100.0  # bytes of a bucket: each of the weights has one of its own
ALL = range(1_000_000)
WAYS = pytest.mark.parametrize("in_memory", [(), (0,), ALL], ids=["sockets", "mixed", "memory"])
"""Workers that share memory with servers."""


class Workers:
    """Two workers of one job, each on a thread."""

    def __init__(self, num: int = 2) -> None:
        self.num = num
        self._meeting = threading.Barrier(num, timeout=30)
        self._told: list[Any] = [None] * num

    def gather(self, worker: int, value: Any) -> list[Any]:
        self._told[worker] = value
        self._meeting.wait()
        told = list(self._told)
        self._meeting.wait()
        return told

    def run(self, work: Callable[[int], T]) -> list[T]:
        with ThreadPoolExecutor(self.num) as pool:
            running = [pool.submit(work, worker) for worker in range(self.num)]
            try:
                return [future.result(timeout=60) for future in running]
            except BaseException:
                self._meeting.abort()
                raise


@dataclass
class Job:
    servers: list[Server]
    workers: Workers
    problems: list[str]
    in_memory: Collection[int] = ALL
    silence_s: float | None = None
    threads: list[threading.Thread] = field(default_factory=list)

    @contextlib.contextmanager
    def connections(
        self, worker: int, meter: Meter | None = None, consistency: Consistency | None = None
    ) -> Iterator[ServerConnections]:
        found = ServerConnections(
            [("127.0.0.1", server.port) for server in self.servers],
            SECRET,
            worker=worker,
            num_workers=self.workers.num,
            consistency=consistency,
            meter=meter or Meter(),
            gather=lambda value: self.workers.gather(worker, value),
            shares_memory=worker in self.in_memory,
            silence_s=self.silence_s,
        )
        found.open(timeout_s=10.0)
        try:
            yield found
        except BaseException:
            found.cut()
            raise
        finally:
            found.close()


@contextlib.contextmanager
def job(
    num_servers: int = 1,
    num_workers: int = 2,
    in_memory: Collection[int] = ALL,
) -> Iterator[Job]:
    servers = [Server("127.0.0.1", 0, SECRET) for _ in range(num_servers)]
    found = Job(servers, Workers(num_workers), [""] * len(servers), in_memory)

    def serve(number: int) -> None:
        found.problems[number] = servers[number].serve()

    found.threads += [threading.Thread(target=serve, args=(number,)) for number in range(len(servers))]
    for thread in found.threads:
        thread.start()
    try:
        yield found
    finally:
        for server, thread in zip(servers, found.threads, strict=True):
            thread.join(5)
            server.end("the test is over")
            thread.join(5)


def train(
    connections: ServerConnections,
    parameters: list[nn.Parameter],
    optimizer: Optimizer,
    steps: range,
    *,
    split: Split | None = None,
) -> RemoteOptimizer:
    remote = RemoteOptimizer(optimizer, connections, bucket_bytes=int(SMALL), split=split)
    for step in steps:
        for parameter, gradient in zip(parameters, gradients(step, connections.worker), strict=False):
            parameter.grad = gradient
        optimizer.step()
    return remote


@pytest.mark.parametrize(("num_servers", "in_memory"), [(1, ALL), (3, (0,)), (3, ())], ids=["1", "3", "sockets"])
def test_every_optimizer_of_torch_updates_as_on_one_device(num_servers: int, in_memory: Collection[int]) -> None:
    with job(num_servers, in_memory=in_memory) as found:

        def work(worker: int) -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
            results = {}
            with found.connections(worker) as connections:
                for name, make in OPTIMIZERS.items():
                    parameters = weights()
                    optimizer = make(groups_of(parameters))
                    remote = train(connections, parameters, optimizer, range(STEPS))
                    assert not optimizer.state, "a worker holds no state"
                    results[name] = ([p.detach() for p in parameters], remote.state_dict())
                    remote.close()
                    assert "step" not in vars(optimizer), "the optimizer has its own step again"
            return results

        first, second = found.workers.run(work)
    assert found.problems == [""] * num_servers
    for name, make in OPTIMIZERS.items():
        parameters, state = on_one_device(make)
        for index, parameter in enumerate(parameters):
            assert_equal(first[name][0][index], parameter.detach())
            assert torch.equal(first[name][0][index], second[name][0][index]), f"{name}: workers differ"
        told = first[name][1]
        assert told["param_groups"] == state["param_groups"]
        assert told["state"].keys() == state["state"].keys(), name
        for number, values in state["state"].items():
            assert told["state"][number].keys() == values.keys(), name
            for key, value in values.items():
                assert_equal(told["state"][number][key], value)


def test_checksums_see_the_order_of_elements() -> None:
    """They were sums: weights that a hook on worker 0 had permuted were not sent, and the step took the old ones."""
    orders = ([1.0, -1.0, 2.0], [-1.0, 1.0, 2.0], [2.0, -1.0, 1.0]), ([1.0, 2, 2, 1], [2.0, 1, 1, 2])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8):
        whole = torch.zeros(2**21 + 3, dtype=dtype)
        whole[: 2**20] = 1
        for one, *others in (*[[torch.tensor(o, dtype=dtype) for o in alike] for alike in orders],
                             [whole, torch.cat([whole[2**20 : 2**21], whole[: 2**20], whole[2**21 :]])]):  # fmt: skip
            for sums in (checksums([one, *others]), [device_checksum(tensor).item() for tensor in (one, *others)]):
                assert len({*sums}) == 1 + len(others)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_checksums_see_signs_and_the_order_of_rows(dtype: torch.dtype) -> None:
    """Of an even number of highest bits that change, a sum of words does not tell."""
    weight = torch.randn(4 * 509, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    every_other = torch.tensor([1.0, -1.0], dtype=dtype).repeat(256)
    changed = [-weight, weight * every_other, -weight * every_other, weight.roll(1, 0), weight.flip(0)]
    assert len({*checksums([weight, *changed])}) == 1 + len(changed)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_a_loaded_state_goes_on(name: str) -> None:
    wanted, _ = on_one_device(OPTIMIZERS[name])
    halfway, state = on_one_device(OPTIMIZERS[name], steps=2)
    with job(2) as found:

        def work(worker: int) -> list[Tensor]:
            with found.connections(worker) as connections:
                parameters = [nn.Parameter(p.detach().clone()) for p in halfway]
                optimizer = OPTIMIZERS[name](groups_of(parameters))
                remote = RemoteOptimizer(optimizer, connections)
                remote.load_state_dict(state)
                remote.close()
                train(connections, parameters, optimizer, range(0)).load_state_dict(state)
                for step in range(2, STEPS):
                    for parameter, gradient in zip(parameters, gradients(step, worker), strict=True):
                        parameter.grad = gradient
                    optimizer.step()
            return [p.detach() for p in parameters]

        for result in found.workers.run(work):
            assert_equal(result, [p.detach() for p in wanted])


def test_tensors_of_several_dtypes_are_divided_evenly() -> None:
    with job(2) as found:

        def work(worker: int) -> list[list[int]]:
            with found.connections(worker) as connections:
                parameters = [nn.Parameter(torch.ones(size, dtype=dtype)) for size, dtype in
                              ((40, torch.float64), (80, torch.float32), (120, torch.bfloat16))]  # fmt: skip
                optimizer = optim.SGD(parameters, lr=1.0)
                remote = RemoteOptimizer(optimizer, connections, bucket_bytes=100_000)
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, 0.5 * worker)
                optimizer.step()
                assert all(torch.equal(p.detach(), torch.full_like(p, 0.75)) for p in parameters)
                assert remote.imbalance == 1.0
                return [[part.nbytes for part in bucket.parts] for bucket in remote._buckets]

        sizes = found.workers.run(work)[0]
    assert sizes == [[160, 160], [160, 160], [120, 120]]


@WAYS
def test_unusual_steps(in_memory: Collection[int]) -> None:
    """Gradients that one worker lacks, groups that come later, weights and rates that hooks change, and clipping."""
    normed, _ = on_one_device(lambda groups: NormedSGD(groups, lr=0.1))
    reference = weights()
    stepped = optim.SGD(groups_of(reference), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        reference[0].grad = averaged(step)[0]
        stepped.step()
    with job(2, in_memory=in_memory) as found:

        def work(worker: int) -> None:
            with found.connections(worker) as connections:
                parameters = weights()
                train(connections, parameters, NormedSGD(groups_of(parameters), lr=0.1), range(STEPS)).close()
                assert_equal([p.detach() for p in parameters], [p.detach() for p in normed])
                assert found.servers[1]._optimizers[0]._common.number == 0, "it has no part, and holds nobody back"

                parameters = weights()
                optimizer = optim.SGD(groups_of(parameters), lr=0.1, momentum=0.9)
                remote = train(connections, parameters[:1], optimizer, range(STEPS))
                assert parameters[1].grad is None
                assert_equal([p.detach() for p in parameters], [p.detach() for p in reference])

                late = nn.Parameter(torch.ones(3))
                optimizer.add_param_group({"params": [late], "lr": 1.0})
                for parameter in parameters:
                    parameter.grad = None
                late.grad = torch.ones(3) if worker == 0 else None
                optimizer.step()
                assert late.tolist() == [0.5] * 3, "the mean of 1 and of no gradient"
                late.data.zero_()  # as a hook may, on every worker
                late.grad = torch.ones(3)
                optimizer.param_groups[2]["lr"] = 2.0  # as a scheduler does
                optimizer.step()
                assert_equal(late.detach(), torch.full((3,), -2.0 * 1.45))
                optimizer.param_groups[2] |= {"lr": 1.0, "momentum": 0.0}
                late.data.zero_()
                for norm in (0.1, None, 0.2):
                    remote.clip_norm = None if norm is None else norm * 3**0.5
                    late.grad = torch.ones(3)
                    optimizer.step()
                torch.testing.assert_close(late.detach(), torch.full((3,), -0.1 - 1.0 - 0.2))
                remote.clip_value = 0.25
                late.grad = torch.full((3,), 2.0 * worker)
                optimizer.step()
                torch.testing.assert_close(late.detach(), torch.full((3,), -1.55))
                remote.close()
                served = sparse_steps_of(worker, lambda optimizer: RemoteOptimizer(optimizer, connections))
                assert_equal(served, sparse_on_one_device())
                steps = hooked_steps(
                    lambda step: gradients(step, worker),
                    calls,
                    lambda optimizer: RemoteOptimizer(optimizer, connections),
                )
                assert_equal(steps, hooked)
                for name in VALUES:
                    steps = scheduled_steps(
                        name,
                        lambda step: gradients(step, worker),
                        lambda optimizer: RemoteOptimizer(optimizer, connections),
                    )
                    assert_equal(steps, scheduled_steps(name, averaged))

        with hooks_of_all_optimizers() as calls:
            hooked = hooked_steps(averaged, calls)
            found.workers.run(work)


def sent_over(connections: ServerConnections) -> Counter[str]:
    """How many frames of each kind a worker sends from now on."""
    sent: Counter[str] = Counter()
    post = connections.post

    def counted(server: int, fields: Any, *of: Any, **more: Any) -> None:
        sent[fields["kind"]] += 1
        post(server, fields, *of, **more)

    connections.post = counted  # type: ignore[method-assign]
    return sent


@WAYS
def test_averages_come_back_and_the_step_takes_what_hooks_have_made_of_them(
    in_memory: Collection[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Channel.send

    def slow_to_worker_1(self: Channel, fields: Any, payload: Any = ()) -> None:
        """Worker 0 has gone on, and pushes what its hooks have made, before worker 1 gets the averages."""
        if threading.current_thread().name == "to worker 1" and fields["kind"] == "part":
            time.sleep(0.1)
        send(self, fields, payload)

    monkeypatch.setattr(Channel, "send", slow_to_worker_1)
    with job(2, in_memory=in_memory) as found:

        def work(worker: int) -> None:
            with found.connections(worker) as connections:
                parameters = weights()
                optimizer = optim.SGD(parameters, lr=1.0)
                remote = RemoteOptimizer(optimizer, connections, bucket_bytes=int(SMALL))
                sent = sent_over(connections)
                for parameter, gradient in zip(parameters, gradients(0, worker), strict=True):
                    parameter.grad = gradient
                if worker == 1:
                    parameters[2].grad = None
                remote.average_gradients()
                wanted = [*averaged(0)[:2], gradients(0, 0)[2] / 2]
                for parameter, gradient in zip(parameters, wanted, strict=True):
                    assert parameter.grad is not None
                    assert_equal(parameter.grad, gradient)
                    parameter.grad.mul_(0.5)
                optimizer.step()
                for parameter, before, gradient in zip(parameters, weights(), wanted, strict=True):
                    assert_equal(parameter.detach(), before.detach() - gradient / 2)
                parameters[2].data.zero_()  # as a hook may, on every worker
                optimizer.step()
                assert sent["replace"] == (len(remote._pieces[parameters[2]]) if worker == 0 else 0)

        found.workers.run(work)


def test_weights_and_gradients_of_other_layouts() -> None:
    """Convolutions in channels_last, whose elements do not lie in the order of their indices."""
    with job(2) as found:

        def work(worker: int) -> None:
            with found.connections(worker) as connections:
                generator = torch.Generator().manual_seed(0)
                start = torch.randn(4, 3, 2, 2, generator=generator, dtype=torch.float64)
                given = [torch.randn(4, 3, 2, 2, generator=generator, dtype=torch.float64) for _ in range(2)]
                mean = (given[0] + given[1]) / 2
                weight = nn.Parameter(start.to(memory_format=torch.channels_last))
                optimizer = optim.SGD([weight], lr=1.0)
                remote = RemoteOptimizer(optimizer, connections, bucket_bytes=int(SMALL))
                sent = sent_over(connections)
                for number in (1, 2):
                    weight.grad = given[worker].to(memory_format=torch.channels_last)
                    if number == 2:
                        remote.average_gradients()
                        assert_equal(weight.grad, mean)
                    optimizer.step()
                    assert_equal(weight.detach(), start - number * mean)
                assert weight.is_contiguous(memory_format=torch.channels_last)
                assert sent["replace"] == 0, "no hook has changed a weight"

        found.workers.run(work)


@WAYS
def test_buckets_are_pushed_while_backward_goes_on(in_memory: Collection[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(parts: Any, memory: Tensor) -> None:
        time.sleep(0.05)  # the server must not hear of it before
        copy_in(parts, memory)

    monkeypatch.setattr(server_connections, "copy_in", slowly)
    with job(in_memory=in_memory) as found:

        def work(worker: int) -> None:
            meter = Meter()
            with found.connections(worker, meter) as connections:
                generator = torch.Generator().manual_seed(0)
                model = nn.Sequential(*(nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(4)))
                for parameter in model.parameters():
                    parameter.data.copy_(torch.randn(8, 8, dtype=torch.float64, generator=generator))
                optimizer = optim.SGD(model.parameters(), lr=0.1)
                remote = RemoteOptimizer(optimizer, connections, bucket_bytes=1024)
                remote.pushes_early = True
                assert remote.imbalance == 1.0
                x = torch.randn(5, 8, dtype=torch.float64, generator=generator)
                for halved in (True, False):
                    before = [p.detach().clone() for p in model.parameters()]
                    for parameter in model.parameters():
                        parameter.grad = None
                    model(x * (worker + 1)).square().sum().backward()
                    pushed = [bucket.pushed is not None for bucket in remote._buckets]
                    assert pushed == [True] * 2, "each bucket is two layers, and backward has all gradients"
                    own = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                    if halved:  # after it was pushed: it has to be pushed again
                        for parameter in model.parameters():
                            assert parameter.grad is not None
                            parameter.grad.mul_(0.5)
                    optimizer.step()
                    both = found.workers.gather(worker, own)
                    for now, was, *of_both in zip(model.parameters(), before, *both, strict=True):
                        mean = (of_both[0] + of_both[1]) / (4 if halved else 2)
                        assert_equal(now.detach(), was - 0.1 * mean)
                meter.end_step()
            meter.flush()  # now that the threads have ended which send, and which tell the meter a moment later
            [step] = meter.steps
            sent = {t.operation: (t.count, t.size_bytes, t.sent_bytes) for t in step.operations}
            assert sent == {"push": (6, 6 * 1024, 6 * 1024), "pull": (2, 4 * 1024, 0)}
            assert step.memory_bytes == (6 * 1024 if worker in in_memory else 0)

        found.workers.run(work)


@pytest.mark.parametrize(
    ("name", "in_memory"), [("fp16", (0,)), ("bf16", ()), ("int8", ALL)], ids=["fp16", "bf16", "int8"]
)
def test_compressed_gradients(name: str, in_memory: Collection[int]) -> None:
    """What is pushed is what the compressor makes of each bucket, with the errors of the steps before."""
    compressor = make_compressor(name)
    assert isinstance(compressor, ElementwiseCompressor)
    pushed = 4 * 3  # elements, in one bucket
    given = [torch.randn(pushed, generator=torch.Generator().manual_seed(step)) for step in range(2 * STEPS)]

    def work(worker: int) -> Tensor:
        meter, weight = Meter(), nn.Parameter(torch.zeros(4, 3))
        with found.connections(worker, meter) as connections:
            optimizer = optim.SGD([weight], lr=1.0)
            remote = RemoteOptimizer(optimizer, connections, compressor=compressor)
            for step in range(STEPS):
                weight.grad = given[2 * step + worker].view(4, 3).clone()
                if step == 1:  # a push that a second one replaces
                    remote._place_new()
                    remote._push(remote._buckets[0])
                    weight.grad = weight.grad.clone()
                optimizer.step()
            meter.end_step()
            remote.close()
        meter.flush()  # now that the threads have ended which send, and which tell the meter a moment later
        sent = {t.operation: t.sent_bytes for step in meter.steps for t in step.operations}
        assert sent["push"] == (STEPS + 1) * compressor.encoded_bytes(pushed)
        return weight.detach().reshape(-1)

    with job(in_memory=in_memory) as found:
        results = found.workers.run(work)
    expected = torch.zeros(pushed)
    errors = torch.zeros(2, pushed)
    for step in range(STEPS):
        for worker in range(2):
            values = given[2 * step + worker] + (errors[worker] if compressor.has_error_feedback else 0)
            wire, decoded = torch.empty(compressor.encoded_bytes(pushed), dtype=torch.uint8), torch.empty(pushed)
            compressor.encode(values, wire)
            compressor.decode(wire, decoded)
            errors[worker] = values
            expected -= decoded / 2
    for weights_found in results:
        torch.testing.assert_close(weights_found, expected, rtol=1e-6, atol=1e-7)


def test_workers_with_other_models_are_refused() -> None:
    with job() as found:

        def work(worker: int) -> None:
            with found.connections(worker) as connections:
                parameters = weights()[: 3 - worker]
                train(connections, parameters, optim.SGD(parameters, lr=0.1), range(1))

        with pytest.raises(ServerError, match="worker 1 has other parameters, or another optimizer, than worker 0"):
            found.workers.run(work)


def test_an_optimizer_that_no_server_can_make_is_refused() -> None:
    class Local(optim.SGD):
        pass

    with job(num_workers=1) as found, found.connections(0) as connections:
        with pytest.raises(ValueError, match=r"cannot import .*Local, which is defined in a function"):
            RemoteOptimizer(Local(weights(), lr=0.1), connections)
        with pytest.raises(ValueError, match="LBFGS evaluates the loss several times within a step"):
            RemoteOptimizer(optim.LBFGS(weights()), connections)
        optimizer = optim.SGD(weights(), lr=0.1)
        optimizer.param_groups[0]["rule"] = print
        remote = RemoteOptimizer(optimizer, connections)
        with pytest.raises(ValueError, match="an option of SGD is of type builtin_function_or_method"):
            _ = remote.imbalance


def test_an_optimizer_that_changes_values_of_its_groups_is_refused() -> None:
    """Each step began with the values of worker 0, and went another way than on one device."""
    words = "DecayingSGD changes 'momentum' of its groups in its step, .*: use strategy='cpu_ps'"
    parameters = weights()
    optimizer = DecayingSGD(parameters, lr=0.1, momentum=0.9)
    with job(num_workers=1) as found, found.connections(0) as connections, pytest.raises(ServerError, match=words):
        train(connections, parameters, optimizer, range(STEPS))


def test_who_looks_for_servers_hears_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank looked for servers that were not there for the whole of its time, 600 s, and another had failed."""
    monkeypatch.setattr(server_connections, "_LATE_S", 0.0)
    told = []
    port = free_port()
    connections = ServerConnections([("127.0.0.1", port)], SECRET, worker=0, num_workers=1, meter=Meter(), gather=list)

    def on_late(server: str) -> None:
        told.append(server)
        connections.cut()

    with pytest.raises(ServerError, match="the connections to the parameter servers were cut"):
        connections.open(timeout_s=20.0, on_late=on_late)
    assert told == [f"parameter server 0 of 1 (127.0.0.1 port {port})"]


def test_a_worker_that_is_refused_leaves_no_thread_behind() -> None:
    with job(num_workers=1) as found, found.connections(0):
        before = set(threading.enumerate())
        with pytest.raises(ServerError, match="there is a worker 0 already"), found.connections(0):
            pass
        assert not [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("parameter")]


class Slow(optim.SGD):
    """Its step on a server takes until the other worker has pushed."""

    pushed = threading.Event()

    def step(self, closure: Any = None) -> Any:
        self.pushed.wait(10)
        return super().step(closure)


def test_the_time_that_workers_wait_for_a_busy_server_is_counted() -> None:
    """Worker 1 pushes while the server computes the update of worker 0."""
    asynchronous = Consistency(is_synchronous=False)

    def work(worker: int) -> ServerStatistics | None:
        with found.connections(worker, consistency=asynchronous) as connections:
            parameters = weights()
            Slow.pushed.set()
            train(connections, parameters, optimizer := Slow(parameters, lr=0.1), range(1))
            found.workers.gather(worker, None)
            Slow.pushed.clear()
            found.workers.gather(worker, None)
            if worker == 1:
                time.sleep(0.2)  # worker 0 is in its step
                threading.Timer(1.5, Slow.pushed.set).start()  # on a busy machine a push takes a while to come
            optimizer.step()
            found.workers.gather(worker, None)
            return connections.statistics() if worker == 0 else None

    with job() as found:
        counted, _ = found.workers.run(work)
    assert counted is not None
    assert counted.num_steps == [4]
    assert counted.queue_ms()[0] > 50  # about 1,500 ms of one of four steps
    assert sum(of_worker.total() for of_worker in counted.staleness.values()) == 4
    pushed = 4 * sum(parameter.nbytes for parameter in weights())
    assert counted.bytes_in[0] > pushed < counted.bytes_out[0]


def test_a_server_that_ends_is_named() -> None:
    def train_on(found: Job) -> None:
        with found.connections(0) as connections:
            parameters = weights()
            remote = train(connections, parameters, optim.SGD(parameters, lr=0.1), range(1))
            found.servers[0].end("it was told to")
            for _ in range(100):
                parameters[0].grad = torch.ones_like(parameters[0])
                remote.optimizer.step()

    words = r"parameter server 0 of 1 \(127.0.0.1 port \d+\): it was told to"
    with job(num_workers=1) as found, pytest.raises(ServerError, match=words):
        train_on(found)


@pytest.mark.parametrize("looking", [server_connections, server_module], ids=["a worker", "a server"])
def test_who_waits_looks_for_machines_that_are_gone(looking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/communication/test_channel.py has machines that are gone; here a channel says so that the test chooses."""
    watched: list[tuple[Channel, float]] = []
    monkeypatch.setattr(Channel, "watch", lambda channel, limit_s: watched.append((channel, limit_s)))
    monkeypatch.setattr(looking, "_LOOK_S", 0.05)
    is_gone = threading.Event()
    serving: list[threading.Thread] = []

    def end_if_silent(channel: Channel) -> None:
        is_member = threading.current_thread() in serving
        if is_gone.is_set() and is_member == (looking is server_module):
            channel.shut_down()

    monkeypatch.setattr(Channel, "end_if_silent", end_if_silent)
    with job(num_workers=1) as found, found.connections(0) as unwatched:
        assert not watched
        unwatched.cut()
    with job(num_workers=1) as found:
        found.silence_s = 7.5
        serving += [thread for thread in threading.enumerate() if getattr(thread, "_args", ()) == (0,)]
        assert len(serving) == 1
        with found.connections(0) as waiting:
            assert [limit_s for _, limit_s in watched] == [7.5, 7.5]
            is_gone.set()
            late = threading.Timer(20, found.servers[0].end, ("nobody has looked",))
            late.start()
            with pytest.raises(ServerError, match=r"parameter server 0 of 1 .* has ended"):
                waiting.wait_until(lambda: False)
            late.cancel()


def test_a_worker_that_comes_after_a_failure_hears_of_it() -> None:
    server = Server("127.0.0.1", 0, SECRET)
    server.end("the disk is full")
    with contextlib.closing(connect("127.0.0.1", server.port, SECRET, timeout_s=5.0)) as channel:
        channel.send({"kind": "hello", "worker": 1, "num_workers": 2, "num_servers": 1})
        assert channel.receive()[0] == {"kind": "error", "text": "the disk is full"}
    assert server.serve() == "the disk is full"


def test_a_worker_that_comes_while_a_server_ends_hears_why() -> None:
    """It came after the other had heard it, and found a connection that was closed without a word."""
    hello = {"kind": "hello", "num_workers": 2, "num_servers": 1}
    with job() as found:
        address = ("127.0.0.1", found.servers[0].port, SECRET)
        with contextlib.closing(connect(*address, timeout_s=5.0)) as first:
            first.send({**hello, "worker": 0})
            assert first.receive()[0]["kind"] == "welcome"
            found.servers[0].end("the disk is full")
            assert first.receive()[0]["text"] == "the disk is full"
            time.sleep(0.2)
        with contextlib.closing(connect(*address, timeout_s=5.0)) as late:
            late.send({**hello, "worker": 1})
            assert late.receive()[0] == {"kind": "error", "text": "the disk is full"}


def test_steps_overtake_gradients_on_a_connection_of_their_own_unless_the_order_counts() -> None:
    with job(in_memory=()) as found:
        handled: list[tuple[str, bool]] = []
        handle = found.servers[0]._handle

        def noted(member: Any, channel: Channel, fields: Any, payload_bytes: int) -> bool:
            if member.worker == 0 and fields["kind"] in ("push", "replace", "step"):
                handled.append((fields["kind"], channel is member.requests))
            return handle(member, channel, fields, payload_bytes)

        found.servers[0]._handle = noted  # type: ignore[method-assign]

        def work(worker: int) -> None:
            with found.connections(worker) as connections:
                weight = nn.Parameter(torch.ones(3))
                optimizer = optim.SGD([weight], lr=1.0)
                remote = RemoteOptimizer(optimizer, connections)
                weight.grad = torch.ones(3)
                optimizer.step()
                weight.data.fill_(5.0)  # as a hook may
                optimizer.step()
                assert weight.tolist() == [4.0] * 3
                optimizer.step()
                assert weight.tolist() == [3.0] * 3
                remote.pushes_early, weight.grad = True, None
                weight.sum().backward()
                assert weight.grad is not None
                weight.grad.mul_(2)  # after it was pushed
                optimizer.step()
                assert weight.tolist() == [1.0] * 3

        found.workers.run(work)
    assert {kind for kind, is_request in handled if is_request} == {"step"}
    assert [is_request for kind, is_request in handled if kind == "step"] == [True, False, True, False]
    assert found.problems == [""]


def test_a_worker_whose_connection_for_requests_ends_is_gone() -> None:
    with job(in_memory=()) as found:

        def work(worker: int) -> None:
            with found.connections(worker) as connections:
                weight = nn.Parameter(torch.ones(3))
                weight.grad = torch.ones(3)
                optimizer = optim.SGD([weight], lr=1.0)
                RemoteOptimizer(optimizer, connections)
                if worker == 1:
                    requests = connections._connections[0].requests
                    assert requests is not None
                    requests.shut_down()
                optimizer.step()

        with pytest.raises(ServerError, match="worker 1 is gone: the other end has closed the connection"):
            found.workers.run(work)


@pytest.mark.parametrize("breaks", [False, True], ids=["before", "within"])
def test_a_server_that_ends_before_a_worker_has_its_second_connection_says_why(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    open_requests = ServerConnections._open_requests
    with job(in_memory=()) as found:

        def later(self: ServerConnections, connection: Any, timeout_s: float) -> None:
            if self.worker == 0 and not breaks:
                found.threads[0].join()
            open_requests(self, connection, timeout_s)

        def refuse(server: Server, worker: int, channel: Channel) -> NoReturn:
            time.sleep(0.2)
            server.end("the disk is full")
            raise ChannelError("the other end has closed the connection")

        monkeypatch.setattr(ServerConnections, "_open_requests", later)
        if breaks:
            monkeypatch.setattr(Server, "_member_with_requests", refuse)

        def work(worker: int) -> None:
            with found.connections(worker):
                found.servers[0].end("the disk is full")

        with pytest.raises(ServerError, match="the disk is full"):
            found.workers.run(work)


def test_requests_of_a_worker_that_is_not_there_are_refused() -> None:
    with job(num_workers=1) as found:
        for worker in (1, "0", None):
            with contextlib.closing(connect("127.0.0.1", found.servers[0].port, SECRET, timeout_s=5.0)) as channel:
                channel.send({"requests_of": worker})
                assert channel.receive()[0]["text"] == f"there is no worker {worker}"
        found.servers[0].end("")


def test_a_worker_waits_until_the_server_knows_whose_its_requests_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that broke before that lost requests, and the worker waited for their answers."""
    with job(num_workers=1) as found:
        port = found.servers[0].port
        with (
            contextlib.closing(connect("127.0.0.1", port, SECRET, timeout_s=5.0)) as channel,
            contextlib.closing(connect("127.0.0.1", port, SECRET, timeout_s=5.0)) as requests,
        ):
            channel.send({"kind": "hello", "worker": 0, "num_workers": 1, "num_servers": 1})
            assert channel.receive()[0]["kind"] == "welcome"
            requests.send({"requests_of": 0})
            assert requests.receive()[0] == {"kind": "welcome"}
            channel.send({"kind": "goodbye"})

    def refuse(*_: object) -> NoReturn:
        raise WireError("there is no room")

    monkeypatch.setattr(Server, "_member_with_requests", refuse)
    with job(num_workers=1, in_memory=()) as found:
        with pytest.raises(ServerError, match="there is no room"), found.connections(0):
            pass
        found.servers[0].end("")


def test_a_worker_that_is_gone_ends_the_job() -> None:
    with job(num_workers=1) as found:
        channel = connect("127.0.0.1", found.servers[0].port, SECRET, timeout_s=5.0)
        channel.send({"kind": "hello", "worker": 0, "num_workers": 1, "num_servers": 1})
        assert channel.receive()[0]["kind"] == "welcome"
        channel.shut_down()
        channel.close()
    assert found.problems[0].startswith("worker 0 is gone")


def test_asynchronous_updates_copy_the_weights_into_the_same_memory() -> None:
    """Each copy was new memory, which the kernel cleared: a tenth of the server's processor time."""
    sent: list[tuple[int, float]] = []

    class Receiver:
        memory = ()

        def post(self, fields: dict[str, Any], payload: list[memoryview]) -> None:
            found = torch.frombuffer(payload[0], dtype=torch.float32)
            sent.append((found.data_ptr(), found[0].item()))

    members: Any = {worker: Receiver() for worker in range(2)}
    served = ServedOptimizer(ServedJob(2, 1, Consistency(is_synchronous=False)), members, 0)
    buckets = [{"dtype": "float32", "pieces": [[3]]}]
    plan = {"class": "torch.optim.sgd:SGD", "split": "elements", "buckets": buckets, "groups": [[[0, 0]]]}
    values = [{**optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0).defaults}]
    served.configure(0, 0, plan, {"defaults": {}, "values": values, "weights": [torch.zeros(3)], "state": []})
    served.configure(1, 0, plan, None)
    for worker in range(2):
        served.pull(worker)
    for step in range(2):
        for worker in range(2):
            served.push(worker, 0, step, [1], torch.ones(3))
            served.request(
                worker,
                step,
                request_of({"kind": "step", "values": packed(values, [], what="") if worker == 0 else []}, []),
            )
    memory, values_sent = zip(*sent, strict=True)
    assert values_sent == (0, 0, -1, -2, -3, -4)
    assert memory == 3 * memory[:2]
    assert memory[0] != memory[1]
