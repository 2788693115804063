"""Servers update as the optimizer itself would.

Workers are threads of the test here, and so are the servers: the same objects, over the same connections.
"""

import contextlib
import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.optim import Optimizer

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.data_parallel.averaging import average_gradients
from lightning_multigpu.engine.parameter_server import server as server_module
from lightning_multigpu.engine.parameter_server import servers as servers_module
from lightning_multigpu.engine.parameter_server.pair import PairEndedError, Room
from lightning_multigpu.engine.parameter_server.server import Job as ServedJob
from lightning_multigpu.engine.parameter_server.server import Server
from lightning_multigpu.engine.parameter_server.server_transport import ServerTransport
from lightning_multigpu.engine.parameter_server.servers import Servers
from lightning_multigpu.placement.owned_step import OwnedStep
from tests.engine.parameter_server.updates import (
    STEPS,
    DecayingSGD,
    assert_as_on_one_device,
    assert_equal,
    assert_unusual,
    every_optimizer,
    gradients,
    hooks_of_all_optimizers,
    unusual_steps,
    weights,
)
from tests.job.guardian.job import eventually
from tests.threads import Threads

SMALL = 100  # bytes of a bucket: each of the weights has one of its own
ALL = range(1_000_000)
T = TypeVar("T")


@dataclass
class Job:
    """A job whose servers are threads; workers that are not in ``in_memory`` count as those of another host."""

    job: ServedJob
    store: TCPStore
    workers: Threads
    problems: list[str]
    in_memory: Collection[int] = ALL
    servers: dict[int, Server] = field(default_factory=dict)

    def client(self) -> Store:
        return TCPStore("127.0.0.1", self.store.port, is_master=False)

    @contextlib.contextmanager
    def connections(self, worker: int, meter: Meter | None = None) -> Iterator[Servers]:
        job = self.job if worker in self.in_memory else dataclasses.replace(self.job, address="nowhere.invalid")
        found, store = Servers(job, worker=worker, meter=meter or Meter()), self.client()
        try:
            found.join(store, lambda number: store.wait([f"{job.name}/server {number}"], timedelta(seconds=20)))
            yield found
        except BaseException:
            vanish(found)
            raise
        finally:
            found.close()

    def run(self, work: Callable[[Servers], T]) -> list[T]:
        def with_connections(worker: int) -> T:
            with self.connections(worker) as connections:
                return work(connections)

        return self.workers.run(with_connections)


def vanish(servers: Servers) -> None:
    """Ends a worker's connections, as the kernel does when its process ends."""
    servers.cut()


@contextlib.contextmanager
def job(num_servers: int = 1, num_workers: int = 2, in_memory: Collection[int] = ALL, **rules: Any) -> Iterator[Job]:
    served = ServedJob("servers/1", "127.0.0.1", num_workers, num_servers, 20.0, 20.0, **rules)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = Job(served, store, Threads(num_workers), [""] * num_servers, in_memory)

    def serve(number: int) -> None:
        try:
            found.servers[number] = Server(found.client(), served, number)
            found.problems[number] = found.servers[number].serve()
        except Exception as error:
            found.problems[number] = str(error)

    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(num_servers)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        for number, thread in enumerate(threads):
            thread.join(5)
            if number in found.servers:
                found.servers[number].end("the test is over")
            thread.join(5)


ServerStep = OwnedStep[ServerTransport]


def server_step(optimizer: Optimizer, connections: Servers, **options: Any) -> ServerStep:
    return OwnedStep(optimizer, ServerTransport(optimizer, connections, **options))


class AverageOfThreads:
    """The part of a group of ranks that averaging takes, for workers that are threads."""

    def __init__(self, workers: Threads, worker: int) -> None:
        self._gather = partial(workers.gather, worker)

    def all_reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        told = torch.stack([each.to(torch.float64) for each in self._gather(tensor.clone())])
        return (told.mean(0) if reduction == "mean" else told.amax(0)).to(tensor.dtype)


def train(connections: Servers, parameters: list[nn.Parameter], optimizer: Optimizer, steps: range) -> ServerStep:
    remote = server_step(optimizer, connections, bucket_bytes=SMALL)
    for step in steps:
        for parameter, gradient in zip(parameters, gradients(step, connections.worker), strict=False):
            parameter.grad = gradient
        optimizer.step()
    return remote


@pytest.mark.parametrize(("num_servers", "in_memory"), [(1, ALL), (3, (0,))], ids=["1", "3"])
def test_every_optimizer_of_torch_updates_as_on_one_device(num_servers: int, in_memory: Collection[int]) -> None:
    with job(num_servers, in_memory=in_memory) as found:
        results = found.run(
            lambda connections: every_optimizer(
                lambda each: server_step(each, connections, bucket_bytes=SMALL), connections.worker
            )
        )
    assert found.problems == [""] * num_servers
    assert_as_on_one_device(*results)


def test_unusual_steps() -> None:
    with job(2, in_memory=(0,)) as found, hooks_of_all_optimizers() as calls:

        def work(connections: Servers) -> dict[str, Any]:
            def serve(optimizer: Optimizer) -> ServerStep:
                step = server_step(optimizer, connections, bucket_bytes=SMALL)
                group: Any = AverageOfThreads(found.workers, connections.worker)
                step.average = partial(average_gradients, group=group)
                return step

            return unusual_steps(serve, connections.worker, calls)

        results = found.run(work)
    first, second = (found.servers[number]._shards for number in range(2))
    assert 0 in first, "the first optimizer cannot be divided"
    assert 0 not in second, "a server without a part holds nobody back"
    for result in results:
        assert_unusual(result)


def test_buckets_are_pushed_while_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a worker that shares memory with the server, and by one that does not.

    Where hooks had averages, what worker 1 had pushed before stayed, and counted as its gradients of a later step.
    """
    send, in_memory = Room.send, (0,)
    monkeypatch.setattr(Room, "send", lambda room: (time.sleep(0.05), send(room))[1])
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))).double()
    x = torch.randn(5, 8, dtype=torch.float64)
    with job(in_memory=in_memory) as found:

        def work(worker: int) -> None:
            meter, model = Meter(), copy.deepcopy(whole)
            with found.connections(worker, meter) as connections:
                optimizer = optim.SGD(model.parameters(), lr=0.1)
                remote = server_step(optimizer, connections, bucket_bytes=1024)
                remote.transport.pushes_early = True
                remote.place_new()
                for scale, is_whole in ((1.0, True), (0.5, False), (1.0, False)):
                    before = [p.detach().clone() for p in model.parameters()]
                    optimizer.zero_grad()
                    model(x * (worker + 1)).square().sum().backward()
                    pushed = [part.pushed is not None for part in remote.transport._parts]
                    assert pushed == [True] * 2, "each part is two layers, and backward has all gradients"
                    own = [scale * p.grad for p in model.parameters() if p.grad is not None]
                    if scale != 1.0:  # changed after it was pushed: it has to be pushed again
                        for parameter, gradient in zip(model.parameters(), own, strict=True):
                            parameter.grad.copy_(gradient)  # type: ignore[union-attr]
                    remote.gradients_are_whole = is_whole
                    optimizer.step()
                    for now, was, a, b in zip(
                        model.parameters(), before, *found.workers.gather(worker, own), strict=True
                    ):
                        assert_equal(now.detach(), was - 0.1 * (a if is_whole else (a + b) / 2))
                meter.end_step()
            meter.flush()  # now that the threads have ended which send, and which tell the meter a moment later
            [step] = meter.steps
            sent = {t.operation: (t.count, t.size_bytes, t.sent_bytes) for t in step.operations}
            assert sent == {"push": (8, 8 * 1024, 8 * 1024), "pull": (3, 6 * 1024, 0)}
            assert step.memory_bytes == (8 * 1024 if worker in in_memory else 0)

        found.workers.run(work)


def test_options_of_any_kind_travel_and_what_no_server_can_make_is_refused() -> None:
    """Numbers and texts alone did, in JSON."""

    class Local(optim.SGD):
        pass

    with job(num_workers=1) as found, found.connections(0) as connections:
        with pytest.raises(ValueError, match=r"cannot import .*Local, which is defined in a function"):
            server_step(Local(weights(), lr=0.1), connections)
        with pytest.raises(ValueError, match="LBFGS evaluates the loss several times within a step"):
            server_step(optim.LBFGS(weights()), connections)
        optimizer = optim.SGD(parameters := weights(), lr=0.1)
        optimizer.param_groups[0]["rule"] = {"scale": torch.tensor(2.0), "function": torch.nn.functional.gelu}
        train(connections, parameters, optimizer, range(1)).close()
        optimizer.param_groups[0]["rule"] = lambda: None
        with pytest.raises(ValueError, match=r"a value for parameter server 0 of 1 .* cannot be pickled: .*no lambda"):
            server_step(optimizer, connections).place_new()


def test_an_optimizer_that_changes_values_of_its_groups_is_refused() -> None:
    """Each step began with the values of worker 0, and went another way than on one device."""
    words = "DecayingSGD changes 'momentum' of its groups in its step, .*: use strategy='cpu_ps'"
    parameters = weights()
    optimizer = DecayingSGD(parameters, lr=0.1, momentum=0.9)
    with job(num_workers=1) as found, found.connections(0) as connections, pytest.raises(PairEndedError, match=words):
        train(connections, parameters, optimizer, range(STEPS))


def test_frozen_parameters_do_not_travel() -> None:
    meter = Meter()
    with job(num_workers=1) as found, found.connections(0, meter) as connections:
        frozen, trained = nn.Parameter(torch.ones(50), requires_grad=False), nn.Parameter(torch.ones(3))
        optimizer = optim.SGD([frozen, trained], lr=1.0)
        server_step(optimizer, connections, bucket_bytes=12)
        for _ in range(2):
            trained.grad = torch.ones(3)
            optimizer.step()
        meter.end_step()
        assert trained.tolist() == [-1.0] * 3
    meter.flush()
    [step] = meter.steps
    assert [totals.size_bytes for totals in step.operations] == [2 * trained.nbytes] * 2


class Fails(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("it cannot")


@pytest.mark.parametrize("kind", [optim.SGD, Fails], ids=["before a step", "in a step"])
def test_a_server_that_has_failed_says_why(kind: type[optim.SGD]) -> None:
    words = "parameter server 0 of 1 .127.0.0.1. has (failed: (the step of Fails .*it cannot|it was told to)|ended)"
    optimizer = kind(parameters := weights(), lr=0.1)
    with job(num_workers=1) as found:
        optimizer.register_step_post_hook(lambda *_: found.servers[0].end("it was told to"))
        with pytest.raises(PairEndedError, match=f"(?s){words}"), found.connections(0) as connections:
            train(connections, parameters, optimizer, range(100))


@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_is_gone_ends_the_job(worker: int) -> None:
    with job(2) as found:

        def work(connections: Servers) -> None:
            parameters = weights()
            train(connections, parameters, optim.SGD(parameters, lr=0.1), range(1))
            found.workers.gather(connections.worker, None)
            if connections.worker == worker:
                vanish(connections)
            else:
                train(connections, parameters, optim.SGD(parameters, lr=0.1), range(1))

        with pytest.raises(PairEndedError, match=f"worker {worker} has ended, or the connection to it|has ended"):
            found.run(work)
    assert all(problem.startswith(f"worker {worker} has ended") for problem in found.problems)


@pytest.mark.parametrize("looking", [servers_module, server_module], ids=["a worker", "a server"])
def test_who_waits_looks_for_machines_that_are_gone(looking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/communication/test_connections.py has machines that are gone."""
    monkeypatch.setattr(looking, "_LOOK_S", 0.05)
    limits: dict[Any, tuple[float, int]] = {}
    monkeypatch.setattr(
        looking.Connections, "cut_silent", lambda own, limit_s: limits.update({own: (limit_s, len(own._names))})
    )
    with job(num_workers=1) as found, found.connections(0) as connections:
        connections.staleness()  # the server is there
        owner = connections if looking is servers_module else found.servers[0]
        assert eventually(lambda: owner._connections in limits)
        assert limits[owner._connections] == (20.0, 2), "both connections"
