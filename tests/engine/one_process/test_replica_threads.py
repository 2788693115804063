"""Threads of replicas: Ctrl-C at any point of a run leaves no call that is still being made."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch

from lightning_multigpu.engine.one_process import replica_threads
from lightning_multigpu.engine.one_process.replica_threads import ReplicaThreads, _ReplicaThread


def interrupt_at(line: int) -> Any:
    """A trace function that raises KeyboardInterrupt at a line of the threads' code, counted as they run."""
    left = [line]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != replica_threads.__file__:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    return trace


def test_ctrl_c_at_any_point_waits_for_the_calls() -> None:
    """A ThreadPoolExecutor lost a thread that it had just started: the call went on, and changed the module."""
    threads = ReplicaThreads([torch.device("cpu")] * 3)
    line = 0
    while True:
        line += 1
        begun, ended = [], []

        def call(begun: list[int] = begun, ended: list[int] = ended) -> int:
            begun.append(1)
            time.sleep(0.002)
            ended.append(1)
            return len(ended)

        sys.settrace(interrupt_at(line))
        try:
            threads.run([int, call, call], "training_step")
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        at_the_end = len(begun)
        assert len(ended) == at_the_end
        time.sleep(0.002)
        assert len(begun) == at_the_end
    assert line > 20
    assert threads.run([int, int, int], "training_step") == [0] * 3
    threads.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


def test_ends_of_calls_for_which_nobody_waited_do_not_pile_up() -> None:
    thread = _ReplicaThread("replica_1")
    thread.start()
    for _ in range(5):
        thread.give(lambda: None)
        while thread._call is not None:
            time.sleep(0.001)
        thread.await_call()
    thread.end()
    assert thread._ends_of_calls.qsize() <= 2  # of the last two calls


def test_a_call_that_fails_leaves_the_thread_for_the_next_one() -> None:
    def fail() -> int:
        raise ValueError("of the user")

    threads = ReplicaThreads([torch.device("cpu")] * 2)
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match="of the user") as caught:
                threads.run([int, fail], "backward")
            assert caught.value.__notes__ == ["in backward of replica 1 of 2, on cpu"]
        assert threads.run([int, int], "backward") == [0, 0]
        assert threads.run([int], "backward") == [0]
    finally:
        threads.close()
