"""What other processes take of a machine: readings, and shares of made-up readings."""

import multiprocessing
import time

import pytest

from lightning_multigpu.callbacks.other_processes import Usage, share_of_others, usage


def reading(boot: str, now_s: float, busy_s: float, own_s: float, gpu: float = 0.0) -> Usage:
    return Usage(boot, now_s, 2, busy_s, own_s, gpu)


def test_what_is_not_of_a_process_that_measures_is_of_others() -> None:
    """Two hosts on one machine took 8 s and 4 s of 20 s, all together 15 s; on another machine nobody else works."""
    before = [reading("a", 0, 0, 0), reading("a", 5, 0, 0), reading("b", 0, 0, 0)]
    after = [reading("a", 10, 15, 8), reading("a", 15, 15, 4), reading("b", 10, 10, 10)]
    assert share_of_others(before, after) == pytest.approx(3 / 20)
    assert share_of_others(before[:1], after[:1]) == pytest.approx(7 / 20)
    assert share_of_others(before[2:], after[2:]) == 0
    assert share_of_others([reading("b", 0, 0, 0, gpu=0.6)], after[2:]) == 0.6, "of a GPU"


def work(seconds: float) -> None:
    while time.process_time() < seconds:
        pass


def test_processes_that_this_one_has_started_are_its_own() -> None:
    before = usage()
    process = multiprocessing.get_context("fork").Process(target=work, args=(0.3,))
    process.start()
    process.join()
    after = usage()
    assert after.own_s - before.own_s >= 0.25
    assert after.busy_s - before.busy_s >= 0.2
