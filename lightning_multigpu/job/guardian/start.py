"""The start of a host's guardian, and its address.

torchrun, srun or a shell start each rank separately, so that no rank inherits variables of another one. Such ranks and
their guardian meet at a UNIX address that is computed from the job. The kernel knows the user of each process:
only processes of the same user trust each other.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from lightning_multigpu.job.guardian.hang.flight_recorder import PAGE_BYTES
from lightning_multigpu.job.guardian.protocol import Connection, foreign

ADDRESS = "LIGHTNING_MULTIGPU_GUARDIAN"

_START_TIMEOUT_S = 30.0
_BACKLOG = 256
_POLL_S = 0.1
# Variables that differ between jobs of a scheduler, or restarts of a job, at the same address and port.
_JOB_VARIABLES = (
    *(f"TORCHELASTIC_{name}" for name in ("RUN_ID", "RESTART_COUNT")),
    *(f"SLURM_{name}" for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")),
)


class GuardianError(RuntimeError):
    """The guardian cannot be started, reached or trusted."""


class Guardian:
    """The guardian of this host, in the process that has started it, with its UNIX address. See :meth:`start`."""

    def __init__(self, pid: int, address: str, link: socket.socket) -> None:
        self.pid = pid
        self.address = address
        self._link = Connection(link)

    @classmethod
    def start(
        cls,
        *,
        num_ranks: int,
        failure_timeout_s: float = 15.0,
        hang_report_s: float | None = None,
        address: str | None = None,
    ) -> Guardian:
        """Starts the guardian; with a random address also sets the variable by which ranks that start later find it.

        The guardian ends when all ranks have left. That of a job that has just failed may still run at the same
        address: it has ``failure_timeout_s`` to end.

        Args:
            num_ranks: ranks on this host.
            failure_timeout_s: seconds after a failure in which all ranks have to end, 1 or more.
            hang_report_s: seconds that a rank may wait in a collective before a report, 1 or more; None for no report.
            address: the address for ranks that do not inherit the environment; None for a random one.

        Raises:
            GuardianError: it does not start, another guardian at ``address`` does not end, or a process of another user
                or container has taken the address.
        """
        is_random = address is None
        # An abstract address is no file: the kernel removes it with the last socket.
        address = address or f"lightning-multigpu-guardian-{os.urandom(8).hex()}"
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(_listening_at(address, failure_timeout_s + 1))
            pages = os.memfd_create("guardian-pages")
            stack.callback(os.close, pages)
            os.ftruncate(pages, PAGE_BYTES * num_ranks)
            own, theirs = socket.socketpair()
            stack.enter_context(theirs)
            settings = {"num_ranks": num_ranks, "owner_pid": os.getpid()}
            limits = {"failure_timeout_s": failure_timeout_s, "hang_report_s": hang_report_s}
            descriptors = {"listener": listener.fileno(), "owner_link": theirs.fileno(), "pages": pages}
            try:
                pid = _run({**settings, **limits, **descriptors}, tuple(descriptors.values()))
            except GuardianError:
                own.close()
                raise
        if is_random:
            os.environ[ADDRESS] = address
        return cls(pid, address, own)

    def started(self, rank: int, pid: int) -> None:
        """Reports that the process ``pid`` was started as ``rank``: it is watched before it connects."""
        self._link.send("started", rank=rank, pid=pid)

    def ended(self, rank: int, exit_code: int) -> None:
        """Reports a child's exit status (``Popen.returncode``); kernels before 6.15 give it to the parent only."""
        self._link.send("ended", rank=rank, exit_code=exit_code)

    def has_printed(self) -> bool:
        """Waits until the guardian of ranks that have failed and ended has printed why; False if it does not."""
        while not self._link.closed and select.select([self._link.socket], [], [], _START_TIMEOUT_S)[0]:
            if any(message["kind"] == "printed" for message in self._link.arriving()):
                return True
        return False

    def stop(self) -> None:
        """Closes the connection: the guardian ends when no rank is at work, even if not all ranks have connected."""
        self._link.close()
        if os.environ.get(ADDRESS) == self.address:
            del os.environ[ADDRESS]

    def kill(self) -> None:
        """Kills it without a message: not all ranks could be started, and the started ones are being ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.stop()


def _listening_at(address: str, patience_s: float) -> socket.socket:
    """A listening UNIX socket with an abstract address, once an earlier one is gone; raises as Guardian.start."""
    until_s = time.monotonic() + patience_s
    while True:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind("\0" + address)
            listener.listen(_BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
            sock.settimeout(1)
            sock.connect("\0" + address)
            if why := foreign(sock):
                raise GuardianError(f"the guardian's address belongs to {why}; choose another MASTER_PORT")
        if time.monotonic() > until_s:
            raise GuardianError(f"another guardian of this job is there already, at {address}")
        time.sleep(_POLL_S)


def _run(settings: dict[str, object], descriptors: tuple[int, ...]) -> int:
    """Runs the guardian; returns its pid once it has left this process."""
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
        raise GuardianError(f"the guardian does not start: {error}") from error
    if started.returncode != 0:
        raise GuardianError(f"the guardian does not start: {' '.join(command)} ended with {started.returncode}")
    return int(started.stdout)


def address_of_job(
    main_address: str, main_port: int, *, node_rank: int, attempt: int, variables: Mapping[str, str]
) -> str:
    """The address of a host's guardian; equal for the ranks of the job on one host, and only for them.

    ``attempt`` is how often the processes have joined at the main address before; ``variables`` the environment.
    """
    job = [variables.get(name, "") for name in _JOB_VARIABLES]
    parts = [str(os.getuid()), main_address, str(main_port), str(node_rank), str(attempt), *job]
    return f"lightning-multigpu-job-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}"
