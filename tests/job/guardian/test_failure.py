"""A failure as text, and the exception that other ranks make of it."""

from __future__ import annotations

import json

import pytest

from lightning_multigpu import RankFailedError
from lightning_multigpu.job.guardian import Failure
from lightning_multigpu.job.guardian.failure import folded


class OwnError(Exception):
    """An exception of the user's module."""


def heard(error: BaseException) -> Exception:
    """The exception that another rank raises when it hears of ``error`` on rank 3."""
    try:
        raise error
    except BaseException as caught:
        failure = Failure.of(caught, rank=3, step=7)
    return Failure(**json.loads(json.dumps(failure.to_message()))).exception()


@pytest.mark.parametrize(
    "error",
    [KeyError("weights"), KeyError(3), ValueError("no such file"), FileNotFoundError(2, "None", "a"), OSError()],
)
def test_an_exception_of_pythons_own_comes_as_the_same_class(error: Exception) -> None:
    again = heard(error)
    assert type(again) is type(error)
    assert str(again).strip("'") == str(error).strip("'")
    (note,) = again.__notes__
    assert "rank 3" in note
    assert "last completed step 7" in note
    assert "in heard" in note, "the traceback of the failed rank"


class MuteError(ValueError):
    def __str__(self) -> str:
        raise AttributeError("no message")


@pytest.mark.parametrize("error", [MuteError(), KeyError(MuteError())])
def test_an_exception_without_a_text_is_told(error: Exception) -> None:
    """Its ``str()`` raised while the rank reported its failure, and the other ranks blamed each other."""
    failure = Failure.of(error, rank=3, step=7)
    assert failure.what.startswith(f"raised {type(error).__name__}")
    assert isinstance(heard(error), Exception)


def test_any_other_exception_is_told_in_full() -> None:
    error = OwnError("spoilt")
    error.add_note("look at row 4")
    again = heard(error)
    assert type(again) is RankFailedError
    first, *_, last = str(again).splitlines()
    assert first.startswith("rank 3 (host ")
    assert first.endswith("raised OwnError: spoilt")
    assert "in heard" in str(again), "the traceback of the failed rank"
    assert last == "look at row 4"


UNICODE = UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ExceptionGroup("two", [OwnError()]), UNICODE])
def test_what_cannot_be_raised_elsewhere_is_told(error: BaseException) -> None:
    again = heard(error)
    assert type(again) is RankFailedError
    assert f"raised {type(error).__name__}" in str(again)
    # The name comes from another process: only exceptions are looked up by it.
    for name in ("print", "BaseException", "__import__", "nothing"):
        assert type(Failure("raised it", 3, error_type=f"builtins.{name}", message="x").exception()) is RankFailedError
    failure = Failure("node 1 has received nothing from node 0").exception()
    assert str(failure) == "the job failed: node 1 has received nothing from node 0"
    assert not hasattr(failure, "__notes__"), "it was not raised on another rank"


@pytest.mark.parametrize(("step", "told"), [(None, ""), (0, ", no step completed"), (5, ", last completed step 5")])
def test_the_last_step_is_told_where_it_is_known(step: int | None, told: str) -> None:
    text = Failure("was ended by SIGKILL", 1, "here", 42, step).describe()
    assert text == f"rank 1 (host here, pid 42{told}) was ended by SIGKILL"


PACKAGES = "/home/me/.venv/lib/python3.11/site-packages"
RAISED_IN_A_STEP = f"""\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/home/me/train.py", line 9, in <module>
    trainer.fit(Net(), loader)
  File "{PACKAGES}/lightning/pytorch/trainer/trainer.py", line 584, in fit
    call._call_and_handle_interrupt(
  File "{PACKAGES}/torch/nn/modules/module.py", line 1778, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/contextlib.py", line 81, in inner
    return func(*args, **kwds)
  File "{PACKAGES}/lightning_multigpu/strategies/ring_ddp.py", line 331, in training_step
    return super().training_step(*args, **kwargs)
  [Previous line repeated 3 more times]
  File "/home/me/train.py", line 4, in training_step
    return json.loads(batch)
  File "/usr/lib/python3.11/json/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
ValueError: spoilt
    an indented line of the message
"""
FOLDED = """\
Traceback (most recent call last):
  ... 1 frame of libraries (LIGHTNING_MULTIGPU_TRACEBACK=full shows all)
  File "/home/me/train.py", line 9, in <module>
    trainer.fit(Net(), loader)
  ... 4 frames of libraries
  File "/home/me/train.py", line 4, in training_step
    return json.loads(batch)
  File "/usr/lib/python3.11/json/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
ValueError: spoilt
    an indented line of the message
"""
FROM_A_WORKER = f"""\
Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    trainer.fit(Net(), loader)
  File "{PACKAGES}/torch/_utils.py", line 733, in reraise
    raise exception
KeyError: Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "{PACKAGES}/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/data.py", line 7, in __getitem__
    return rows[i]
KeyError: 41
"""


def test_frames_of_libraries_are_folded_and_the_users_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in training_step had 120 lines, of which 4 were the user's."""
    monkeypatch.delenv("LIGHTNING_MULTIGPU_TRACEBACK", raising=False)
    assert folded(RAISED_IN_A_STEP).splitlines() == FOLDED.splitlines()
    assert folded("no traceback\n  at all") == "no traceback\n  at all"
    monkeypatch.setenv("LIGHTNING_MULTIGPU_TRACEBACK", "full")
    assert folded(RAISED_IN_A_STEP) == RAISED_IN_A_STEP


def test_a_traceback_that_ends_in_a_library_says_where() -> None:
    assert folded(FROM_A_WORKER).splitlines()[3:] == [
        "  ... 1 frame of libraries, last torch/_utils.py:733 in reraise (LIGHTNING_MULTIGPU_TRACEBACK=full shows all)",
        "KeyError: Caught KeyError in DataLoader worker process 0.",
        "Original Traceback (most recent call last):",
        "  ... 1 frame of libraries",
        '  File "/home/me/data.py", line 7, in __getitem__',
        "    return rows[i]",
        "KeyError: 41",
    ]


def test_the_users_innermost_line_is_named() -> None:
    raised = Failure("raised it", 3, traceback=RAISED_IN_A_STEP)
    assert raised.describe() == "rank 3 (at me/train.py:4 in training_step) raised it"
    assert Failure("raised it", 3, traceback=FROM_A_WORKER).place == "me/data.py:7 in __getitem__"
    library_only = "\n".join(FROM_A_WORKER.splitlines()[3:5])
    assert Failure("raised it", 3, traceback=library_only).place == ""


def test_the_traceback_within_a_message_is_told_once() -> None:
    """A data loader puts its worker's traceback into the message, which another rank had three times."""
    message = FROM_A_WORKER.partition("KeyError: ")[2].rstrip()
    failure = Failure.of(RuntimeError(message), rank=3, step=7)
    assert failure.what == "raised RuntimeError: Caught KeyError in DataLoader worker process 0. KeyError: 41"
    assert str(failure._replace(error_type="").exception()).count("Original Traceback") == 1
    assert str(failure.exception()) == message, "who catches it has the message itself"
