"""What a failed run leaves for Python to print when nobody catches its exception."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from lightning_multigpu.job import uncaught_errors
from lightning_multigpu.job.uncaught_errors import FailedExit, exit_after, resume_advice

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


@pytest.fixture(autouse=True)
def limited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times to which exits were limited."""
    found: list[float] = []
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(uncaught_errors, "limit_exit", lambda timeout_s, since_s: found.append(timeout_s))
    return found


def failed(*, is_printed: bool = True) -> ValueError:
    error = ValueError("spoilt")
    exit_after(error, FailedExit(5.0, time.monotonic(), is_printed))
    return error


def printed(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """What Python prints of an exception that nobody catches."""
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


def test_what_the_guardian_has_printed_is_printed_once(
    capsys: pytest.CaptureFixture[str], limited: list[float]
) -> None:
    assert printed(failed(), capsys) == ""
    assert printed(failed(is_printed=False), capsys) == "ValueError: spoilt\n", "the guardian has been killed"
    assert limited == [5.0, 5.0]


def test_exceptions_of_a_program_that_goes_on_are_shown_as_ever(
    capsys: pytest.CaptureFixture[str], limited: list[float]
) -> None:
    other = KeyError("another")
    error = failed()
    assert printed(other, capsys) == "KeyError: 'another'\n"
    assert limited == []
    other.__context__ = error  # raised while the program handled the failure
    assert printed(other, capsys).endswith("KeyError: 'another'\n")
    assert limited == [5.0]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_hook_of_the_users_own_is_called(
    is_wrapped: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[BaseException] = []

    def users(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        calls.append(error)

    monkeypatch.setattr(sys, "excepthook", as_torch_does(users) if is_wrapped else users)
    failed()
    error = failed()  # a second failure finds the hook of the first one
    assert printed(error, capsys) == ""
    assert calls == [error]


def as_torch_does(old_hook: Hook) -> Hook:
    """The hook of ``torch.distributed.init_process_group``."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        old_hook(kind, error, trace)

    hook.__module__ = "torch.distributed.distributed_c10d"
    return hook


def test_the_last_line_names_the_file_to_resume_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resume_advice("runs/b.ckpt") == "Resume with ckpt_path='runs/b.ckpt'"
    assert resume_advice(None) == ""
    assert resume_advice(".lr_find_7e01.ckpt") == "", "a Tuner removes that"
    monkeypatch.setattr(sys, "argv", ["/home/me/.venv/bin/lightning-multigpu", "fit"])
    assert resume_advice("runs/b.ckpt") == "Resume with lightning-multigpu fit --resume=runs/b.ckpt"


def test_an_exception_that_a_program_catches_can_be_sent_to_another_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The function that finds the checkpoint went with it, which pickle refuses."""
    sent = pickle.loads(pickle.dumps(failed()))
    assert (type(sent), sent.args) == (ValueError, ("spoilt",))
    assert printed(sent, capsys) == "ValueError: spoilt\n"
