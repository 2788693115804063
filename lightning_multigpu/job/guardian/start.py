"""The start of a host's guardian."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from lightning_multigpu.job.guardian.hang.flight_recorder import PAGE_BYTES
from lightning_multigpu.job.guardian.proc import refusal
from lightning_multigpu.job.guardian.protocol import Connection

ADDRESS = "LIGHTNING_MULTIGPU_GUARDIAN"
SECRET = "LIGHTNING_MULTIGPU_GUARDIAN_SECRET"

_SHORTEST_TIMEOUT_S = 1.0
_START_TIMEOUT_S = 30.0
_BACKLOG = 256


class GuardianError(RuntimeError):
    """The guardian cannot be started, reached or trusted."""


class AddressTakenError(GuardianError):
    """Another process listens at the guardian's address."""


class Guardian:
    """The guardian of this host, in the process that has started it. See :meth:`start`.

    Attributes:
        pid: the guardian's pid.
        environment: the variables by which ranks find it.
    """

    def __init__(self, pid: int, environment: dict[str, str], link: socket.socket) -> None:
        self.pid = pid
        self.environment = environment
        self._link = Connection(link)

    @classmethod
    def start(
        cls,
        *,
        num_ranks: int,
        failure_timeout_s: float = 15.0,
        join_timeout_s: float = 600.0,
        hang_report_s: float | None = None,
        directory: str | os.PathLike[str] | None = None,
        address: str | None = None,
    ) -> Guardian:
        """Starts the guardian, and sets the environment variables by which ranks that are started later find it.

        The guardian ends when all ranks have left.

        Args:
            num_ranks: ranks on this host.
            failure_timeout_s: seconds after a failure in which all ranks have to end, 1 or more; a rank has failed when
                it has been stopped for half of that.
            join_timeout_s: seconds after the start in which the last rank has to connect.
            hang_report_s: seconds that a rank may wait in a collective before a report names the missing ranks, 1 or
                more; None for no report.
            directory: the directory of files about a failure or a hang, or None for no file.
            address: the address for ranks that do not inherit the environment; the guardian then takes all processes
                of this user and PID namespace. None for a random name, and a secret that ranks inherit.

        Raises:
            ValueError: a number is out of its range.
            AddressTakenError: another process listens at ``address``.
            GuardianError: there is no interpreter to run it with, or it does not start.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks}: a guardian needs 1 rank or more to watch")
        _check_seconds(failure_timeout_s=failure_timeout_s, join_timeout_s=join_timeout_s, hang_report_s=hang_report_s)
        secret = os.urandom(32).hex() if address is None else None
        # An abstract address is no file: the kernel removes it with the last socket.
        address = address or f"lightning-multigpu-guardian-{os.urandom(8).hex()}"
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(_listening_at(address))
            pages = os.memfd_create("guardian-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            stack.callback(os.close, pages)
            os.ftruncate(pages, PAGE_BYTES * num_ranks)
            # If a rank could shorten it, SIGBUS would end the guardian and the other ranks.
            fcntl.fcntl(pages, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            own, theirs = socket.socketpair()
            stack.enter_context(theirs)
            settings: dict[str, object] = {
                "num_ranks": num_ranks,
                "failure_timeout_s": failure_timeout_s,
                "join_timeout_s": join_timeout_s,
                "directory": None if directory is None else os.path.abspath(directory),
                "owner_pid": os.getpid(),
                "secret": secret,
                "listener": listener.fileno(),
                "owner_link": theirs.fileno(),
                "pages": pages,
                "hang_report_s": hang_report_s,
            }
            try:
                pid = _run(settings, (listener.fileno(), theirs.fileno(), pages))
            except GuardianError:
                own.close()
                raise
        environment = {ADDRESS: address, **({} if secret is None else {SECRET: secret})}
        os.environ.update(environment)
        return cls(pid, environment, own)

    def started(self, rank: int, pid: int) -> None:
        """Reports that the process ``pid`` was started as ``rank``: it is watched before it connects."""
        self._link.send("started", rank=rank, pid=pid)

    def ended(self, rank: int, exit_code: int) -> None:
        """Reports a child's exit status (``Popen.returncode``); kernels before 6.15 give it to the parent only."""
        self._link.send("ended", rank=rank, exit_code=exit_code)

    def shows(self) -> None:
        """Reports that this process is no rank and gets the ranks' failure: the guardian stays until :meth:`stop`."""
        self._link.send("shows")

    def raises(self) -> None:
        """As :meth:`GuardianClient.raises`."""
        self._link.send("raises")

    def show(self, advice: str) -> bool:
        """As :meth:`GuardianClient.show`; returns when it has been shown."""
        self._link.send("show", advice=advice)
        while not self._link.closed and select.select([self._link], [], [], _START_TIMEOUT_S)[0]:
            if any(message["kind"] == "shown" for message in self._link.receive()):
                return True
        return False

    def stop(self) -> None:
        """Closes the connection: the guardian ends when no rank is at work, even if not all ranks have connected.

        Ranks that are started from now on do not look for it.
        """
        self._link.send("stop")
        self._link.close()
        self.withdraw()

    def kill(self) -> None:
        """Kills it without a message: not all ranks could be started, and the started ones are being ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._link.close()
        self.withdraw()

    def withdraw(self) -> None:
        """Removes the environment variables once the ranks have been started: no other process may use them."""
        for name, value in self.environment.items():
            if os.environ.get(name) == value:
                del os.environ[name]


def _check_seconds(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not value >= _SHORTEST_TIMEOUT_S:
            raise ValueError(f"{name}={value:g}: it must be {_SHORTEST_TIMEOUT_S:g} s or more")


def _listening_at(address: str) -> socket.socket:
    """A listening UNIX socket with an abstract address; raises AddressTakenError if there is one."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise AddressTakenError(f"another guardian of this job is there already, at {address}") from error
    return listener


def _run(settings: dict[str, object], descriptors: tuple[int, ...]) -> int:
    """Runs the interpreter; returns the guardian's pid once it has detached."""
    if not sys.executable:
        raise GuardianError("sys.executable is empty, and the guardian needs a Python interpreter; set sys.executable")
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("__main__.py"))]
    try:
        started = subprocess.run(
            command,
            input=json.dumps(settings) + "\n",
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=descriptors,
            timeout=_START_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = refusal(error)
        raise GuardianError(f"the guardian does not start: {error}{hint and '; '}{hint}") from error
    if started.returncode != 0 or not started.stdout.strip().isdigit():
        why = started.stdout.strip() or f"{' '.join(command)} ended with {started.returncode}"
        raise GuardianError(f"the guardian does not start: {why}")
    return int(started.stdout)
