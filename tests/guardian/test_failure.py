"""A failure as text, and the exception that other ranks make of it."""

from __future__ import annotations

import json

import pytest

from lightning_multigpu import RankFailedError
from lightning_multigpu.guardian import Failure


class OwnError(Exception):
    """An exception of the user's module."""


def heard(error: BaseException) -> Exception:
    """The exception that another rank raises when it hears of ``error`` on rank 3."""
    try:
        raise error
    except BaseException as caught:
        failure = Failure.of(caught, rank=3, step=7)
    return Failure.from_message(json.loads(json.dumps(failure.to_message()))).exception()


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


def test_only_exceptions_are_looked_up_by_name() -> None:
    """The name comes from another process."""
    for name in ("print", "SystemExit", "BaseException", "__import__", "nothing"):
        assert type(Failure("raised it", 3, error_type=name, message="x").exception()) is RankFailedError


def test_a_failure_that_is_no_ranks() -> None:
    error = Failure("node 1 has heard nothing from node 0").exception()
    assert str(error) == "the job failed: node 1 has heard nothing from node 0"
    assert not hasattr(error, "__notes__"), "it was not raised on another rank"


@pytest.mark.parametrize(("step", "told"), [(None, ""), (0, ", no step completed"), (5, ", last completed step 5")])
def test_the_last_step_is_told_where_it_is_known(step: int | None, told: str) -> None:
    text = Failure("was ended by SIGKILL", 1, "here", 42, step).describe()
    assert text == f"rank 1 (host here, pid 42{told}) was ended by SIGKILL"
