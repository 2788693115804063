"""The most useful line of a stack, and the collective in which it ends."""

import pytest

from lightning_multigpu.job.guardian.frames import Frame, own_collective, place

SITE = "/venv/lib/python3.11/site-packages/"
C10D = SITE + "torch/distributed/distributed_c10d.py"
FIT = Frame(SITE + "lightning/pytorch/trainer/trainer.py", 560, "fit")
CALL = Frame(SITE + "lightning/pytorch/trainer/call.py", 330, "_call_strategy_hook")
SCRIPT = Frame("/home/me/train.py", 99, "<module>")
STEP = Frame("/home/me/train.py", 42, "training_step")


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([Frame(SITE + "torch/nn/modules/linear.py", 1, "forward"), STEP, CALL, FIT, SCRIPT], STEP.text),
        ([Frame(SITE + "lightning/pytorch/strategies/strategy.py", 213, "backward"), CALL, FIT, SCRIPT],
         "lightning/pytorch/strategies/strategy.py:213 in backward"),
        ([Frame("/usr/lib/python3.11/queue.py", 171, "get"), Frame("/home/me/data.py", 7, "__next__"), CALL, FIT],
         "me/data.py:7 in __next__"),
        # A callback of the user's calls the Trainer: Lightning's frames stand on both sides of it.
        ([Frame(SITE + "torch/x.py", 1, "f"), CALL, Frame("/home/me/own.py", 5, "on_train_end"), CALL, FIT, SCRIPT],
         "me/own.py:5 in on_train_end"),
        ([Frame("/home/me/torch/train.py", 3, "main"), SCRIPT], "torch/train.py:3 in main"),
        ([Frame("/src/lightning_multigpu/engine/ring.py", 9, "f"), CALL], "lightning_multigpu/engine/ring.py:9 in f"),
        ([Frame("/usr/lib/python3.11/threading.py", 9, "wait")], "python3.11/threading.py:9 in wait"),
        ([], "an unknown line"),
    ],
)  # fmt: skip
def test_the_line_that_tells_most(frames: list[Frame], expected: str) -> None:
    assert place(frames) == expected


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([Frame(C10D, 3252, "all_reduce"), Frame(SITE + "torch/distributed/c10d_logger.py", 83, "wrapper"), STEP, FIT],
         "all_reduce"),
        ([Frame(C10D, 1, "broadcast"), Frame(C10D, 2, "broadcast_object_list"), STEP, FIT], "broadcast_object_list"),
        ([Frame(C10D, 1, "_store_based_barrier"), Frame(C10D, 2, "new_group"), STEP], "new_group"),
        ([Frame(SITE + "torch/distributed/utils.py", 1, "_sync_states"), STEP], ""),
        ([STEP, FIT], ""),
        ([Frame("/usr/lib/python3.11/contextlib.py", 81, "inner"), STEP], ""),
        # torch calls back: it is the user's code that runs.
        ([Frame("/home/me/hook.py", 1, "hook"), Frame(C10D, 3252, "all_reduce"), STEP], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_the_collective_at_the_end_of_a_stack(frames: list[Frame], expected: str) -> None:
    assert own_collective(frames) == expected
