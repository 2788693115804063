"""Servers that update with each worker's gradients as they come: against the same updates, made one after the other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from lightning_multigpu.engine.parameter_server.batch_queue import BatchQueue
from lightning_multigpu.engine.parameter_server.pair import PairEndedError
from lightning_multigpu.engine.parameter_server.served_shard import Clocks
from tests.engine.parameter_server.test_servers import ALL, SMALL, Job, job, server_step, vanish
from tests.engine.parameter_server.updates import (
    OPTIMIZERS,
    OrderedSGD,
    assert_equal,
    gradients,
    groups_of,
    on_one_device,
    weights,
)


class Worker:
    """One asynchronous worker of a job, driven step by step by the test."""

    def __init__(self, found: Job, number: int, make: Callable[[Any], optim.Optimizer]) -> None:
        self._stack = contextlib.ExitStack()
        self.connections = self._stack.enter_context(found.connections(number))
        self.found, self.make = found, make

    def begin(self) -> None:
        make = self.make
        self.parameters = weights()
        self.optimizer = make(groups_of(self.parameters))
        self.remote = server_step(self.optimizer, self.connections, bucket_bytes=int(SMALL))
        self.remote.place_new()  # the servers know its parameters from now on

    def step(self, of_step: list[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()

    @property
    def now(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def leave(self) -> None:
        if hasattr(self, "remote"):
            self.remote.close()
        self._stack.close()

    def vanish(self) -> None:
        """Its process ends without a word."""
        vanish(self.connections)


@contextlib.contextmanager
def workers(
    make: Callable[[Any], optim.Optimizer] = lambda groups: optim.SGD(groups, lr=0.1),
    number: int = 2,
    *,
    num_servers: int = 1,
    in_memory: Collection[int] = ALL,
    **rules: Any,
) -> Iterator[list[Worker]]:
    with job(num_servers, number, in_memory=in_memory, is_synchronous=False, **rules) as found:
        made = found.workers.run(lambda worker: Worker(found, worker, make))  # they join together
        for worker in made:
            worker.begin()
        try:
            yield made
        finally:
            for worker in made:
                worker.leave()


@pytest.mark.parametrize(("num_servers", "in_memory"), [(1, ALL), (3, (0,))], ids=["1", "3"])
@pytest.mark.parametrize("name", ["AdamW", "Muon", "OrderedSGD"])
def test_updates_follow_each_other_in_the_order_in_which_they_come(
    name: str, num_servers: int, in_memory: Collection[int]
) -> None:
    make = OPTIMIZERS.get(name, lambda groups: OrderedSGD(groups, lr=0.1))
    order = [0, 1, 1, 0, 1, 0]
    updates = [gradients(step, worker) for step, worker in enumerate(order)]
    with workers(make, num_servers=num_servers, in_memory=in_memory) as both:
        for worker, update in zip(order, updates, strict=True):
            both[worker].step(update)
            assert both[worker].remote.transport.version == both[0].remote.transport.version or worker == 1
        expected, _ = on_one_device(make, updates)
        assert_equal(both[0].now, expected)
        both[1].remote.transport.pull()
        assert_equal(both[1].now, expected)
        assert both[0].remote.transport.version == both[1].remote.transport.version == len(order)


def test_staleness_is_the_number_of_updates_by_others_since_the_weights_came() -> None:
    with workers() as (first, second):
        for worker, step in ((first, 0), (first, 1), (second, 2), (first, 3), (second, 4)):
            worker.step(gradients(step, 0))
        found = first.connections.statistics().staleness
    assert found == {0: Counter({0: 2, 1: 1}), 1: Counter({2: 1, 1: 1})}


def test_each_worker_clips_by_the_norm_over_all_servers() -> None:
    """Worker 0 alone asked the servers for the norm, and the others waited for ever."""
    updates = [[100 * g for g in gradients(step, 0)] for step in range(2)]
    with workers(num_servers=3) as both:
        for worker, update in zip(both, updates, strict=True):
            worker.remote.clip_norm = 0.5
            stepping = threading.Thread(target=worker.step, args=(update,), daemon=True)
            stepping.start()
            stepping.join(20)
            assert not stepping.is_alive()
        for update in updates:
            total = torch.linalg.vector_norm(torch.cat([g.flatten() for g in update]))
            for g in update:
                g *= 0.5 / (total + 1e-6)
        assert_equal(both[1].now, on_one_device(lambda groups: optim.SGD(groups, lr=0.1), updates)[0])


class Ahead:
    """A worker that steps on a thread of its own until it is told to stop."""

    def __init__(self, worker: Worker, steps: int) -> None:
        self.done = 0
        self._worker, self._steps = worker, steps
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for step in range(self._steps):
            self._worker.step(gradients(step, 0))
            with self._changed:
                self.done += 1
                self._changed.notify_all()

    def has_done(self, steps: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.done >= steps, timeout=20)

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("way", ["it steps", "it is lost", "it leaves", "it pauses"])
def test_a_worker_waits_when_it_is_too_far_ahead(way: str) -> None:
    with workers(number=3, max_staleness=2, num_servers=2) as (first, slow, third):
        ahead, other = Ahead(first, 6), Ahead(third, 6)
        assert ahead.has_done(2)
        assert other.has_done(2)
        ahead._thread.join(0.1)
        assert (ahead.done, other.done) == (2, 2), "the third step would be one too many"
        if way == "it steps":
            slow.step(gradients(50, 1))
            assert ahead.has_done(3)
            ahead._thread.join(0.1)
            assert ahead.done == 3
            slow.connections.pause()
        elif way == "it is lost":
            slow.vanish()
        elif way == "it leaves":
            slow.leave()
        else:
            slow.connections.pause()
        other.join()
        ahead.join()
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


def test_an_unfinished_push_of_a_lost_worker_is_forgotten() -> None:
    with workers(num_servers=2) as (first, second):
        bucket = second.remote.transport._buckets[0]
        for parameter, gradient in zip(second.parameters, gradients(7, 1), strict=True):
            parameter.grad = gradient
        second.remote.transport._push(bucket)
        second.vanish()
        updates = [gradients(step, 0) for step in range(3)]
        for update in updates:
            first.step(update)
        assert_equal(first.now, on_one_device(lambda groups: optim.SGD(groups, lr=0.1), updates)[0])
        wait_until(lambda: bool(first.connections.statistics() and first.connections.lost))
        assert [(lost["worker"], lost["left"]) for lost in first.connections.lost] == [(1, 1)]


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_job_ends_with_worker_0() -> None:
    with workers() as (first, second):
        first.vanish()
        with pytest.raises(PairEndedError, match="has ended"):
            second.connections.begin_training()


def test_a_worker_with_another_model_is_sent_away_and_the_others_go_on() -> None:
    with job(1, 2, is_synchronous=False) as found:
        made = found.workers.run(lambda worker: Worker(found, worker, OPTIMIZERS[["SGD", "AdamW"][worker]]))
        first, other = made
        first.begin()
        with pytest.raises(PairEndedError, match="worker 1 has other parameters, or another optimizer"):
            other.begin()
        first.step(gradients(0, 0))
        assert_equal(first.now, on_one_device(OPTIMIZERS["SGD"], [gradients(0, 0)])[0])
        first.leave()
        other.leave()
    assert found.problems == [""]


def test_parameters_that_come_later_come_at_each_workers_own_time() -> None:
    """As when a backbone is unfrozen in the second epoch: one worker is there before worker 0, another long after."""
    with workers(lambda groups: optim.SGD(groups[:1], lr=0.1), number=3) as (first, early, late):

        def unfreeze(worker: Worker) -> None:
            worker.optimizer.add_param_group({"params": worker.parameters[1:], "lr": 0.05})
            worker.step(gradients(2, 0))

        waiting = threading.Thread(target=unfreeze, args=(early,))
        waiting.start()
        late.step(gradients(0, 0))
        first.step(gradients(1, 0))
        waiting.join(0.1)
        assert waiting.is_alive(), "it waits for worker 0's weights"
        unfreeze(first)
        waiting.join(20)
        late.step(gradients(3, 0))  # it knows the first group only
        unfreeze(late)
        updates = [(0, 1), (1, 1), (2, 3), (2, 3), (3, 1), (2, 3)]
        expected = [p.detach() for p in weights()]
        for step, known in updates:
            for p, rate, g in list(zip(expected, [0.1, 0.05, 0.05], gradients(step, 0), strict=True))[:known]:
                p -= rate * g
        assert_equal(late.now, expected)


def test_training_may_end_before_parameters_come() -> None:
    with workers(lambda groups: optim.SGD(groups[:1], lr=0.1)) as (first, early):
        early.optimizer.add_param_group({"params": early.parameters[1:], "lr": 0.05})
        found: list[str] = []

        def step() -> None:
            with pytest.raises(PairEndedError) as raised:
                early.step(gradients(0, 0))
            found.append(str(raised.value))

        waiting = threading.Thread(target=step)
        waiting.start()
        waiting.join(0.1)
        first.connections.stop_training(epoch=0, at_once=True)
        waiting.join(20)
        assert "worker 1 has other parameters" in found[0]


def test_a_hook_that_changes_weights_is_refused_and_a_checkpoint_is_sent() -> None:
    with workers() as (first, second):
        with torch.no_grad():
            first.parameters[1].mul_(0.5)
        with pytest.raises(ValueError, match="a hook has changed weights"):
            first.step(gradients(0, 0))
        first.remote.transport.send_changed_weights()
        first.remote.transport.pull()
        second.remote.transport.pull()
        halved = [p.detach() * (0.5 if i == 1 else 1.0) for i, p in enumerate(weights())]
        assert_equal(first.now, halved)
        assert_equal(second.now, halved)


def test_the_first_worker_clears_the_state() -> None:
    """Servers went on with the momentum that it had cleared."""
    updates = [gradients(step, 0) for step in range(3)]
    with workers(lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9)) as (first, second):
        first.remote.watch_state()
        first.step(updates[0])
        first.optimizer.state.clear()
        first.step(updates[1])
        second.step(updates[2])
        parameters = weights()
        alone = optim.SGD(groups_of(parameters), lr=0.1, momentum=0.9)
        for number, update in enumerate(updates):
            if number == 1:
                alone.state.clear()
            for parameter, gradient in zip(parameters, update, strict=True):
                parameter.grad = gradient.clone()
            alone.step()
        assert_equal(second.now, [parameter.detach() for parameter in parameters])
        del first.optimizer.state[first.parameters[0]]
        with pytest.raises(ValueError, match=r"the states of 1 of .* use strategy='sync_ps'"):
            first.step(updates[0])


class TestBatchQueue:
    def taken(self, queue: BatchQueue, worker: int, epoch: int = 0, **options: Any) -> int | None:
        return queue.next(worker, epoch, **{"first": 0, "num_batches": 4, **options})

    def test_each_batch_goes_to_one_worker(self) -> None:
        queue = BatchQueue()
        assert [self.taken(queue, worker) for worker in (1, 0, 1, 0, 1, 0)] == [0, 1, 2, 3, None, None]
        assert self.taken(queue, 1, epoch=1) == 0, "a worker goes on with the next epoch"

    def test_worker_0_gets_one(self) -> None:
        queue = BatchQueue()
        assert [self.taken(queue, 1) for _ in range(5)] == [0, 1, 2, None, None]
        assert self.taken(queue, 0) == 3

    def test_batches_of_a_lost_worker_go_to_others(self) -> None:
        queue = BatchQueue()
        assert [self.taken(queue, worker) for worker in (0, 1, 1)] == [0, 1, 2]
        queue.trained(1, 0, 1)
        assert queue.lose(1) == 1
        assert [self.taken(queue, 0) for _ in range(3)] == [2, 3, None]

    def test_what_a_worker_gives_back_goes_to_others(self) -> None:
        queue = BatchQueue()
        assert [self.taken(queue, worker) for worker in (1, 1, 0)] == [0, 1, 2]
        queue.give_back(1, 0)
        assert [self.taken(queue, 0) for _ in range(4)] == [0, 1, 3, None]

    def test_worker_0_gets_a_batch_of_each_epoch_of_a_run_that_is_limited(self) -> None:
        """Others took all batches of the run, and worker 0 never validated."""
        queue = BatchQueue()
        queue.left = 5
        assert [self.taken(queue, 1, epoch) for epoch in (0, 0, 0, 0, 1)] == [0, 1, 2, None, None]
        assert (queue.is_over(1, 1), queue.is_over(0, 0)) == (True, False)
        assert [self.taken(queue, 0, epoch) for epoch in (0, 0, 1)] == [3, None, 0]
        assert queue.is_over(0, 1)

    def test_a_run_takes_what_a_lost_worker_had_though_it_takes_no_more(self) -> None:
        queue = BatchQueue()
        queue.left = 4
        assert [self.taken(queue, *asked) for asked in ((0, 0), (1, 0), (1, 1), (0, 0))] == [0, 1, 0, 2]
        queue.trained(0, 0, 2)
        assert self.taken(queue, 0) is None
        assert queue.may_return(0, 0), "as worker 1 has one of this epoch, and one of the next"
        queue.trained(1, 0, 1)
        assert queue.may_return(0, 0)
        queue.lose(1)
        assert not queue.may_return(0, 0)
        assert not queue.is_over(0, 0)
        assert [self.taken(queue, 0, 1) for _ in range(2)] == [0, None]
        assert queue.is_over(0, 1)

    def test_a_run_ends_with_an_epoch(self) -> None:
        queue = BatchQueue()
        queue.end_with(0)
        assert self.taken(queue, 0) == 0
        assert self.taken(queue, 1, epoch=1) is None
        assert (queue.is_over(0, 0), queue.is_over(0, 1)) == (False, True)

    def test_an_epoch_may_have_begun_in_an_earlier_run(self) -> None:
        assert self.taken(BatchQueue(), 0, first=3) == 3

    def test_epochs_that_all_are_done_with_are_forgotten(self) -> None:
        queue = BatchQueue()
        for epoch in range(100):
            for worker in (1, 0):
                number = self.taken(queue, worker, epoch)
                assert number is not None
                queue.trained(worker, epoch, number)
        assert len(queue._epochs) == 1
        assert self.taken(queue, 2, 98) is None, "a worker that comes late goes on with the epoch of the others"
        queue.trained(1, 5, 0)
        queue.give_back(1, 5)
        assert len(queue._epochs) == 1


def test_an_epoch_and_the_end_of_training() -> None:
    """Worker 0 waits for the others' batches; the others wait for its last message, and get no batch after it."""
    with workers() as (first, second):
        started = threading.Thread(target=second.connections.begin_training)
        started.start()
        first.connections.begin_training()
        started.join(20)
        of_epoch: dict[str, Any] = {"epoch": 0, "first": 0, "num_batches": 2, "limit": None}
        assert (first.connections.next_batch(**of_epoch), second.connections.next_batch(**of_epoch)) == (0, 1)
        first.connections.trained(0, 0)
        last: list[int | None] = []
        waiting = threading.Thread(target=lambda: last.append(first.connections.next_batch(**of_epoch)))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        second.connections.trained(0, 1)
        waiting.join(20)
        assert last == [None]
        stopped = threading.Thread(target=first.connections.stop_training, kwargs={"epoch": 0, "at_once": True})
        stopped.start()
        wait_until(lambda: bool(second.connections.statistics()) and second.connections.is_stopped)
        assert second.connections.next_batch(**of_epoch) is None
        stopped.join(0.1)
        assert stopped.is_alive(), "the other has not come to the end"
        told: list[Any] = []
        waiting = threading.Thread(target=lambda: told.append(second.connections.end_training({})))
        waiting.start()
        stopped.join(20)
        assert told == []
        first.connections.end_training({"metrics": {"loss": torch.tensor(2.0)}, "best": "a.ckpt"})
        waiting.join(20)
        assert told == [{"metrics": {"loss": torch.tensor(2.0)}, "best": "a.ckpt"}]


def test_a_batch_is_asked_for_ahead() -> None:
    """Its answer waits until it is wanted, beside other answers; one of an epoch that was given back is dropped."""
    with workers() as (first, second):
        first.connections.begin_training()
        of_epoch: dict[str, Any] = {"epoch": 0, "first": 0, "num_batches": 4, "limit": None}
        first.connections.ask_ahead(**of_epoch)
        first.connections.statistics()
        assert (second.connections.next_batch(**of_epoch), first.connections.next_batch(**of_epoch)) == (1, 0)
        first.connections.ask_ahead(**of_epoch)
        first.connections.give_back(0)
        assert first.connections.next_batch(**{**of_epoch, "epoch": 1}) == 0
        assert [second.connections.next_batch(**of_epoch) for _ in range(3)] == [0, 2, 3]


def test_worker_0_trains_on_what_a_worker_loses_late() -> None:
    """Worker 0 was told that there were no more batches while the other had some, and these were then nobody's."""
    with workers(max_staleness=1, num_servers=2) as (first, second):
        first.connections.begin_training()
        of_epoch: dict[str, Any] = {"epoch": 0, "first": 0, "num_batches": 3, "limit": None}
        taken = [worker.connections.next_batch(**of_epoch) for worker in (first, second, second)]
        assert taken == [0, 1, 2]
        waiting = threading.Thread(target=lambda: taken.append(first.connections.next_batch(**of_epoch)), daemon=True)
        waiting.start()
        ahead = Ahead(second, 3)
        assert ahead.has_done(3), "a worker that waits holds nobody back"
        ahead.join()
        second.connections.trained(0, 1)
        assert second.connections.next_batch(**of_epoch) is None, "all but worker 0 go on"
        assert len(taken) == 3
        second.vanish()
        waiting.join(20)
        assert taken[3:] == [2]
        for number in (0, 2):
            first.connections.trained(0, number)
        assert first.connections.next_batch(**of_epoch) is None


def test_parameters_without_a_gradient_get_the_updates_of_others() -> None:
    with workers() as (first, second):
        first.step(gradients(0, 0))
        for parameter in second.parameters:
            parameter.grad = None
        second.optimizer.step()
        assert_equal(second.now, first.now)
