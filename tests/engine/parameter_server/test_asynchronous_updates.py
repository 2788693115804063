"""Servers that update with each worker's gradients as they come: against the same updates, made one after the other."""

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from lightning_multigpu.engine.parameter_server.batch_queue import BatchQueue
from lightning_multigpu.engine.parameter_server.pair import PairEndedError
from lightning_multigpu.engine.parameter_server.served_shard import Clocks
from lightning_multigpu.engine.parameter_server.server_statistics import summary
from tests.engine.parameter_server.test_servers import ALL, SMALL, Job, job, server_step, vanish
from tests.engine.parameter_server.updates import (
    OPTIMIZERS,
    Make,
    NormedSGD,
    assert_equal,
    gradients,
    groups_of,
    on_one_device,
    weights,
)
from tests.job.guardian.job import eventually


def sgd(groups: Any) -> optim.Optimizer:
    return optim.SGD(groups, lr=0.1)


class Worker:
    """One asynchronous worker of a job, driven step by step by the test; ``aside`` runs a call that may wait."""

    def __init__(self, found: Job, number: int, make: Make) -> None:
        self._stack = contextlib.ExitStack()
        self.aside = self._stack.enter_context(ThreadPoolExecutor(1)).submit
        self.connections = self._stack.enter_context(found.connections(number))
        self.parameters = weights()
        self.optimizer = make(groups_of(self.parameters))

    def begin(self) -> None:
        self.remote = server_step(self.optimizer, self.connections, bucket_bytes=SMALL)
        self._stack.callback(self.remote.close)
        self.remote.place_new()  # the servers know its parameters from now on

    def step(self, of_step: list[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()

    def next_batch(self, num_batches: int, epoch: int = 0) -> int | None:
        return self.connections.next_batch(epoch, first=0, num_batches=num_batches)

    @property
    def now(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def leave(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def workers(make: Make = sgd, num_workers: int = 2, *, begin: bool = True, **options: Any) -> Iterator[list[Worker]]:
    with job(num_workers=num_workers, is_synchronous=False, **options) as found:
        made = found.workers.run(lambda worker: Worker(found, worker, make))  # they join together
        try:
            for worker in made if begin else ():
                worker.begin()
            yield made
        finally:
            for worker in made:
                worker.leave()


def are_waiting(*calls: Future[Any]) -> bool:
    return len(wait(calls, 0.1).not_done) == len(calls)


@pytest.mark.parametrize(("num_servers", "in_memory"), [(1, ALL), (3, (0,))], ids=["1", "3"])
@pytest.mark.parametrize("name", ["AdamW", "Muon", "NormedSGD"])
def test_updates_follow_each_other_in_the_order_in_which_they_come(
    name: str, num_servers: int, in_memory: Collection[int]
) -> None:
    """Staleness is the number of updates by others since the weights came."""
    make = OPTIMIZERS.get(name, lambda groups: NormedSGD(groups, lr=0.1))
    order = [0, 0, 1, 0, 1, 0]
    updates = [gradients(step, worker) for step, worker in enumerate(order)]
    with workers(make, num_servers=num_servers, in_memory=in_memory) as both:
        for worker, update in zip(order, updates, strict=True):
            both[worker].step(update)
        expected, _ = on_one_device(make, updates)
        assert_equal(both[0].now, expected)
        both[1].remote.transport.pull()
        assert_equal(both[1].now, expected)
        assert both[0].remote.transport.version == both[1].remote.transport.version == len(order)
        staleness = both[0].connections.staleness()
    assert staleness == {0: Counter({0: 2, 1: 2}), 1: Counter({2: 1, 1: 1})}


def test_each_worker_clips_by_the_norm_over_all_servers() -> None:
    """Worker 0 alone asked the servers for the norm, and the others waited for ever."""
    updates = [[100 * g for g in gradients(step, 0)] for step in range(2)]
    with workers(num_servers=3) as both:
        for worker, update in zip(both, updates, strict=True):
            worker.remote.clip_norm = 0.5
            worker.aside(worker.step, update).result(20)
            total = torch.linalg.vector_norm(torch.cat([g.flatten() for g in update]))
            for g in update:
                g *= 0.5 / (total + 1e-6)
        assert_equal(both[1].now, on_one_device(sgd, updates)[0])


@pytest.mark.parametrize("way", ["it steps", "it is lost", "it leaves", "it pauses"])
def test_a_worker_waits_when_it_is_too_far_ahead(way: str) -> None:
    with workers(num_workers=3, max_staleness=2, num_servers=2) as (first, slow, third):
        for step in range(4):
            calls = [worker.aside(worker.step, gradients(step, 0)) for worker in (first, third)]
            if step == 2:
                assert are_waiting(*calls), "the third step would be one too many"
                {
                    "it steps": lambda: slow.step(gradients(50, 1)),
                    "it is lost": lambda: vanish(slow.connections),
                    "it leaves": slow.leave,
                    "it pauses": slow.connections.pause,
                }[way]()
            elif step == 3 and way == "it steps":
                assert are_waiting(*calls)
                slow.connections.pause()
            for call in calls:
                call.result(20)
        if way == "it pauses":
            slow.step(gradients(50, 1))  # it comes back beside the slowest


def test_clocks() -> None:
    clocks = Clocks(range(2), max_staleness=1)
    clocks.completes(0)
    assert not clocks.may_go_on(0)
    clocks.leaves(1)
    assert clocks.may_go_on(0)
    for _ in range(4):
        clocks.completes(0)
    clocks.completes(1)
    assert clocks.may_go_on(0), "who comes back begins beside the slowest"
    assert Clocks(range(2), None).may_go_on(0)


def test_a_summary_of_counts_is_that_of_the_numbers() -> None:
    assert summary(Counter({0: 1})) == {"median": 0, "p95": 0, "max": 0}
    assert summary(Counter({3: 10, 1: 9, 7: 0})) == {"median": 3, "p95": 3, "max": 3}
    assert summary(Counter({0: 94, 2: 1, 5: 5})) == {"median": 0, "p95": 2, "max": 5}


def test_an_unfinished_push_of_a_lost_worker_is_forgotten() -> None:
    with workers(num_servers=2) as (first, second):
        for parameter, gradient in zip(second.parameters, gradients(7, 1), strict=True):
            parameter.grad = gradient
        second.remote.transport._push(second.remote.transport._parts[0])
        vanish(second.connections)
        updates = [gradients(step, 0) for step in range(3)]
        for update in updates:
            first.step(update)
        assert_equal(first.now, on_one_device(sgd, updates)[0])
        assert eventually(lambda: bool(first.connections.staleness() is not None and first.connections.lost))
        assert [(lost["worker"], lost["left"]) for lost in first.connections.lost] == [(1, 1)]


def test_the_job_ends_with_worker_0() -> None:
    with workers() as (first, second):
        vanish(first.connections)
        with pytest.raises(PairEndedError, match="has ended"):
            second.connections.exchange("start", awaited="first")


def test_a_worker_with_another_model_is_sent_away_and_the_others_go_on() -> None:
    with workers(begin=False) as (first, other):
        first.begin()
        other.optimizer = optim.AdamW(other.parameters)
        with pytest.raises(PairEndedError, match="worker 1 has other parameters, or another optimizer"):
            other.begin()
        first.step(gradients(0, 0))
        assert_equal(first.now, on_one_device(sgd, [gradients(0, 0)])[0])


def test_parameters_that_come_later_are_refused() -> None:
    with workers(lambda groups: sgd(groups[:1])) as (first, _):
        first.optimizer.add_param_group({"params": first.parameters[1:]})
        with pytest.raises(ValueError, match=r"has got other parameters while training runs.*use strategy='sync_ps'"):
            first.step(gradients(0, 0))


def test_a_hook_that_changes_weights_is_refused_and_a_checkpoint_is_sent() -> None:
    with workers() as (first, second):
        with torch.no_grad():
            first.parameters[1].mul_(0.5)
        with pytest.raises(ValueError, match="a hook has changed weights"):
            first.step(gradients(0, 0))
        first.remote.transport.send_changed_weights()
        halved = [p.detach() * (0.5 if i == 1 else 1.0) for i, p in enumerate(weights())]
        for worker in (first, second):
            worker.remote.transport.pull()
            assert_equal(worker.now, halved)


def test_the_first_worker_clears_the_state() -> None:
    """Servers went on with the momentum that it had cleared."""
    updates = [gradients(step, 0) for step in range(3)]
    with workers(lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9)) as (first, second):
        first.remote.watch_state()
        first.step(updates[0])
        first.optimizer.state.clear()
        first.step(updates[1])
        second.step(updates[2])
        rows = zip(weights(), [0.1, 0.05, 0.05], *updates, strict=True)
        assert_equal(second.now, [p.detach() - rate * (a + b + 0.9 * b + c) for p, rate, a, b, c in rows])
        del first.optimizer.state[first.parameters[0]]
        with pytest.raises(ValueError, match=r"the states of 1 of .* use strategy='sync_ps'"):
            first.step(updates[0])


def taken(queue: BatchQueue, *by: int, epoch: int = 0) -> list[int | None]:
    return [queue.next(worker, epoch, 0, 4) for worker in by]


class TestBatchQueue:
    def test_each_batch_goes_to_one_worker_and_one_to_worker_0(self) -> None:
        queue = BatchQueue()
        assert taken(queue, 1, 0, 1, 0, 1, 0) == [0, 1, 2, 3, None, None]
        assert taken(queue, *[1] * 5, epoch=1) == [0, 1, 2, None, None], "a worker goes on with the next epoch"
        assert taken(queue, 0, epoch=1) == [3]
        assert queue.next(0, 2, 3, 4) == 3, "the epoch begins with the first batch that is left"

    def test_what_a_worker_gives_back_or_loses_goes_to_others(self) -> None:
        queue = BatchQueue()
        assert taken(queue, 1, 1, 0) == [0, 1, 2]
        queue.give_back(1, 0)
        assert taken(queue, 0, 1, 1) == [0, 1, 3]
        queue.trained(1, 0, 3)
        assert queue.others_have(0, 0)
        assert queue.lose(1) == 1
        assert not queue.others_have(0, 0)
        assert taken(queue, 0, 0) == [1, None]


def test_an_epoch_and_the_end_of_training() -> None:
    with workers() as (first, second):
        started = second.aside(second.connections.exchange, "start", None, "first")
        assert are_waiting(started)
        first.connections.exchange("start", awaited="first")
        started.result(20)
        assert (first.next_batch(2), second.next_batch(2)) == (0, 1)
        first.connections.trained(0, 0)
        last = first.aside(first.next_batch, 2)
        assert are_waiting(last)
        second.connections.trained(0, 1)
        assert last.result(20) is None
        first.connections.exchange("stop")
        ended = first.aside(first.connections.exchange, "end", None, "all")
        assert second.next_batch(2) is None
        assert second.connections.is_stopped
        assert are_waiting(ended), "the other has not come to the end"
        second.connections.exchange("end")
        told = second.aside(second.connections.exchange, "last word", None, "first")
        ended.result(20)
        assert not told.done()
        end = {"metrics": {"loss": torch.tensor(2.0)}, "best": "a.ckpt"}
        first.connections.exchange("last word", end)
        assert told.result(20) == [end]


def test_worker_0_trains_on_what_a_worker_loses_late() -> None:
    """Worker 0 was told that there were no more batches while the other had some, and these were then nobody's."""
    with workers(max_staleness=1, num_servers=2) as (first, second):
        assert [worker.next_batch(3) for worker in (first, second, second)] == [0, 1, 2]
        waiting = first.aside(first.next_batch, 3)
        for step in range(3):  # a worker that waits holds nobody back
            second.aside(second.step, gradients(step, 0)).result(20)
        second.connections.trained(0, 1)
        assert second.next_batch(3) is None, "all but worker 0 go on"
        assert not waiting.done()
        vanish(second.connections)
        assert waiting.result(20) == 2
        for number in (0, 2):
            first.connections.trained(0, number)
        assert first.next_batch(3) is None


def test_parameters_without_a_gradient_get_the_updates_of_others() -> None:
    with workers() as (first, second):
        first.step(gradients(0, 0))
        second.optimizer.step()
        assert_equal(second.now, first.now)
