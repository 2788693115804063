"""Malformed messages of ranks that have introduced themselves, and of hosts that have sent the secret.

The guardian's loop runs in this process, so that any exception that would end it is seen. Each kind of message comes
whole, without a field, with a field of a wrong type, huge, negative, NaN or nested; cut, repeated and in any order;
from ranks also with file descriptors of a wrong kind, or with a page of wrong rows in the shared memory.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lightning_multigpu.job.guardian.failure import Failure
from lightning_multigpu.job.guardian.hang.flight_recorder import AWAITED, PAGE_BYTES, Entry, FlightRecorder
from lightning_multigpu.job.guardian.hang.stacks import Frame, Stacks
from lightning_multigpu.job.guardian.hang.waiting_graph import View
from lightning_multigpu.job.guardian.proc import clock_s
from lightning_multigpu.job.guardian.protocol import encode
from lightning_multigpu.job.guardian.watchdog import Watchdog
from lightning_multigpu.job.guardian.workers import remove_temporary

_SECRET = os.urandom(32).hex()
_LONGEST_STEP_S = 5.0
_MAX_TURNS = 50
_FAILURE = Failure("raised ValueError: x", 0, "h", 1, 2, "Traceback", "ValueError", "x").to_message()
_ENTRY = Entry("data", "0-1", 2, AWAITED, 3, 3, "all_reduce", 8, 9.0, 7, "")
_VIEW = View(0, "h", 1, 2, (_ENTRY,), Stacks("dump", (Frame("train.py", 4, "f"),)), 7).to_message()

OF_RANKS: dict[str, dict[str, Any]] = {
    "begin": {"run": 2, "failure_timeout_s": 5.0, "hang_report_s": None},
    "rest": {"run": 1},
    "leave": {"run": 1},
    "at end": {},
    "joining": {"limit_s": 600.0},
    "joined": {},
    "temporary": {"directory": "pymp-x"},
    "directory": {"directory": "d", "node_rank": 0},
    "counts interrupts": {},
    "interrupted": {"number": 1},
    "failed": {"failure": _FAILURE},
    "raises": {},
    "show": {"advice": "Resume with ckpt_path='last.ckpt'"},
    "stacks": {"number": 60, "main_thread": 7},
    "listen": {"num_nodes": 2, "secret": _SECRET},
    "join": {"node_rank": 1, "secret": _SECRET},
    "hello": {"secret": "", "rank": 0},
}
OF_HOSTS: dict[str, dict[str, Any]] = {
    "alive": {"paused": False},
    "begin": {"run": 2},
    "failure": {"failure": _FAILURE, "age_s": 0.5},
    "at end": {},
    "all at end": {},
    "end now": {},
    "done": {},
    "waiting": {"waits": {"0: all_reduce #3 of group data": 5.0}},
    "look": {},
    "view": {"view": _VIEW},
    "next": {},
    "seen": {},
    "waited": {"lines": ["rank 0 waited in all_reduce #3 of group data for 9.0 s"]},
    "welcome": {"host": "h"},
    "refused": {"why": "x"},
}
_DEEP = "deep in here"
_ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 99, 1 << 40, -(1 << 70), 10**300, 10**4000, 1e308, math.inf, -math.inf, math.nan),
    *("", "0", "\0", "\ud800", "pymp-\0", "pymp-\ud800", "0-99999999999", "0-9:0", "5-", "é" * 40_000, "a" * 120_000),
    *([], {}, [[]], [1, "x"], {"rank": "1"}, [[0, "h", "127.0.0.1", 70_000]], [[2, "h", 5, "x"]], [_DEEP]),
)  # fmt: skip


class Misspeaker:
    """A generator of messages that a trusted peer must not send, the same ones for the same seed."""

    def __init__(self, seed: int, kinds: dict[str, dict[str, Any]]) -> None:
        self.random = random.Random(seed)
        self._kinds = kinds

    def line(self, kind: str | None = None) -> bytes:
        """One message, without its end."""
        choice = self.random
        kind = kind or choice.choice(list(self._kinds))
        message: dict[str, Any] = {"kind": kind, **copy.deepcopy(self._kinds[kind])}
        places = [place for place in _places(message) if place[1] != "kind"]
        if places and choice.random() < 0.8:
            container, key = choice.choice(places)
            if choice.random() < 0.2:
                del container[key]
            else:
                container[key] = copy.copy(choice.choice(_ODD))
        depth = choice.choice((10, 900, 940, 970, 5_000))
        text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
        return text.replace(f'"{_DEEP}"', "[" * depth + "]" * depth).encode("utf-8", "surrogatepass")

    def cut(self, line: bytes) -> bytes:
        """Sometimes cut, or altered in one bit."""
        how, at = self.random.randrange(20), self.random.randrange(len(line))
        if how == 0:
            return line[:at]
        return line[:at] + bytes([line[at] ^ 1 << self.random.randrange(8)]) + line[at + 1 :] if how == 1 else line

    def order(self, lines: list[bytes]) -> list[bytes]:
        """Sometimes another order, or one line twice."""
        how = self.random.randrange(4)
        if how == 0:
            self.random.shuffle(lines)
        elif how == 1:
            lines.insert(0, self.random.choice(lines))
        return lines


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


class Guarded:
    """A guardian whose loop a test turns."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.address = f"lightning-multigpu-fuzz-{os.urandom(8).hex()}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + self.address)
        listener.listen(8)
        self.owner, theirs = socket.socketpair()
        self._stack.callback(self.owner.close)
        self.pages = os.memfd_create("pages")
        self._stack.callback(os.close, self.pages)
        os.ftruncate(self.pages, PAGE_BYTES)
        settings = {
            "num_ranks": 1, "failure_timeout_s": 600.0, "join_timeout_s": 600.0, "directory": None,
            "owner_pid": os.getpid(), "secret": _SECRET, "listener": listener.detach(),
            "owner_link": theirs.detach(), "pages": self.pages, "hang_report_s": 1.0,
        }  # fmt: skip
        self.watchdog = Watchdog(settings)
        self.watchdog._tick_s = 0.0
        self.longest_s = 0.0

    @property
    def has_failed(self) -> bool:
        return self.watchdog._shutdown is not None

    def turn(self) -> None:
        """What :meth:`Watchdog.run` does, once."""
        since_s = time.monotonic()
        self.watchdog._serve()
        self.watchdog._now_s = clock_s()
        self.watchdog._observe()
        self.longest_s = max(self.longest_s, time.monotonic() - since_s)

    def end(self) -> None:
        """What a guardian does after a failure, but for ending processes; then gives everything back."""
        watchdog = self.watchdog
        watchdog._hosts.close()
        if watchdog._shutdown is not None:
            watchdog._shutdown.write(watchdog._file(), watchdog._ranks)
            watchdog._shutdown.show(watchdog._ranks, is_first=True)
        for rank in watchdog._ranks:
            remove_temporary(rank.temporary or "")
            rank.process.close()
        for connection in (*watchdog._connections, *watchdog._strangers, watchdog._owner_link):
            connection.close()
        for how in watchdog._hang_watch.signals.values():
            os.close(how.descriptor)
        watchdog._owner.close()
        watchdog._listener.close()
        watchdog._selector.close()
        watchdog._pages.close()
        self._stack.close()


def ranks(number: int, seed: int) -> str:
    """Sends so many messages as a rank that has introduced itself; returns what is wrong, or nothing."""
    fuzzer = Misspeaker(seed, OF_RANKS)
    sent, longest_s = 0, 0.0

    def send_all() -> None:
        nonlocal sent, longest_s
        guarded = Guarded()
        while sent < number:
            if guarded.has_failed or guarded.watchdog._hosts._peers or fuzzer.random.random() < 0.01:
                guarded.end()
                guarded = Guarded()
            with _as_rank(guarded) as sock:
                if fuzzer.random.random() < 0.1:
                    _misuse_page(guarded.pages, fuzzer.random)
                for line in fuzzer.order([fuzzer.cut(fuzzer.line()) for _ in range(fuzzer.random.choice((1, 3, 8)))]):
                    with contextlib.suppress(OSError):  # the guardian has closed it, or does not read so fast
                        _send_with_descriptors(sock, line + b"\n", fuzzer.random)
                    sent += 1
                    if fuzzer.random.random() < 0.5:
                        guarded.turn()
                guarded.turn()
            longest_s = max(longest_s, guarded.longest_s)
        guarded.end()

    return _problem_of(send_all) or _too_slow(longest_s)


@contextlib.contextmanager
def _as_rank(guarded: Guarded) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        sock.connect("\0" + guarded.address)
        sock.send(encode("hello", secret=_SECRET, rank=0))
        guarded.turn()
        guarded.turn()
        data, descriptors, _, _ = socket.recv_fds(sock, 1_000, 1)
        for descriptor in descriptors:
            os.close(descriptor)
        if not data.startswith(b'{"kind":"welcome"'):
            raise ValueError(f"a rank is not welcome: {data!r}")
        yield sock


def _send_with_descriptors(sock: socket.socket, line: bytes, choice: random.Random) -> None:
    with contextlib.ExitStack() as stack:
        descriptors = []
        if choice.random() < 0.3:
            for _ in range(choice.choice((1, 1, 3))):
                descriptors.append(_descriptor(choice))
                stack.callback(os.close, descriptors[-1])
        socket.send_fds(sock, [line], descriptors, socket.MSG_NOSIGNAL)


def _descriptor(choice: random.Random) -> int:
    how = choice.randrange(6)
    if how == 0:
        reader, writer = os.pipe()
        os.close(choice.choice((reader, writer)))
        return next(end for end in (reader, writer) if os.path.exists(f"/proc/self/fd/{end}"))
    if how == 1:
        return os.memfd_create("other")
    if how == 2:
        return os.open(os.devnull, os.O_RDONLY)
    if how == 3:
        return os.open("/", os.O_RDONLY)
    if how == 4:
        return socket.socket(choice.choice((socket.AF_UNIX, socket.AF_INET)), socket.SOCK_DGRAM).detach()
    return socket.create_server(("127.0.0.1", 0)).detach()


def _misuse_page(pages: int, choice: random.Random) -> None:
    """Rows that are whole, with members that nobody can have, or bytes that are no rows."""
    memory = bytearray(PAGE_BYTES)
    recorder = FlightRecorder(memory, 0)
    odd = [value for value in _ODD if isinstance(value, str)]
    for _ in range(3):
        group, members = choice.choice(odd).replace("\ud800", "?"), choice.choice(odd).replace("\ud800", "?")
        recorder.began(
            "all_reduce", group=group, ranks=members, group_size=choice.choice((0, -1, 1 << 40)), size_bytes=-1
        )
    if choice.random() < 0.3:
        memory = bytearray(choice.randbytes(PAGE_BYTES))
    os.pwrite(pages, memory, 0)


def hosts(number: int, seed: int) -> str:
    """Sends so many messages as another host, as often to node 0 as in node 0's place."""
    fuzzer, sent, longest_s = Misspeaker(seed, OF_HOSTS), 0, 0.0

    def send_all() -> None:
        nonlocal sent, longest_s
        while sent < number:
            guarded = Guarded()
            try:
                with (_as_host if fuzzer.random.random() < 0.5 else _as_node_0)(guarded, fuzzer) as sock:
                    sent += _speak(guarded, fuzzer, sock)
                longest_s = max(longest_s, guarded.longest_s)
            finally:
                guarded.end()

    return _problem_of(send_all) or _too_slow(longest_s)


def _speak(guarded: Guarded, fuzzer: Misspeaker, sock: socket.socket) -> int:
    choice = fuzzer.random
    if choice.random() < 0.2:
        guarded.watchdog._fail(Failure("x"), clock_s())  # what ranks have waited in is heard from then on
    lines = fuzzer.order([fuzzer.line() for _ in range(choice.choice((1, 3, 8)))])
    if choice.random() < 0.5:  # a report of a hang, up to its end
        good = [encode("waiting", **OF_HOSTS["waiting"])[:-1]]
        lines = [*good, *(fuzzer.line("view") for _ in range(3)), encode("seen")[:-1], *good]
    sent = 0
    for line in lines:
        for message in [fuzzer.cut(line)] * (2 if choice.random() < 0.02 else 1):
            with contextlib.suppress(OSError):
                sock.send(message + b"\n", socket.MSG_NOSIGNAL)
            sent += 1
        guarded.turn()
    for _ in range(3):
        guarded.turn()
    return sent


@contextlib.contextmanager
def _as_host(guarded: Guarded, fuzzer: Misspeaker) -> Iterator[socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    where = listener.getsockname()
    guarded.watchdog._hosts.listen(listener, num_nodes=3, secret=_SECRET, now_s=clock_s())
    with socket.create_connection(where) as sock:
        sock.send(encode("hello", secret=_SECRET, node_rank=1, host=fuzzer.random.choice(("h", "é" * 300))))
        if b'"welcome"' not in _line_from(sock, guarded):
            raise ValueError("a host is not welcome")
        yield sock


@contextlib.contextmanager
def _as_node_0(guarded: Guarded, fuzzer: Misspeaker) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        guarded.watchdog._hosts.join(theirs, node_rank=1, secret=_SECRET, now_s=clock_s(), on_met=lambda: None)
        sock, _ = listener.accept()
        with sock:
            sock.send(fuzzer.line("welcome") + b"\n")
            guarded.turn()
            yield sock


def _line_from(sock: socket.socket, guarded: Guarded) -> bytes:
    sock.settimeout(0.001)
    for _ in range(_MAX_TURNS):
        guarded.turn()
        with contextlib.suppress(TimeoutError):
            return sock.recv(1 << 16)
    raise TimeoutError("the guardian does not answer")


def _too_slow(longest_s: float) -> str:
    return f"the guardian took {longest_s:.1f} s for a message" if longest_s > _LONGEST_STEP_S else ""


def _problem_of(send_all: Callable[[], None]) -> str:
    """Runs it in a directory of its own, with nothing shown; exceptions of the guardian's threads count too."""
    problems: list[str] = []
    hook, threading.excepthook = threading.excepthook, lambda given: problems.append(repr(given.exc_value))
    terminal = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        before = len(os.listdir("/proc/self/fd"))
        with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
            try:
                send_all()
            except Exception as error:
                trace, places = error.__traceback__, []
                while trace is not None:
                    places.append(f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}")
                    trace = trace.tb_next
                problems.append(f"{type(error).__name__}: {error!s:.200} ({' '.join(places[-6:])})")
        left = len(os.listdir("/proc/self/fd")) - before
        if left > 0:
            problems.append(f"{left} descriptors are left open")
    finally:
        threading.excepthook = hook
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nowhere)
    return "; ".join(problems[:3])
