"""Stacks that are taken from outside, and what is read out of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_multigpu.job.guardian.hang import stacks
from lightning_multigpu.job.guardian.hang.stacks import (
    Frame,
    Question,
    Stacks,
    StackSignal,
    collective_call,
    parse,
    place,
)
from lightning_multigpu.job.guardian.proc import RUNNING, STOPPED, WatchedProcess
from tests.job.guardian.job import DEADLINE_S, REPOSITORY, eventually, go_on, is_alive, line_of

pytestmark = pytest.mark.launch

SITE = "/venv/lib/python3.11/site-packages/"
C10D = SITE + "torch/distributed/distributed_c10d.py"
FIT = Frame(SITE + "lightning/pytorch/trainer/trainer.py", 560, "fit")
CALL = Frame(SITE + "lightning/pytorch/trainer/call.py", 330, "_call_strategy_hook")
SCRIPT = Frame("/home/me/train.py", 99, "<module>")
STEP = Frame("/home/me/train.py", 42, "training_step")

DUMP = """Thread 0x0000000000000008 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x0000000000000007 (most recent call first):
  File "/home/me/train, really.py", line 42 in training_step
  File "<string>", line 1 in <module>
"""


def test_the_main_threads_frames() -> None:
    assert parse(DUMP, 7).main == (
        Frame("/home/me/train, really.py", 42, "training_step"),
        Frame("<string>", 1, "<module>"),
    )
    assert parse(DUMP, 8).main == (Frame("/usr/lib/python3.11/threading.py", 324, "wait"),)
    assert parse(DUMP, 9).main == ()
    assert parse("", 7) == Stacks("")


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
        ([], "unknown"),
    ],
)  # fmt: skip
def test_the_line_that_tells_most(frames: list[Frame], expected: str) -> None:
    assert place(frames) == expected


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([Frame(C10D, 3252, "all_reduce"), Frame(SITE + "torch/distributed/c10d_logger.py", 83, "wrapper"), STEP, FIT],
         ("all_reduce", STEP.text)),
        ([Frame(C10D, 1, "broadcast"), Frame(C10D, 2, "broadcast_object_list"), STEP, FIT],
         ("broadcast_object_list", STEP.text)),
        ([Frame(C10D, 1, "_store_based_barrier"), Frame(C10D, 2, "new_group"), STEP], ("new_group", STEP.text)),
        ([Frame(SITE + "torch/distributed/utils.py", 1, "_sync_states"), STEP], ("sync_states", STEP.text)),
        ([STEP, FIT], None),
        ([Frame("/usr/lib/python3.11/contextlib.py", 81, "inner"), STEP], None),
        # torch calls back: it is the user's code that runs.
        ([Frame("/home/me/hook.py", 1, "hook"), Frame(C10D, 3252, "all_reduce"), STEP], None),
        ([], None),
    ],
)  # fmt: skip
def test_the_collective_at_the_end_of_a_stack(frames: list[Frame], expected: tuple[str, str] | None) -> None:
    assert collective_call(frames) == expected


PREAMBLE = """
import ctypes, os, socket, sys, time
from types import ModuleType
package = ModuleType("lightning_multigpu")
package.__path__ = [os.path.join({repository!r}, "lightning_multigpu")]
sys.modules["lightning_multigpu"] = package
from lightning_multigpu.job.guardian.hang.stacks import answer_stack_signal
how = answer_stack_signal()
assert answer_stack_signal() is how
print(how.number, how.descriptor, how.main_thread, flush=True)
sys.stdin.readline()
"""


@contextmanager
def rank(statements: str) -> Iterator[tuple[WatchedProcess, StackSignal, subprocess.Popen[str]]]:
    """A process that answers and runs the statements; with the file that it writes to, as the guardian gets it."""
    code = PREAMBLE.format(repository=str(REPOSITORY)) + statements
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        number, descriptor, thread = map(int, line_of(process).split())
        own = os.open(f"/proc/{process.pid}/fd/{descriptor}", os.O_RDWR)
        go_on(process)
        watched = WatchedProcess(process.pid)
        yield watched, StackSignal(number, own, thread), process
        watched.close()
        os.close(own)
    finally:
        process.kill()
        process.communicate()


def ask(process: WatchedProcess, how: StackSignal | None) -> Stacks:
    question = Question(process, how)
    assert eventually(question.is_answered)
    return question.answer()


IN_C = """
read, write = os.pipe()
read_in_c, buffer = ctypes.PyDLL(None).read, ctypes.create_string_buffer(1)  # PyDLL keeps the interpreter lock
def blocked():
    print("in", flush=True)
    read_in_c(read, buffer, 1)
blocked()
"""
IN_PYTHON = """
def blocked():
    print("in", flush=True)
    while True:
        pass
blocked()
"""


@pytest.mark.parametrize("statements", [IN_C, IN_PYTHON], ids=["C", "Python"])
def test_a_process_answers_from_wherever_it_is_and_goes_on(statements: str) -> None:
    with rank(statements) as (watched, how, process):
        assert line_of(process) == "in\n"
        for _ in range(2):
            stacks = ask(watched, how)
            assert [frame.function for frame in stacks.main] == ["blocked", "<module>"]
        assert is_alive(process.pid)


def test_a_process_answers_again_when_its_handler_was_taken_away() -> None:
    """As Lightning's Trainer does at the end of a run; the process may begin another."""
    taken = "import signal; signal.signal(how.number, signal.SIG_DFL); assert answer_stack_signal() is how"
    with rank(taken + IN_PYTHON) as (watched, how, process):
        assert line_of(process) == "in\n"
        assert [frame.function for frame in ask(watched, how).main] == ["blocked", "<module>"]


def test_a_stopped_process_is_not_asked_and_said_to_be_stopped() -> None:
    with rank("time.sleep(60)") as (watched, how, process):
        process.send_signal(signal.SIGSTOP)
        assert eventually(lambda: watched.state() == STOPPED)
        stacks = ask(watched, how)
        assert stacks.main == ()
        assert stacks.place.startswith("it is stopped by a signal")
        process.send_signal(signal.SIGCONT)


def test_a_process_that_would_be_ended_by_the_signal_is_not_asked() -> None:
    """It has replaced its program since it registered, or it has never registered."""
    program = "import time; print(1, flush=True); time.sleep(60)"
    with rank(f"os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', {program!r}])") as (watched, how, process):
        assert line_of(process) == "1\n"
        for answer in (ask(watched, how), ask(watched, None)):
            assert answer.place.startswith("it has registered no signal for its stacks")
        time.sleep(0.2)
        assert is_alive(process.pid)


def test_an_ended_process() -> None:
    with rank("pass") as (watched, how, process):
        process.wait(DEADLINE_S)
        assert ask(watched, how).main == ()


@pytest.mark.parametrize(
    ("settled_s", "last_function"), [(0.0, "main"), (1e9, "<module>"), (1e9, "_run_module_as_main")]
)
def test_an_answer_is_whole_when_the_main_thread_is_in_it(
    settled_s: float, last_function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that had to wait for a core in the middle of its answer was silent, and half an answer was taken."""
    monkeypatch.setattr(stacks, "_SETTLED_S", settled_s)
    monkeypatch.setattr(stacks, "_caught", lambda *_: -1)
    process: Any = SimpleNamespace(pid=0, state=lambda: RUNNING, send_signal=lambda number: True)
    with tempfile.TemporaryFile() as file:
        question = Question(process, StackSignal(1, file.fileno(), main_thread=7))
        others, rest = DUMP.replace("<module>", last_function).split("\n\n")
        for text, answered in ((others, False), (f"\n\n{rest}", True)):
            os.write(file.fileno(), text.encode())
            assert [question.is_answered() for _ in range(2)] == [answered] * 2


def test_the_signal_is_one_that_nobody_uses() -> None:
    """A process that uses a real-time signal of its own keeps it."""
    used = signal.SIGRTMAX - 3
    code = f"import signal; signal.signal({used}, lambda *_: print('own', flush=True))"
    taken = PREAMBLE.format(repository=str(REPOSITORY)).replace("import ctypes", code + "\nimport ctypes", 1)
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", taken + f"os.kill(os.getpid(), {used})"],
        input="\n", capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    assert int(found.stdout.split()[0]) != used
    assert found.stdout.endswith("own\n")
