"""A failure as text, and the exception that other ranks make of it."""

import json
from typing import Any

import pytest

from lightning_multigpu import RankFailedError
from lightning_multigpu.job.guardian import Failure


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


FROM_A_WORKER = """\
Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/home/me/data.py", line 7, in __getitem__
    return rows[i]
KeyError: 41"""


def test_frames_of_libraries_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in training_step had 120 lines, of which 4 were the user's."""
    monkeypatch.delenv("LIGHTNING_MULTIGPU_TRACEBACK", raising=False)
    library = "/home/me/.venv/lib/python3.11/site-packages/torch/nn/modules/module.py"
    names: dict[str, Any] = {"loads": json.loads}
    exec(compile("def step():\n    loads('no')", "train.py", "exec"), names)
    exec(compile("def call():\n    step()", library, "exec"), names)
    with pytest.raises(ValueError, match="Expecting") as caught:
        exec(compile("call()", "train.py", "exec"), names)
    failure = Failure.of(caught.value, rank=3, step=7)
    monkeypatch.setenv("LIGHTNING_MULTIGPU_TRACEBACK", "full")
    assert library in Failure.of(caught.value, rank=3, step=7).traceback
    first, *lines = failure.traceback.splitlines()
    assert first == "(Without 3 frames of libraries: LIGHTNING_MULTIGPU_TRACEBACK=full shows all)"
    files = [line.split('"')[1] for line in lines if line.startswith("  File")]
    assert files == [__file__, "train.py", "train.py", json.decoder.__file__], "the last one has raised it"
    assert failure.place == "train.py:2 in step"
    assert "at train.py:2 in step) raised JSONDecodeError" in failure.describe()


def test_the_traceback_within_a_message_is_told_once() -> None:
    """A data loader puts its worker's traceback into the message, which another rank had three times."""
    failure = Failure.of(RuntimeError(FROM_A_WORKER), rank=3, step=7)
    assert failure.what == "raised RuntimeError: Caught KeyError in DataLoader worker process 0. KeyError: 41"
    assert str(failure._replace(error_type="").exception()).count("Original Traceback") == 1
    assert str(failure.exception()) == FROM_A_WORKER, "who catches it has the message itself"
