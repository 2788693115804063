"""What a failed run prints when nobody catches its exception, and what stays as it was."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest

from lightning_multigpu.job.guardian import Failure
from lightning_multigpu.job.uncaught_errors import FailureMessage, give_sigterm_back, show_if_uncaught
from tests import preforked

WAITED = ["rank 0 waited in all_reduce #4 of group data for 0.1 s"]
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


@pytest.fixture(autouse=True)
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    yield
    give_sigterm_back()


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
    error.add_note(failure.summary())
    return failure


def test_the_failed_rank_prints_what_and_where_first_and_its_exception_last(capsys: pytest.CaptureFixture[str]) -> None:
    error = raised()
    show_if_uncaught(error, FailureMessage(own_failure(error), True, WAITED))
    first, second, third, *_, last = printed(error, capsys)
    place = f"{os.path.basename(os.path.dirname(__file__))}/{os.path.basename(__file__)}"
    assert first.startswith(f"The job failed: rank 1 (host h, pid {os.getpid()}, last completed step 3, at {place}:")
    assert first.endswith(" in raised) raised ValueError"), "its text follows once"
    assert second == f"Meanwhile {WAITED[0]}"
    assert third == "Traceback (most recent call last):"
    assert last == "ValueError: spoilt", "not the note, which is the first line again"


def test_a_long_message_is_printed_in_full_where_the_exception_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal of a few hundred characters stood on the terminal three times."""
    error = ValueError("no such thing, " * 20 + "pass another")
    show_if_uncaught(error, FailureMessage(own_failure(error), True, []))
    headline, *_, last = printed(error, capsys)
    assert headline.endswith(") raised ValueError")
    assert last == f"ValueError: {error}"


def test_another_rank_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It printed its own stack, and then that of the failed rank once more."""
    failure = Failure.of(raised(), rank=1, step=3)._replace(pid=1)
    error = failure.exception()
    show_if_uncaught(error, FailureMessage(failure, False, []))
    assert printed(error, capsys) == [f"The job failed: {failure.summary()}"]
    assert "in raised" in error.__notes__[0], "who catches it has the traceback"


def test_another_host_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """33 hosts printed the same 35 lines each."""
    failure = Failure("was ended by SIGKILL", rank=1, host="h", pid=1, step=3)
    error = failure.exception()
    show_if_uncaught(error, FailureMessage(failure, False, [*WAITED, "b", "c"], is_first_host=False))
    headline = "The job failed: rank 1 (host h, pid 1, last completed step 3) was ended by SIGKILL"
    assert printed(error, capsys) == [f"{headline}; meanwhile {WAITED[0]}, and 2 more ranks waited too"]
    show_if_uncaught(error, FailureMessage(failure, False, WAITED))
    assert printed(error, capsys) == [f"Meanwhile {WAITED[0]}", headline]


def test_the_process_that_has_spawned_the_rank_prints_the_ranks_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure.of(raised(), rank=1, step=3)._replace(pid=1)
    error = failure.exception()
    show_if_uncaught(error, FailureMessage(failure, True, []))
    lines = printed(error, capsys)
    assert lines[1:] == failure.traceback.splitlines()


def test_the_last_line_names_the_file_to_resume_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = raised()
    found = ["runs/a.ckpt"]
    show_if_uncaught(error, FailureMessage(own_failure(error), True, [], found.pop))
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
    show_if_uncaught(error, FailureMessage(own_failure(error), False, []))
    other = KeyError("another")
    assert printed(other, capsys) == ["KeyError: 'another'"]
    other.__context__ = error  # raised while the program handled the failure
    lines = printed(other, capsys)
    assert lines[0].startswith("The job failed: rank 1")
    assert lines[-1] == "KeyError: 'another'"


def test_a_hook_of_the_users_own_stays(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def users(*args: object) -> None:
        print("the user's", file=sys.stderr)

    for is_users in (True, False):
        monkeypatch.setattr(sys, "excepthook", as_torch_does(users if is_users else sys.__excepthook__))
        for _ in range(2):  # a second failure finds the hook of the first one
            error = raised()
            show_if_uncaught(error, FailureMessage(own_failure(error), True, []))
        lines = printed(error, capsys)
        assert (lines == ["the user's"]) == is_users
        assert lines[0].startswith("The job failed") == (not is_users), "without torch's '[rank1]:' in each line"


def as_torch_does(old_hook: Hook) -> Hook:
    """The hook of ``torch.distributed.init_process_group``."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        old_hook(kind, error, trace)

    hook.__module__ = "torch.distributed.distributed_c10d"
    return hook


def test_an_exception_that_a_program_catches_can_be_sent_to_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    """The function that finds the checkpoint went with it, which pickle refuses."""
    error = raised()
    show_if_uncaught(error, FailureMessage(own_failure(error), True, WAITED, checkpoint=lambda: "last.ckpt"))
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), sent.args) == (ValueError, ("spoilt",))
    assert printed(sent, capsys)[-1] == "ValueError: spoilt"


SIGTERM_BEFORE_THE_MESSAGE = """
import os, signal, sys
from tests.job.test_uncaught_errors import FailureMessage, own_failure, raised, show_if_uncaught
from lightning_multigpu.job.uncaught_errors import give_sigterm_back
error = raised()
show_if_uncaught(error, FailureMessage(own_failure(error), False, []))
if sys.argv[1] == "new run":
    give_sigterm_back()
if sys.argv[1] == "while it is shown":
    write = sys.stderr.write
    sys.stderr.write = lambda text: (os.kill(os.getpid(), signal.SIGTERM), write(text))
if sys.argv[1] in ("shown", "while it is shown"):
    sys.excepthook(type(error), error, None)
if sys.argv[1] == "caught":
    del error
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("occasion", "times"), [("on the way", 1), ("while it is shown", 1), ("shown", 1), ("new run", 0), ("caught", 0)]
)
def test_a_launcher_that_ends_the_rank_first_does_not_hide_the_message(occasion: str, times: int) -> None:
    command = [sys.executable, "-c", SIGTERM_BEFORE_THE_MESSAGE, occasion]
    ended = preforked.run(command, timeout=60)
    assert ended.returncode == -signal.SIGTERM
    assert ended.stderr.count("The job failed: rank 1") == times
