"""Every kind of leftover is seen, named, and put back where that can be done; threads are in test_world.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.leaks import ProcessState, leaks_since


@contextlib.contextmanager
def left(kind: str) -> Iterator[None]:
    """What a test may leave behind; what nobody can put back is taken away at the end of the block."""
    with contextlib.ExitStack() as stack:
        if kind == "variable":
            os.environ["LEFT"] = "1"
        elif kind == "handler":
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        elif kind == "child":
            process = stack.enter_context(subprocess.Popen(["sleep", "60"]))
            stack.callback(process.kill)
        else:
            stack.callback(os.close, os.open("/etc/passwd", os.O_RDONLY))
        yield


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("variable", "environment: LEFT='1' was added"),
        ("handler", "signal SIGUSR1: handler is now"),
        ("child", "child process"),
        ("file", "is open: /etc/passwd"),
    ],
)
def test_each_kind_is_seen_once_and_can_be_put_back(kind: str, text: str) -> None:
    before = ProcessState.take()
    with left(kind):
        (leak,) = leaks_since(before, patience_s=0)
        assert text in leak
    before.restore()
    assert leaks_since(before) == []
