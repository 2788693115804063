"""Python processes that have imported Lightning before they start: children of the tests, forked from a server.

An import of this package takes seconds of processor time, and the tests start hundreds of processes. The server has
imported all that they share and does nothing else, so that it has one thread and its forks are like new processes:
they have the arguments, environment, directory and descriptors that they were asked for, also where others look
(``/proc/PID/environ``), they are collected by :class:`Process` like any child, and they end as Python ends.

::

    tests  -- command, environment, descriptors -->  server
      |                                                | forks a helper, which forks the process and exits
      +------------- waits for, signals -----------> process: its parent is now the tests' process

Each process brings a server of its own, a fork of the first one, which answers its ``subprocess.Popen`` of a Python
command and the spawning and the fork server of ``multiprocessing``: ranks and parameter servers are its children.
"""

import ctypes
import fcntl
import gc
import importlib
import itertools
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.leaks import OWN_PROCESSES

REPOSITORY = Path(__file__).resolve().parents[1]
_MAX_MESSAGE_BYTES = 150_000  # what a local socket takes at once
_MAX_DESCRIPTORS = 32
_OWN_DESCRIPTORS = 500  # from this number on
_START_TIMEOUT_S = 180.0
_COMMAND_BYTES = 2048  # room in /proc/PID/cmdline
_ENVIRONMENT_BYTES = 32768  # room in /proc/PID/environ
_PADDING = "TESTS_ENVIRONMENT_PADDING"
_PR_SET_CHILD_SUBREAPER = 36
PLAIN = "TESTS_WITHOUT_FORKS"
"""With this variable processes are new interpreters: for kernels that do not have what a fork here needs."""


@dataclass(frozen=True)
class _Request:
    command: list[str]
    environment: dict[str, str]
    directory: str
    parent: int
    new_session: bool
    process_group: int
    own_terminal: bool
    namespace: int | None
    descriptors: tuple[int, ...] = field(default=())  # their numbers in the process


class Process(subprocess.Popen[Any]):
    """``Popen`` for a command that starts with ``sys.executable`` and ``-m``, ``-c`` or the path of a script.

    Standard input can be its own terminal; its network and mounts are those of the process ``namespace``.
    """

    def __init__(
        self, command: Sequence[str], *, own_terminal: bool = False, namespace: int | None = None, **options: Any
    ) -> None:
        assert command[0] == sys.executable, command
        self._place = {"own_terminal": own_terminal, "namespace": namespace}
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:
        if PLAIN in os.environ:
            super()._execute_child(*given)  # type: ignore[misc]
        else:
            _fork_instead(self, self._place, *given)


def _fork_instead(
    process: Any, place: Mapping[str, Any], args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any,
    cwd: Any, env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int,
    c2pwrite: int, errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any,
    start_new_session: bool, process_group: int,
) -> None:  # fmt: skip
    """``Popen._execute_child`` by a fork."""
    assert preexec_fn is None, "the process is not forked from this one"
    streams = [number if given == -1 else given for number, given in enumerate((p2cread, c2pwrite, errwrite))]
    groups = {"new_session": start_new_session, "process_group": process_group}
    process.pid = _fork(args, streams, pass_fds, env=env, cwd=cwd, **groups, **place)
    process._child_created = True
    process._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _fork(command: Any, streams: Sequence[int], others: Sequence[int], *, env: Any, cwd: Any, **place: Any) -> int:
    request = _Request(
        command=[os.fsdecode(argument) for argument in command],
        environment={**(os.environ if env is None else env)},
        directory=str(cwd or Path.cwd()),
        parent=os.getpid(),
        descriptors=(0, 1, 2, *others),
        **place,
    )
    return _server().fork(request, [*streams, *others])


def spawn(path: Any, args: Any, descriptors: Any, namespace: int | None = None) -> int:
    """``multiprocessing.util.spawnv_passfds`` by a fork."""
    place = {"new_session": False, "process_group": -1, "own_terminal": False, "namespace": namespace}
    return _fork(args, (0, 1, 2), descriptors, env=None, cwd=None, **place)


def works() -> bool:
    """Whether this kernel has what a fork needs; tries one."""
    try:
        return run([sys.executable, "-c", "pass"], timeout=_START_TIMEOUT_S).returncode == 0
    except (OSError, ValueError, subprocess.SubprocessError):
        return False


def run(
    command: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with captured text; the process is killed when it has not ended after ``timeout`` seconds."""
    pipe = subprocess.PIPE
    with Process(command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class _Server:
    """The process that others are forked from; it ends when the other end of its socket is closed."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._socket.settimeout(_START_TIMEOUT_S)
        self._lock = threading.Lock()
        self._set_subreaper = ctypes.CDLL(None, use_errno=True).prctl

    def fork(self, request: _Request, descriptors: list[int]) -> int:
        with self._lock:
            # The process becomes a child of this one, not of init, when the helper between them has gone.
            self._set_subreaper(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [pickle.dumps(request)], descriptors)
                return int(self._socket.recv(64))
            finally:
                self._set_subreaper(_PR_SET_CHILD_SUBREAPER, 0)

    def close(self) -> None:
        self._socket.close()


class _FirstServer(_Server):
    """The server of the tests, a new interpreter that imports what all share."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", _PADDING: "x" * _ENVIRONMENT_BYTES}
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import {__name__} as p; p.run_main(p.served({theirs.fileno()}))",
                    "x" * _COMMAND_BYTES,
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd=REPOSITORY,
            )
        OWN_PROCESSES.add(self._process.pid)
        super().__init__(ours)

    def close(self) -> None:
        super().close()
        self._process.wait()
        OWN_PROCESSES.discard(self._process.pid)


_running: list[_Server] = []
_start = threading.Lock()


def _server() -> _Server:
    with _start:
        if not _running:
            _running.append(_FirstServer())
        return _running[0]


def close() -> None:
    """Ends the server."""
    while _running:
        _running.pop().close()


def _serve(channel: socket.socket) -> tuple[_Request, list[int]]:
    """Answers requests until nobody can ask any more. Returns in each forked process."""
    while True:
        message, descriptors, *_ = socket.recv_fds(channel, _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        request: _Request = pickle.loads(message)
        helper = os.fork()
        if helper == 0:
            process = os.fork()
            if process:
                os._exit(0)
            _await_parent(request.parent)
            if request.new_session:
                os.setsid()
            if request.process_group >= 0:
                os.setpgid(0, request.process_group)
            channel.send(str(os.getpid()).encode())
            channel.close()
            return request, descriptors
        os.waitpid(helper, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _parts(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of the interpreter that a fork can follow, and what it runs."""
    flags = list(itertools.takewhile(("-B", "-P", "-u").__contains__, command[1:]))
    return flags, list(command[1 + len(flags) :])


def _await_parent(parent: int) -> None:
    deadline = time.monotonic() + 10
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0002)


def _with_own_server(request: _Request, descriptors: list[int]) -> tuple[_Request, list[int]]:
    """Forks a server for the processes that this one will start. Returns in each of them, too."""
    while True:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            # Beyond the numbers that descriptors get which the process inherits.
            number = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, _OWN_DESCRIPTORS)
            ours.close()
            _running.append(_Server(socket.socket(fileno=number)))
            _fork_what_is_started(request.namespace)
            return request, descriptors
        ours.close()
        for descriptor in descriptors:
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # those to the job's process group
        request, descriptors = _serve(theirs)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


def _fork_what_is_started(namespace: int | None) -> None:
    """Has ``subprocess`` and ``multiprocessing`` fork in place of starting an interpreter, in this process only."""
    own_pid, executes, spawns = os.getpid(), subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds
    place = {"own_terminal": False, "namespace": namespace}

    def is_forked(command: Any) -> bool:
        if isinstance(command, str) or os.fsdecode(command[0]) != sys.executable:
            return False
        _, what = _parts(command)
        if not what or (what[0].startswith("-") and what[0] not in ("-m", "-c")):
            return False
        return os.getpid() == own_pid

    def execute_child(process: Any, args: Any, executable: Any, preexec_fn: Any, *given: Any) -> None:
        if preexec_fn is None and is_forked(args):
            _fork_instead(process, place, args, executable, preexec_fn, *given)
        else:
            executes(process, args, executable, preexec_fn, *given)

    def spawnv_passfds(path: Any, args: Any, descriptors: Any) -> int:
        if is_forked(args) and any(name in _parts(args)[1][1] for name in ("spawn_main", "forkserver")):
            return spawn(path, args, descriptors, namespace)
        return spawns(path, args, descriptors)

    subprocess.Popen._execute_child = execute_child  # type: ignore[method-assign]
    multiprocessing.util.spawnv_passfds = spawnv_passfds


def _become(request: _Request, descriptors: list[int]) -> None:
    """Makes this fork what an interpreter is that has just been started with the request's command."""
    assert max(request.descriptors) < _OWN_DESCRIPTORS
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _OWN_DESCRIPTORS) for descriptor in descriptors]
    for source, target in zip(moved, request.descriptors, strict=True):
        os.dup2(source, target)
    for descriptor in {*descriptors, *moved} - set(request.descriptors):
        os.close(descriptor)
    if request.own_terminal:
        os.close(os.open(os.ttyname(0), os.O_RDWR))
    if request.namespace is not None:
        _enter(request.namespace)
    os.chdir(request.directory)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    _set_environment(request.environment)
    unbuffered = "PYTHONUNBUFFERED" in request.environment or "-u" in _parts(request.command)[0]
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.reconfigure(line_buffering=unbuffered or number == 2 or os.isatty(number))
    own = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, own), *(path for path in sys.path[1:] if path not in inherited)]
    sys.orig_argv = list(request.command)
    _show("\0".join(request.command).encode()[:_COMMAND_BYTES], 45)
    _reset_modules()


def _set_environment(environment: dict[str, str]) -> None:
    """Also in the memory that the kernel shows as ``/proc/PID/environ``, which finds a job's processes by a mark."""
    os.environ.clear()  # nobody reads the old strings any more
    os.environ.update(environment)
    _show(b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items()), 47)


def _show(block: bytes, field: int) -> None:
    """Writes what the kernel shows of the memory whose start and end are in /proc/self/stat from ``field`` on."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[field : field + 2])
    assert len(block) < end - start, f"{len(block)} bytes have no room"
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


def _reset_modules() -> None:
    """What modules have made of the server's environment, or of its random state, when they were imported."""
    import tempfile

    import numpy as np
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only
    from torchmetrics.utilities import prints

    tempfile.tempdir = None
    np.random.seed()
    rank_zero_only.rank = _get_rank() or 0
    prints.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", 0))


def _enter(pid: int) -> None:
    """What ``nsenter --net --mount`` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "mnt")]
    for descriptor in opened:
        if libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
        os.close(descriptor)


def run_main(command: Sequence[str]) -> None:
    """Runs the command as this process's ``__main__``."""
    flags, arguments = _parts(command)
    is_safe = "-P" in flags
    # multiprocessing's name for it too, under which exceptions of spawned processes come back.
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy._run_module_as_main(arguments[1])
        return
    if arguments[0] == "-c":
        sys.path[:0] = [""] * (not is_safe)
        sys.argv = ["-c", *arguments[2:]]
        text, name = arguments[1], "<string>"
    else:
        assert not arguments[0].startswith("-"), arguments
        sys.path[:0] = [str(Path(arguments[0]).resolve().parent)] * (not is_safe)
        sys.argv = arguments
        text, name = Path(arguments[0]).read_text(), arguments[0]
        main.__file__ = name
    exec(compile(text, name, "exec"), main.__dict__)


_SHARED = (
    # Nothing that reads its environment at import: that would be the server's.
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning_multigpu.callbacks",
    "lightning_multigpu.registry",
    "sklearn.datasets",  # of the digits
    "torch.distributed.run",
    "torch.utils.tensorboard",
)


def served(file_descriptor: int) -> list[str]:
    """Is the server; returns in each process that is asked for, with its command."""
    channel = socket.socket(fileno=file_descriptor)
    for name in _SHARED:
        importlib.import_module(name)
    assert threading.active_count() == 1
    # When Python has ended, torch would take all its operators down, for 0.2 s: the process exits before that.
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    gc.collect()
    gc.freeze()  # what is imported now is not garbage, and is shared by all forks
    request, descriptors = _with_own_server(*_serve(channel))
    _become(request, descriptors)
    return request.command
