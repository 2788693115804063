"""A replica takes over when its server ends, at whatever moment, and training goes on as if nothing had happened.

Servers are threads of the test. One that is killed loses all of its connections at once, some of them in the middle of
a frame.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_multigpu.communication.channel import Channel, ChannelError, connect
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.parameter_server import server_connections
from lightning_multigpu.engine.parameter_server.batch_queue import BatchQueue
from lightning_multigpu.engine.parameter_server.consistency import Consistency
from lightning_multigpu.engine.parameter_server.coordination import Coordination
from lightning_multigpu.engine.parameter_server.member import Member
from lightning_multigpu.engine.parameter_server.remote_optimizer import RemoteOptimizer
from lightning_multigpu.engine.parameter_server.server import Server
from lightning_multigpu.engine.parameter_server.server_connections import ServerConnections, ServerError
from lightning_multigpu.engine.parameter_server.wire import elementwise
from tests.engine.parameter_server.test_host_optimizer import assert_equal, gradients, weights
from tests.engine.parameter_server.test_servers import ALL, SECRET, SMALL, Job, job, train

ASYNCHRONOUS = Consistency(is_synchronous=False)
RULES = pytest.mark.parametrize("rules", [Consistency(), ASYNCHRONOUS], ids=["sync", "async"])


class Killed:
    """Kills a server as it gets its frame number ``gets``, or sends its part number ``sends``, of which half arrives.

    Frames are counted from 1; 0 for never.
    """

    def __init__(self, server: Server, *, gets: int = 0, sends: int = 0) -> None:
        self.got = self.sent = 0
        self.is_dead = False
        self._server, self._gets, self._sends = server, gets, sends
        self._counting = threading.Lock()
        self._handle, self._let_in = server._handle, server._let_in
        server._handle, server._let_in = self.handle, self.let_in  # type: ignore[method-assign]

    def handle(self, *arguments: Any) -> bool:
        with self._counting:
            self.got += 1
            if self.got == self._gets:
                self.kill()
        self._check()
        return self._handle(*arguments)

    def let_in(self, *arguments: Any, **options: Any) -> Member:
        member = self._let_in(*arguments, **options)
        send, channel = member.channel.send, member.channel

        def sending(fields: Any, payload: Any = ()) -> None:
            if fields["kind"] == "part":
                with self._counting:
                    self.sent += 1
                    if self.sent == self._sends:
                        channel._socket.sendall(b"\0\0")
                        self.kill()
            self._check()
            send(fields, payload)

        channel.send = sending  # type: ignore[method-assign]
        return member

    def kill(self) -> None:
        self.is_dead = True
        members = list(self._server._members.values())
        for member in members:
            member.channel.send = self._check  # type: ignore[method-assign]  # a dead process says nothing of its end
        for member in members:
            member.channel.shut_down()

    def _check(self, *_: Any) -> None:
        if self.is_dead:
            raise ChannelError("the server is dead")


@contextlib.contextmanager
def replicated(
    num_servers: int = 1, *, in_memory: Collection[int] = ALL, **killed: int
) -> Iterator[tuple[Job, Killed]]:
    """A job of two workers with replicas; its last server is the one that is killed."""
    with job(num_servers, 2, num_replicas=1, in_memory=in_memory) as found:
        yield found, Killed(found.servers[num_servers - 1], **killed)


Result = tuple[list[Tensor], list[dict[str, Any]]]


def synchronous_training(connections: ServerConnections) -> Result:
    """All that synchronous workers ask of servers: two optimizers, clipping, averages, parameters that come later."""
    parameters = weights()
    first, second = optim.AdamW(parameters[:1], lr=0.1), optim.SGD(parameters[2:], lr=0.1, momentum=0.9)
    remotes = [RemoteOptimizer(optimizer, connections, bucket_bytes=int(SMALL)) for optimizer in (first, second)]
    for step in range(5):
        for parameter, gradient in zip(parameters, gradients(step, connections.worker), strict=True):
            parameter.grad = gradient
        if step == 1:
            for remote in remotes:
                remote.average_gradients()
            for parameter in (parameters[0], parameters[2]):
                assert parameter.grad is not None
                parameter.grad *= 0.5
        if step == 2:
            first.add_param_group({"params": parameters[1:2], "lr": 0.05})
            parameters[0].detach().mul_(0.9)
        if step == 3:
            remotes[0].load_state_dict(remotes[0].state_dict())
        for optimizer, remote in zip((first, second), remotes, strict=True):
            remote.clip_norm = 0.5
            optimizer.step()
    states = [remote.state_dict() for remote in remotes]
    connections.statistics()
    return [parameter.detach() for parameter in parameters], states


def results_of(found: Job) -> list[Result]:
    def work(worker: int) -> Result:
        with found.connections(worker) as connections:
            return synchronous_training(connections)

    return found.workers.run(work)


def test_training_goes_on_bit_for_bit_whenever_a_server_is_killed() -> None:
    with job(2) as found:
        expected = results_of(found)
    numbers = []  # of frames that the server gets and sends
    for in_memory in ((), (0,), ALL):
        with replicated(2, in_memory=in_memory) as (found, counted):
            assert_same(results_of(found), expected)
        numbers.append({"gets": counted.got, "sends": counted.sent})
    for where in ("gets", "sends"):
        fewest = min(number[where] for number in numbers)
        for at in [*range(1, 9), *range(9, fewest - 3, 17)]:
            with replicated(2, in_memory=((), (0,), ALL)[at % 3], **{where: at}) as (found, killed):
                assert_same(results_of(found), expected)
                assert killed.is_dead
            assert found.problems[::2] == ["", ""], "the first server and its replica end in order"
            assert found.problems[3] == "", f"the replica of the second one ends in order ({where} {at})"


def assert_same(found: list[Result], expected: list[Result]) -> None:
    for (tensors, states), (wanted, wanted_states) in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))
        for state, wanted_state in zip(states, wanted_states, strict=True):
            assert state["param_groups"] == wanted_state["param_groups"]
            assert state["state"].keys() == wanted_state["state"].keys()
            for number, values in wanted_state["state"].items():
                assert all(torch.equal(state["state"][number][name], value) for name, value in values.items())


EPOCHS, BATCHES = 2, 12


def asynchronous_training(connections: ServerConnections) -> tuple[list[tuple[int, int]], list[Tensor]]:
    """All that asynchronous workers ask of servers; returns the batches that this one has trained on, and weights."""
    worker = connections.worker
    parameters = weights()
    optimizer = optim.SGD(parameters, lr=0.1)
    remote = RemoteOptimizer(optimizer, connections, bucket_bytes=int(SMALL))
    remote.load_state_dict(optimizer.state_dict())
    coordination = Coordination(connections)
    if worker == 0:
        parameters[0].detach().mul_(0.5)
        remote.send_changed_weights()
        remote.pull()
    coordination.start()
    remote.pull()
    trained = []
    for epoch in range(EPOCHS):
        options: dict[str, Any] = {"first": 1, "num_batches": BATCHES, "limit": EPOCHS * BATCHES}
        while (number := coordination.next_batch(epoch, **options)) is not None:
            for parameter, gradient in zip(parameters, gradients(epoch, number), strict=True):
                parameter.grad = gradient
            optimizer.step()
            trained.append((epoch, number))
            coordination.trained(epoch, number)
        if worker == 0:
            coordination.pause()
            remote.pull()
            assert remote.version >= (epoch + 1) * (BATCHES - 1), "the weights have all updates of the epoch"
    if worker == 0:
        coordination.stop(epoch=EPOCHS, at_once=False)
        remote.state_dict()
        counted = connections.statistics().staleness
        assert sum(of_worker.total() for of_worker in counted.values()) == EPOCHS * (BATCHES - 1)
    coordination.pause()
    assert coordination.end({"metric": 3} if worker == 0 else None) == {"metric": 3}
    remote.pull()
    told = coordination.newest("at the end", worker, of_all=True)
    assert told == ([0, 1] if worker == 0 else [1])
    return trained, [parameter.detach() for parameter in parameters]


def asynchronous_results(found: Job, max_staleness: int | None) -> None:
    """Trains, and checks that each batch was trained on once, and that each update is in the weights."""

    def work(worker: int) -> tuple[list[tuple[int, int]], list[Tensor]]:
        rules = Consistency(is_synchronous=False, max_staleness=max_staleness)
        with found.connections(worker, consistency=rules) as connections:
            return asynchronous_training(connections)

    (by_first, ends), (by_second, others) = found.workers.run(work)
    every = [(epoch, number) for epoch in range(EPOCHS) for number in range(1, BATCHES)]
    assert sorted(by_first + by_second) == every
    wanted = [p.detach() * (0.5 if i == 0 else 1.0) for i, p in enumerate(weights())]
    for epoch, number in every:
        for tensor, gradient in zip(wanted, gradients(epoch, number), strict=True):
            tensor -= 0.1 * gradient
    assert_equal(ends, wanted)
    assert_equal(others, wanted)


@pytest.mark.parametrize(("num_servers", "max_staleness"), [(1, None), (2, 1)], ids=["the queue of batches", "another"])
def test_asynchronous_workers_train_on_each_batch_once_whenever_a_server_is_killed(
    num_servers: int, max_staleness: int | None
) -> None:
    with replicated(num_servers) as (found, counted):
        asynchronous_results(found, max_staleness)
    for where, number in [("gets", counted.got), ("sends", counted.sent)]:
        for at in [*range(1, 5), *range(5, number * 3 // 4, 31)]:
            with replicated(num_servers, **{where: at}) as (found, killed):
                asynchronous_results(found, max_staleness)
                assert killed.is_dead, f"{where} {at} of {number}"
            assert found.problems[-1] == ""


def test_a_worker_and_the_queue_of_batches_may_end_together() -> None:
    """The replica hands out the worker's batches again, and maybe a batch that the worker had trained on."""

    def work(worker: int) -> list[int]:
        trained: list[int] = []
        with contextlib.suppress(ServerError), found.connections(worker, consistency=ASYNCHRONOUS) as connections:
            parameters = weights()
            optimizer = optim.SGD(parameters, lr=0.1)
            assert RemoteOptimizer(optimizer, connections, bucket_bytes=int(SMALL)).imbalance >= 1.0
            coordination = Coordination(connections)
            coordination.start()
            while (number := coordination.next_batch(0, first=0, num_batches=20, limit=None)) is not None:
                if worker == 1 and len(trained) == 2:
                    killed.kill()
                    connections.cut()
                optimizer.step()
                trained.append(number)
                coordination.trained(0, number)
                while worker == 0 and len(trained) == 2 and not connections.ended:
                    time.sleep(0.01)
            assert worker == 0
        return trained

    with replicated() as (found, killed):
        first, second = found.workers.run(work)
    assert {*first, *second} == {*range(20)}
    assert len(first) + len(second) <= 21


def test_each_worker_pushes_to_both_and_pulls_from_one() -> None:
    """2 x S out and S in a step; what the statistics count is the server's, and not the replica's."""
    elements = sum(parameter.numel() for parameter in weights())

    def work(worker: int) -> None:
        meter = Meter()
        train_and_ask(worker, meter)
        meter.flush()  # now that the threads have ended which send, and which tell the meter a moment later
        sent = {t.operation: t.size_bytes for step in meter.steps for t in step.operations}
        assert sent == {"push": 2 * 3 * 8 * elements, "pull": 3 * 8 * elements}

    def train_and_ask(worker: int, meter: Meter) -> None:
        with found.connections(worker, meter) as connections:
            parameters = weights()
            optimizer = train(connections, parameters, optim.SGD(parameters, lr=0.1), range(3)).optimizer
            meter.end_step()
            if worker == 1:
                found.workers.gather(worker, None)
                found.workers.gather(worker, None)
                optimizer.step()
                return
            before = connections.statistics()
            assert before.bytes_out[0] > 2 * 3 * 8 * elements
            found.workers.gather(worker, None)
            killed.kill()
            connections.wait_until(lambda: bool(connections.ended))
            connections.statistics()  # the replica has taken over: it counts steps from now on
            found.workers.gather(worker, None)
            optimizer.step()
            now = connections.statistics().since(before)
            assert now.num_steps == [2]
            assert 2 * 8 * elements <= now.bytes_in[0] < 3 * 8 * elements + 5000
            assert 2 * 8 * elements <= now.bytes_out[0] < 3 * 8 * elements + 5000

    with replicated() as (found, killed):
        found.workers.run(work)


@RULES
def test_compressed_gradients(rules: Consistency, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is compressed once for the server and its replica: the errors of a push are those of one."""
    results, encoded = [], []
    topk = elementwise("topk")
    encode = type(topk).encode
    monkeypatch.setattr(type(topk), "encode", lambda *arguments: (encoded.append(1), encode(*arguments)))
    for replicas in (0, 1):
        with job(1, 2, num_replicas=replicas) as found:

            def work(worker: int) -> Tensor:
                with found.connections(worker, consistency=rules) as connections:
                    weight = nn.Parameter(torch.zeros(40, 3))
                    optimizer = optim.SGD([weight], lr=1.0)
                    remote = RemoteOptimizer(optimizer, connections, compressor=topk)
                    assert remote.imbalance == 1.0
                    for step in range(6):
                        generator = torch.Generator().manual_seed(2 * step + worker)
                        weight.grad = torch.randn(40, 3, generator=generator)
                        if step == 3 and worker == 0 and found.num_replicas:
                            Killed(found.servers[0]).kill()
                        optimizer.step()
                    found.workers.gather(worker, None)
                    if not rules.is_synchronous:
                        remote.pull()
                    return weight.detach()

            results.append(found.workers.run(work))
    assert len(encoded) == 2 * 2 * 6
    for replicated_weights, expected in zip(*results, strict=True):
        torch.testing.assert_close(replicated_weights, expected, rtol=0, atol=0 if rules.is_synchronous else 1e-5)


@pytest.mark.parametrize("ends", [False, True], ids=["the server lives", "the server has ended"])
def test_a_step_ends_when_the_replica_has_made_it_too(ends: bool) -> None:
    """The next step's gradients came into the memory of pushes that the replica had yet to get."""
    may_go_on = threading.Event()
    with job(1, 1, num_replicas=1) as found:
        killed, replica = Killed(found.servers[0]), found.servers[1]
        handle = replica._handle

        def slow(member: Member, channel: Channel, fields: dict[str, Any], payload_bytes: int) -> bool:
            assert fields.get("kind") != "push" or may_go_on.wait(20)
            return handle(member, channel, fields, payload_bytes)

        replica._handle = slow  # type: ignore[method-assign]
        with found.connections(0) as connections:
            parameters = weights()
            remote = train(connections, parameters, optim.SGD(parameters, lr=0.1), range(0))
            assert remote.imbalance >= 1.0

            def step() -> None:
                for parameter, gradient in zip(parameters, gradients(0, 0), strict=True):
                    parameter.grad = gradient
                remote.optimizer.step()

            first = threading.Thread(target=step, daemon=True)
            first.start()
            expected = [p.detach() - 0.1 * g for p, g in zip(weights(), gradients(0, 0), strict=True)]
            deadline_s = time.monotonic() + 20
            while not all(torch.allclose(p.detach(), e) for p, e in zip(parameters, expected, strict=True)):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            if ends:
                killed.kill()
                connections.wait_until(lambda: bool(connections.ended))
            first.join(0.3)
            assert first.is_alive(), "the weights are there, and the replica has not got the pushes"
            may_go_on.set()
            first.join(20)
            step()
            assert_equal([p.detach() for p in parameters],
                         [e - 0.1 * g for e, g in zip(expected, gradients(0, 0), strict=True)])  # fmt: skip


def stepping(found: Job, worker: int, kill: Callable[[int], None], *, ends_at: int | None = None) -> list[str]:
    """Trains for six steps, before each of which ``kill`` may act; returns what was said of servers that ended."""
    with found.connections(worker) as connections:
        parameters = weights()
        optimizer = optim.SGD(parameters, lr=0.1)
        RemoteOptimizer(optimizer, connections, bucket_bytes=int(SMALL))
        for step in range(6):
            if worker == 0:
                kill(step)
            if step == ends_at:
                connections.cut()
            for parameter, gradient in zip(parameters, gradients(step, worker), strict=True):
                parameter.grad = gradient
            optimizer.step()
        return [text for _, text in connections.ended]


SERVER, REPLICA = (rf"{what}parameter server 0 of 1 \(127.0.0.1 port \d+\)" for what in ("", "the replica of "))


def test_the_end_of_both_ends_the_job_and_names_them() -> None:
    with replicated() as (found, first):
        second = Killed(found.servers[1])
        kills = {2: first.kill, 4: second.kill}
        with pytest.raises(ServerError, match=rf"^{REPLICA} has ended: .*; {SERVER} had ended before$"):
            found.workers.run(lambda worker: stepping(found, worker, lambda step: kills.get(step, lambda: None)()))


def test_the_end_of_a_replica_or_of_its_server_is_told_and_training_goes_on() -> None:
    for dies, lives, what in [(0, 1, "has taken over"), (1, 0, "goes on")]:
        with replicated() as (found, _):
            killed = Killed(found.servers[dies])
            told = found.workers.run(lambda worker: stepping(found, worker, lambda step: killed.kill()))  # noqa: B023
        first, second = (REPLICA, SERVER) if dies else (SERVER, REPLICA)
        for (text,) in told:
            assert re.fullmatch(rf"{first} has ended: .*; {second} {what}, and the job ends if that ends too", text)
        assert found.problems[lives] == ""


@RULES
def test_one_worker_that_loses_its_server_has_the_others_leave_it(rules: Consistency) -> None:
    """The server lives and one connection to it breaks: the others must not go on with another copy of the weights."""
    updates = [gradients(0, worker) for worker in range(3)]

    def work(worker: int) -> list[Tensor]:
        with found.connections(worker, consistency=rules) as connections:
            parameters = weights()
            optimizer = optim.SGD(parameters, lr=0.1 if rules.is_synchronous else 0.1 / 3)
            remote = RemoteOptimizer(optimizer, connections, bucket_bytes=int(SMALL))
            assert remote.imbalance >= 1.0
            if worker == 1:
                connections._copies[0][0].channel.shut_down()
            connections.wait_until(lambda: bool(connections.ended))
            for parameter, gradient in zip(parameters, updates[worker], strict=True):
                parameter.grad = gradient
            optimizer.step()
            found.workers.gather(worker, None)
            remote.pull()
            return [parameter.detach() for parameter in parameters]

    with job(1, 3, num_replicas=1) as found:
        results = found.workers.run(work)
    assert re.fullmatch(r"worker [01] is gone: the other end has closed the connection", found.problems[0])
    assert found.problems[1] == ""
    expected = [p.detach() - 0.1 / 3 * sum(of_all) for p, *of_all in zip(weights(), *updates, strict=True)]
    for result in results:
        assert_equal(result, expected)


def test_the_end_of_a_worker_ends_synchronous_training_also_with_replicas() -> None:
    def work(worker: int) -> None:
        if worker == 1:
            with contextlib.suppress(ServerError):
                stepping(found, 1, lambda step: None, ends_at=3)
        else:
            stepping(found, 0, lambda step: None)

    words = r"parameter server 0 of 1 \(127.0.0.1 port \d+\): worker 1 is gone: the other end has closed the connection"
    with job(1, 2, num_replicas=1) as found, pytest.raises(ServerError, match=words):
        found.workers.run(work)


def test_a_replica_hands_out_batches_once_all_workers_have_come_to_it() -> None:
    """Worker 1 has a batch, and has yet to say so; worker 0 asks for another one."""
    with job(1, 2, num_replicas=1) as found:
        replica = found.servers[1]
        of_epoch = {"run": 1, "epoch": 0, "first": 0, "num_batches": 4, "limit": None}
        channels = []
        for worker in range(2):
            channels.append(connect("127.0.0.1", replica.port, SECRET, timeout_s=5.0))
            job_of_two = {"num_workers": 2, "num_servers": 1, "num_replicas": 1, "consistency": asdict(ASYNCHRONOUS)}
            channels[-1].send({"kind": "hello", "worker": worker, "is_replica": True, **job_of_two})
            assert channels[-1].receive()[0]["kind"] == "welcome"
        first, second = channels
        first.send({"kind": "take over", "rounds": []})
        assert second.receive()[0] == {"kind": "take over"}
        first.send({"kind": "next", **of_epoch})
        answers: list[dict[str, Any]] = []
        waiting = threading.Thread(target=lambda: answers.append(first.receive()[0]))
        waiting.start()
        waiting.join(0.2)
        assert answers == []
        second.send({"kind": "answered", "question": {"kind": "next", **of_epoch}, "number": 0})
        second.send({"kind": "take over", "rounds": []})
        waiting.join(20)
        assert answers == [{"kind": "batch", "number": 1, "is_over": False, "may_return": False}]
        for channel in (second, first):
            channel.send({"kind": "goodbye"})
            channel.close()
        found.servers[0].end("")


def test_a_worker_joins_after_a_replica_has_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connections, "_LATE_S", 0.5)
    with job(1, 1, num_replicas=1) as found, found.connections(0, consistency=ASYNCHRONOUS) as first:
        parameters = weights()
        optimizer = optim.SGD(parameters, lr=0.1)
        RemoteOptimizer(optimizer, first, bucket_bytes=int(SMALL))
        optimizer.step()
        addresses = [("127.0.0.1", server.port) for server in found.servers]
        with pytest.raises(ServerError, match="this job has replicas=1"):
            joined(addresses[1:], 0).open(timeout_s=10.0)
        before = joined(addresses, 1)
        before.open(timeout_s=10.0)
        Killed(found.servers[0]).kill()
        found.servers[0].end("")
        found.threads[0].join(20)  # a machine that has failed refuses connections
        first.wait_until(lambda: bool(first.ended))
        after = joined(addresses, 1)
        after.open(timeout_s=10.0)
        assert (before.worker, after.worker) == (1, 2)
        for connections in (before, after):
            connections.close()


def joined(addresses: list[tuple[str, int]], num_replicas: int) -> ServerConnections:
    return ServerConnections(
        addresses, SECRET, worker=None, num_workers=1, meter=Meter(), gather=list, num_replicas=num_replicas
    )


def test_a_server_and_its_replica_go_on_from_one_snapshot() -> None:
    snapshots = []
    with job(1, 1) as found, found.connections(0) as connections:
        parameters = weights()
        for steps in (1, 2):
            train(connections, parameters, optim.SGD(parameters, lr=0.1), range(steps)).close()
        snapshots = [{0: snapshot} for snapshot in found.servers[0].snapshot().values()]
    for saved, fits in [((0, 0), True), ((0, 1), False), ((0, None), False)]:
        with job(1, 1, num_replicas=1) as found:
            for server, number in zip(found.servers, saved, strict=True):
                server._saved = {} if number is None else snapshots[number]
            with found.connections(0) as connections:
                parameters = weights()
                remote = RemoteOptimizer(optim.SGD(parameters, lr=0.1), connections, bucket_bytes=int(SMALL))
                if fits:
                    assert remote.imbalance == 1.0
                    assert not torch.equal(parameters[0], weights()[0])
                    continue
                with pytest.raises(ServerError, match="do not go on from the same snapshot"):
                    _ = remote.imbalance


class TestTheQueueOfAReplica:
    def took(self, queue: BatchQueue, worker: int, number: int, epoch: int = 0) -> None:
        queue.took(worker, epoch, number, first=1, num_batches=9)

    def left(self, queue: BatchQueue) -> list[int]:
        found = []
        while (number := queue.next(0, 0, first=1, num_batches=9)) is not None:
            found.append(number)
        return found

    def test_batches_that_nobody_took_are_left(self) -> None:
        queue = BatchQueue()
        self.took(queue, 1, 4)
        self.took(queue, 0, 2)
        assert self.left(queue) == [1, 3, 5, 6, 7, 8]
        queue.trained(0, 0, 2)
        assert queue.may_return(0, 0), "as worker 1 has one"

    def test_the_batches_of_a_lost_worker_are_taken_once(self) -> None:
        for is_known in (False, True):
            queue = BatchQueue()
            self.took(queue, 1, 1)
            self.took(queue, 1, 2)
            if is_known:
                queue.lose(1)
            self.took(queue, 0, 1)
            queue.lose(1)
            assert self.left(queue) == [2, 3, 4, 5, 6, 7, 8]

    def test_batches_of_a_run_are_counted(self) -> None:
        queue = BatchQueue()
        queue.limit_to(5)
        self.took(queue, 1, 3)
        assert self.left(queue) == [1, 2, 4, 5]
        assert queue.is_over(0, 0)

    @pytest.mark.parametrize("number", [0, 9, 2**30])
    def test_numbers_out_of_range(self, number: int) -> None:
        with pytest.raises(ValueError, match=f"batch {number} of "):
            BatchQueue().took(0, 0, number, first=1, num_batches=9 if number < 10 else 2**39)
