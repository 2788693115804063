"""The Python stacks of a rank, taken without its cooperation, and the most useful line of a stack.

In each rank the interpreter's fault handler answers a real-time signal: it writes the stacks of all threads to a file
in memory that the guardian holds too. The handler is C code and needs no interpreter lock, so that it also answers
within a collective, and within a C function that holds the lock; a stopped process answers when it is resumed.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import NamedTuple

from lightning_multigpu.job.guardian.proc import STOPPED, WatchedProcess

_C10D = "torch/distributed/distributed_c10d.py"
# Python files of torch whose innermost call waits for other ranks.
_WAITS_IN_C = (
    _C10D,
    *(f"torch/distributed/{name}.py" for name in ("rendezvous", "utils", "_functional_collectives", "nn/functional")),
    "torch/nn/parallel/distributed.py",
)
_WRAPPERS = ("torch/distributed/c10d_logger.py", "/contextlib.py", "torch/utils/_contextlib.py")
_TORCH = re.compile(r"/(site|dist)-packages/(torch|lightning_utilities)/|/torch/(nn|autograd|distributed|optim|utils)/")
_LIGHTNING = re.compile(
    r"/(site|dist)-packages/(lightning|torchmetrics)/|/lightning/(pytorch|fabric)/|/lightning_multigpu/|/lightning-multigpu$"
)
_STANDARD = re.compile(r"/lib/python3[^/]*/(?!site-packages|dist-packages)|^<(frozen|string)")
PYTHON = "Python"
_TRAINER = re.compile(r"/lightning/pytorch/trainer/")


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """ "my_module.py:42 in training_step", with a part of the path."""
        return f"{_short(self.file)}:{self.line} in {self.function}"

    @property
    def is_users(self) -> bool:
        """True if the file is neither a library that this pack knows nor Python's own."""
        return not self.library and not self.file.startswith("<string")  # of dataclasses

    @property
    def library(self) -> str:
        """The library of the file, PYTHON for Python's own, empty for the user's code and other packages."""
        if _TORCH.search(self.file):
            return "torch"
        if _LIGHTNING.search(self.file):
            is_own = _short(self.file).startswith("lightning_multigpu/") or self.file.endswith("/lightning-multigpu")
            return "lightning_multigpu" if is_own else "lightning"
        # Code of `python -c` is the user's.
        return PYTHON if _STANDARD.search(self.file) and not self.file.startswith("<string") else ""


class CollectiveCall(NamedTuple):
    """A collective that a stack shows."""

    operation: str
    place: str


def place(frames: Iterable[Frame]) -> str:
    """The most useful line of a stack (most recent call first).

    That is the user's innermost line within the training; without one, the innermost line of Lightning, torchmetrics or
    this pack; in a thread without either, the innermost line.
    """
    frames = list(frames)
    if not frames:
        return "unknown"
    outermost = max((index for index, frame in enumerate(frames) if _TRAINER.search(frame.file)), default=len(frames))
    inside = frames[: outermost + 1]
    users = next((frame for frame in inside if frame.is_users), None)
    if users is not None:
        return users.text
    return next((frame for frame in inside if _LIGHTNING.search(frame.file)), frames[0]).text


def collective_call(frames: Iterable[Frame]) -> CollectiveCall | None:
    """The collective in which a stack (most recent call first) ends, or None if it ends elsewhere.

    Its name is the outermost function of torch: ``broadcast_object_list`` rather than the ``broadcast`` within it.
    """
    frames = list(frames)
    if not frames or not frames[0].file.endswith((*_WAITS_IN_C, *_WRAPPERS)):
        return None
    depth = 0
    while depth < len(frames) and frames[depth].file.endswith((*_WAITS_IN_C, *_WRAPPERS)):
        depth += 1
    inner = [frame for frame in frames[:depth] if not frame.file.endswith(_WRAPPERS)]
    if not inner:
        return None
    named = [frame for frame in inner if frame.file.endswith(_C10D)] or inner
    return CollectiveCall(named[-1].function.lstrip("_"), place(frames[depth:]))


def place_of_frame(frame: FrameType) -> str:
    """:func:`place` of a thread of this process."""
    return place(_walk(frame))


def _walk(frame: FrameType | None) -> Iterator[Frame]:
    while frame is not None:
        yield Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def _short(path: str) -> str:
    """The path within its package or, elsewhere, its last two parts."""
    for root in ("/site-packages/", "/dist-packages/"):
        if root in path:
            return path.rpartition(root)[2]
    if "/lightning_multigpu/" in path:
        return "lightning_multigpu/" + path.rpartition("/lightning_multigpu/")[2]
    parts = path.split(os.sep)
    return os.sep.join(parts[-2:]) if len(parts) > 2 else path


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-fA-F]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
# The handler writes the main thread last; its outermost frame is a module or, under `python -m`, runpy's function. In
# other programs a pause marks the end, although on a busy machine pauses come in the middle too.
_LAST_LINES = (b" in <module>\n", b" in _run_module_as_main\n")
_LAST_BYTES = max(map(len, _LAST_LINES))
_SETTLED_S = 0.25
_MAX_DUMP_BYTES = 1 << 20


class Stacks(NamedTuple):
    """A rank's answer: the fault handler's text, or why there is none, and the main thread's innermost frames first."""

    text: str
    main: tuple[Frame, ...] = ()

    @property
    def place(self) -> str:
        """The most useful line of the main thread's stack."""
        return place(self.main) if self.main else self.text


def parse(text: str, main_thread: int) -> Stacks:
    """Reads a dump of ``faulthandler``; ``main_thread`` is the identity of the rank's main thread."""
    frames: list[Frame] = []
    is_main = False
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            is_main = int(thread[1], 16) == main_thread
        elif is_main and (frame := _FRAME.match(line)):
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
    return Stacks(text, tuple(frames))


class StackSignal(NamedTuple):
    """The signal that asks a rank for its stacks, and the file that it writes to."""

    number: int
    descriptor: int
    main_thread: int


_own: StackSignal | None = None
_own_process = 0


def answer_stack_signal() -> StackSignal | None:
    """Makes this process answer a signal with its stacks until its end; each call returns the same signal.

    None if no real-time signal is free. The handler stays: without it the signal would end the process.
    """
    global _own, _own_process
    if _own is not None and _own_process == os.getpid():
        if not _is_used(_own.number):  # Lightning's Trainer restores handlers that Python knows, and removes this one
            faulthandler.unregister(_own.number)  # it still counts as registered
            faulthandler.register(_own.number, file=_own.descriptor, all_threads=True)
        return _own
    number = next((n for n in range(signal.SIGRTMAX - 3, signal.SIGRTMIN, -1) if not _is_used(n)), None)
    if number is None:
        return None
    descriptor = os.memfd_create("rank-stacks")
    # The guardian empties the file before it asks: each answer is appended.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(number, file=descriptor, all_threads=True)
    _own, _own_process = StackSignal(number, descriptor, threading.main_thread().ident or 0), os.getpid()
    return _own


def _is_used(number: int) -> bool:
    return bool(_caught(os.getpid(), "SigCgt", "SigIgn") >> (number - 1) & 1)


def _caught(pid: int, *fields: str) -> int:
    """The signals that the process handles, as the kernel's bit mask."""
    mask = 0
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in fields:
                    mask |= int(value, 16)
    except (OSError, ValueError):
        return 0
    return mask


class Question:
    """Asks one rank for its stacks; ``how`` is None if it has registered no signal.

    The signal is sent only if, according to the kernel, the process handles it now: it would end a process that has
    replaced its program since it registered.
    """

    def __init__(self, process: WatchedProcess, how: StackSignal | None) -> None:
        self._how = how
        self._refusal = ""
        self._size, self._since_s = -1, time.monotonic()
        if process.state() == STOPPED:
            self._refusal = "it is stopped by a signal, and shows no stacks"
        elif how is None or not _caught(process.pid, "SigCgt") >> (how.number - 1) & 1:
            self._refusal = "it has registered no signal for its stacks"
        else:
            try:
                os.ftruncate(how.descriptor, 0)
                os.pread(how.descriptor, 1, 0)
                if not process.send_signal(how.number):
                    self._refusal = "its process has ended"
            except OSError as error:
                self._refusal = f"its stacks cannot be asked for: {error}"

    def is_answered(self) -> bool:
        """True if the answer is complete, or there will be none."""
        if self._refusal:
            return True
        assert self._how is not None
        size = os.fstat(self._how.descriptor).st_size
        if size != self._size:
            self._size, self._since_s = size, time.monotonic()
        if os.pread(self._how.descriptor, _LAST_BYTES, max(0, size - _LAST_BYTES)).endswith(_LAST_LINES):
            return True
        return size > 0 and time.monotonic() - self._since_s >= _SETTLED_S and bool(self.answer().main)

    def answer(self) -> Stacks:
        """The answer so far."""
        text = ""
        if not self._refusal:
            assert self._how is not None
            text = os.pread(self._how.descriptor, _MAX_DUMP_BYTES, 0).decode(errors="replace").strip()
            if text:
                return parse(text, self._how.main_thread)
        return Stacks(self._refusal or "it does not answer")
