"""The sum of the replicas' gradients, and torch's generator meanwhile."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lightning_multigpu.engine.one_process.joint_loss import JointLoss, same_generator, summed
from lightning_multigpu.engine.one_process.replica_threads import ReplicaThreads


def test_gradients_that_share_memory_are_not_changed_in_place() -> None:
    """autograd gives ``p`` and ``q`` of ``p + q`` the same gradient, and that of a sum is one number, expanded."""
    parameters = [torch.zeros(3) for _ in range(4)]
    shared, expanded, own = torch.ones(3), torch.ones(1).expand(3), torch.ones(3)
    found = [[shared, shared, expanded, own], [torch.full((3,), float(n)) for n in (1, 2, 3, 4)]]
    sums = summed(found, parameters)
    assert [each.tolist() for each in sums if each is not None] == [[n + 1.0] * 3 for n in (1, 2, 3, 4)]


def test_parameters_that_only_some_replicas_use() -> None:
    gradient = torch.ones(2)
    sums = summed([[None, None], [gradient, None]], [torch.zeros(2)] * 2)
    assert sums[0] is gradient
    assert sums[1] is None


def test_backward_on_gpus_leaves_the_generator_of_the_cpu_as_it_is() -> None:
    """Threads that each set it within a checkpoint could leave it in an old state, on CPUs and on GPUs."""
    before = torch.get_rng_state()
    parameter = torch.ones(2, requires_grad=True)
    losses = [(parameter * torch.rand(2)).sum() for _ in range(2)]
    losses[1].register_hook(lambda _: torch.set_rng_state(before))  # as threads leave it
    drawn = torch.get_rng_state()
    threads = ReplicaThreads([torch.device("cpu")] * 2)
    parameters = [[parameter], [parameter]]
    JointLoss(losses, [0.5, 0.5], parameters, threads, lambda _: nullcontext(), has_drawn=True).value().backward()
    threads.close()
    assert torch.equal(torch.get_rng_state(), drawn)


def test_threads_read_and_set_the_generator_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``torch.utils.checkpoint`` does in backward. Once they waited for each other for ever."""
    inside, most = 0, 0

    def slow(function: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1
            return function(*args)

        return call

    def work() -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)

    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch, name, slow(getattr(torch, name)))
    functions = torch.get_rng_state, torch.set_rng_state
    state = torch.get_rng_state()
    with same_generator():
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert most == 1
    assert (torch.get_rng_state, torch.set_rng_state) == functions
    assert torch.equal(torch.get_rng_state(), state)
