"""The tests' own world: failures arrive as what they are, at once, and the next call finds everything clean."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.leaks import ProcessState, leaks_since
from tests.world import DeadlineError, LeakError, RankDiedError, World, init_group, rank


def sum_of_ranks() -> float:
    init_group()
    total = torch.tensor([float(rank() + 1)])
    dist.all_reduce(total)
    return total.item()


class OutOfRangeError(ValueError):
    def __init__(self, value: int) -> None:
        super().__init__(f"value={value} is too large")
        self.value = value

    def __reduce__(self) -> "tuple[type[OutOfRangeError], tuple[int]]":
        return OutOfRangeError, (self.value,)


def _rank_1_raises_while_the_others_wait() -> None:
    print(f"rank {rank()} was here")
    init_group()
    if rank() == 1:
        raise OutOfRangeError(7)
    dist.barrier()


def test_the_exception_of_rank_1_arrives_as_itself_and_the_world_recovers(world2: World) -> None:
    """The others hang in a barrier that rank 1 never joins: its exception must not wait for them."""
    with pytest.raises(OutOfRangeError, match="value=7 is too large") as caught:
        world2.run(_rank_1_raises_while_the_others_wait, timeout_s=60)
    notes = "\n".join(caught.value.__notes__)
    for text in ("raised first by rank 1 of 2", "_rank_1_raises_while_the_others_wait", "rank 0 was here"):
        assert text in notes
    assert world2.processes == []
    assert world2.run(sum_of_ranks) == [3.0, 3.0]


def _raise(values: list[int]) -> None:
    if values[rank()]:
        raise OutOfRangeError(values[rank()])


def test_a_rank_that_does_not_raise_or_raises_something_else_fails_the_test(own_world: World) -> None:
    with pytest.raises(AssertionError, match=r"rank\(s\) \[1\] of 2 did not raise OutOfRangeError"):
        own_world.run_raising(OutOfRangeError, "is too large", _raise, [7, 0])
    with pytest.raises(OutOfRangeError, match="value=8"):
        own_world.run_raising(OutOfRangeError, "value=7", _raise, [7, 8])
    with pytest.raises(OutOfRangeError, match="value=7"):
        own_world.run_raising(TypeError, "value=7", _raise, [7, 7])


@pytest.fixture
def own_world() -> Iterator[World]:
    """A world for one test that kills it: the session's worlds stay as they are."""
    world = World(2)
    yield world
    world.close()


def _rank_1_is_killed_and_rank_0_hangs() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def _rank_1_sleeps() -> None:
    if rank() == 1:
        time.sleep(1000)


def test_a_killed_rank_is_noticed_at_once_and_a_hanging_one_shows_its_stack(own_world: World) -> None:
    own_world.run(rank)
    start_s = time.monotonic()
    with pytest.raises(RankDiedError, match="rank 1 of 2 died, exit status -9"):
        own_world.run(_rank_1_is_killed_and_rank_0_hangs, timeout_s=600)
    assert time.monotonic() - start_s < 60
    own_world.run(sum_of_ranks)  # the ranks have imported this module
    with pytest.raises(DeadlineError, match=r"rank\(s\) 1 of 2 had not finished after 2 s") as caught:
        own_world.run(_rank_1_sleeps, timeout_s=2)
    assert "_rank_1_sleeps" in str(caught.value)
    assert own_world.processes == []


def _leave_a_thread_and_a_file() -> None:
    threading.Thread(target=time.sleep, args=(60,), name="lazy", daemon=True).start()
    if rank() == 1:
        Path("left.txt").touch()


def test_what_a_call_leaves_behind_fails_it(own_world: World) -> None:
    with pytest.raises(LeakError, match="the call left behind") as caught:
        own_world.run(_leave_a_thread_and_a_file)
    assert "rank 0: thread 'lazy' still runs" in str(caught.value)
    assert "file left in the working directory: left.txt" in str(caught.value)


def test_each_kind_is_seen_once_and_can_be_put_back() -> None:
    before = ProcessState.take()
    with contextlib.ExitStack() as stack:
        os.environ["LEFT"] = "1"
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        process = stack.enter_context(subprocess.Popen(["sleep", "60"]))
        stack.callback(process.kill)
        stack.callback(os.close, os.open("/etc/passwd", os.O_RDONLY))
        leaks = leaks_since(before, patience_s=0)
    texts = ("environment: LEFT='1' was added", "signal SIGUSR1: handler is", "child process", "is open: /etc/passwd")
    assert len(leaks) == len(texts)
    assert all(text in leak for leak, text in zip(leaks, texts, strict=True))
    before.restore()
    assert leaks_since(before) == []
