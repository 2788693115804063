"""Threads of replicas: a run ends when all of its calls have ended, also after Ctrl-C and errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from lightning_multigpu.engine.one_process.replica_threads import ReplicaThreads


@pytest.fixture
def threads() -> Iterator[ReplicaThreads]:
    found = ReplicaThreads([torch.device("cpu")] * 3)
    yield found
    found.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


def raises(error: BaseException) -> None:
    raise error


def test_ctrl_c_waits_for_the_calls_of_the_threads(threads: ReplicaThreads) -> None:
    ended: list[int] = []

    def call() -> None:
        time.sleep(0.05)
        ended.append(1)

    with pytest.raises(KeyboardInterrupt):
        threads.run([lambda: raises(KeyboardInterrupt()), call, call], "training_step")
    assert len(ended) == 2
    assert threads.run([int, int, int], "training_step") == [0] * 3


def test_a_call_that_fails_leaves_the_thread_for_the_next_one(threads: ReplicaThreads) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="of the user") as caught:
            threads.run([int, lambda: raises(ValueError("of the user"))], "backward")
        assert caught.value.__notes__ == ["in backward of replica 1 of 2, on cpu"]
    assert threads.run([int, int], "backward") == [0, 0]
    assert threads.run([int], "backward") == [0]
