"""What a failed run leaves for Python to print when nobody catches its exception."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from lightning_multigpu.job.uncaught_errors import Exit, resume_advice

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


@pytest.fixture(autouse=True)
def exit_(monkeypatch: pytest.MonkeyPatch) -> Exit:
    """That of this process, whose run has failed."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    return Exit()


def failed(exit_: Exit, *, is_printed: bool = True) -> ValueError:
    error = ValueError("spoilt")
    exit_.after(error, 5.0)
    exit_.is_printed = is_printed
    return error


def printed(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """What Python prints of an exception that nobody catches."""
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


def test_what_the_guardian_has_printed_is_printed_once(capsys: pytest.CaptureFixture[str], exit_: Exit) -> None:
    assert printed(failed(exit_), capsys) == ""
    assert printed(failed(exit_, is_printed=False), capsys) == "ValueError: spoilt\n", "the guardian has been killed"
    assert exit_.is_limited


def test_other_exceptions_are_shown_as_ever(capsys: pytest.CaptureFixture[str], exit_: Exit) -> None:
    other = KeyError("another")
    other.__context__ = failed(exit_)  # raised while the program handled the failure
    assert not exit_.is_limited
    assert printed(other, capsys).endswith("KeyError: 'another'\n")
    assert exit_.is_limited


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_hook_of_the_users_own_is_called(
    is_wrapped: bool, exit_: Exit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[BaseException] = []

    def users(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        calls.append(error)

    monkeypatch.setattr(sys, "excepthook", as_torch_does(users) if is_wrapped else users)
    failed(exit_)
    error = failed(exit_)  # a second failure finds the hook of the first one
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
