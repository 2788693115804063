"""What a failed run prints when nobody catches its exception, and what stays as it was."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from lightning_multigpu.job.guardian import Failure
from lightning_multigpu.job.uncaught_errors import FailureReport, print_if_uncaught

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


@pytest.fixture(autouse=True)
def hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def raised() -> ValueError:
    try:
        raise ValueError("spoilt")
    except ValueError as error:
        return error


def printed(error: BaseException, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What Python prints of an exception that nobody catches."""
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err.splitlines()


def own_failure(error: BaseException, **changes: Any) -> Failure:
    failure = Failure.of(error, rank=1, step=3)._replace(host="h", pid=os.getpid(), **changes)
    error.add_note(failure.describe())
    return failure


def test_the_failed_rank_prints_its_traceback_and_has_the_failure_shown(capsys: pytest.CaptureFixture[str]) -> None:
    error, shown = raised(), []
    print_if_uncaught(error, FailureReport(own_failure(error), True, lambda advice: not shown.append(advice)))
    first, *_, last = printed(error, capsys)
    assert first == "Traceback (most recent call last):"
    assert last == "ValueError: spoilt", "not the note, which the guardian shows"
    assert shown == [""]


@pytest.mark.parametrize("where", ["another rank", "another rank without a guardian", "the process that spawned it"])
def test_what_others_print_of_the_failure_of_a_rank(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Another rank printed its own stack, and then that of the failed rank once more."""
    failure, shown = Failure.of(raised(), rank=1, step=3)._replace(pid=1), []
    error = failure.exception()
    if where == "another rank":
        report, expected = FailureReport(failure, False, lambda advice: not shown.append(advice)), []
    elif where == "another rank without a guardian":
        report = FailureReport(failure, False, lambda advice: False, lambda: "runs/a.ckpt")
        expected = [f"The job failed: {failure.describe()}", "Resume with ckpt_path='runs/a.ckpt'"]
    else:
        report, expected = FailureReport(failure, True), failure.traceback.splitlines()
    print_if_uncaught(error, report)
    assert printed(error, capsys) == expected
    assert shown == [""] * (where == "another rank")
    assert "in raised" in error.__notes__[0], "who catches it has the traceback"


def test_the_last_line_names_the_file_to_resume_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = raised()
    found = ["runs/a.ckpt"]
    print_if_uncaught(error, FailureReport(own_failure(error), True, checkpoint=found.pop))
    found[:] = ["runs/b.ckpt"]
    assert printed(error, capsys)[-1] == "Resume with ckpt_path='runs/b.ckpt'", "saved at the exception"
    assert printed(error, capsys)[-1] == "ValueError: spoilt", "without advice where that cannot be had"
    found[:] = [".lr_find_7e01.ckpt"]
    assert printed(error, capsys)[-1] == "ValueError: spoilt", "a Tuner removes that"
    monkeypatch.setattr(sys, "argv", ["/home/me/.venv/bin/lightning-multigpu", "fit"])
    found[:] = ["runs/b.ckpt"]
    assert printed(error, capsys)[-1] == "Resume with lightning-multigpu fit --resume=runs/b.ckpt"


def test_exceptions_of_a_program_that_goes_on_are_shown_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    error = raised()
    print_if_uncaught(error, FailureReport(own_failure(error), True))
    other = KeyError("another")
    assert printed(other, capsys) == ["KeyError: 'another'"]
    other.__context__ = error  # raised while the program handled the failure
    lines = printed(other, capsys)
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "KeyError: 'another'"


def test_a_hook_of_the_users_own_stays(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def users(*args: object) -> None:
        print("the user's", file=sys.stderr)

    for is_users in (True, False):
        monkeypatch.setattr(sys, "excepthook", as_torch_does(users if is_users else sys.__excepthook__))
        for _ in range(2):  # a second failure finds the hook of the first one
            error = raised()
            print_if_uncaught(error, FailureReport(own_failure(error), True))
        lines = printed(error, capsys)
        assert (lines == ["the user's"]) == is_users
        assert lines[0].startswith("Traceback") == (not is_users), "without torch's '[rank1]:' in each line"


def as_torch_does(old_hook: Hook) -> Hook:
    """The hook of ``torch.distributed.init_process_group``."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        old_hook(kind, error, trace)

    hook.__module__ = "torch.distributed.distributed_c10d"
    return hook


def test_an_exception_that_a_program_catches_can_be_sent_to_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    """The function that finds the checkpoint went with it, which pickle refuses."""
    error = raised()
    print_if_uncaught(error, FailureReport(own_failure(error), True, checkpoint=lambda: "last.ckpt"))
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), sent.args) == (ValueError, ("spoilt",))
    assert "ValueError: spoilt" in printed(sent, capsys)
