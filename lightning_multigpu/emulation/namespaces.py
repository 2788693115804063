"""Sets of network namespaces, deleted with all of their processes, also after a crash of their owner."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_multigpu.job.guardian.proc import refusal

_PREFIX = "lmg"
_LOCKS = Path("/run/lightning-multigpu")
# Not /etc/netns, which `ip netns exec` shows as /etc: the root of a user namespace cannot write there.
_FILES = _LOCKS / "etc"
_MOUNT_AND_RUN = 'mount --bind "$0" /etc/hosts && exec "$@"'
_END_TIMEOUT_S = 5.0
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class HostsUnavailable(RuntimeError):  # noqa: N818 - a state of the machine more than an error of the caller
    """This machine cannot make namespaces; the message says why, and what would help."""


class NamespaceSet:
    """Namespaces that belong together, with names that no other process uses.

    The owner holds a lock while it lives. Whoever can take the lock of a set knows that its owner is gone, however it
    ended and whatever process ids mean there: that is how :func:`remove_leftovers` tells a dead set from a running one.

    Raises:
        HostsUnavailable: see :func:`check_available`.
    """

    def __init__(self) -> None:
        check_available()
        _LOCKS.mkdir(mode=0o755, exist_ok=True)
        self.token = secrets.token_hex(4)
        self.names: list[str] = []
        self._owner = os.getpid()
        self._lock: int | None = _create_locked(_lock_path(self.token))

    def add(self, label: str, *, hosts_file: str | None = None) -> str:
        """Makes the namespace ``label`` of this set, with its loopback up, and returns its full name.

        Args:
            label: unique within the set.
            hosts_file: content of /etc/hosts for processes of :func:`command_in`, in place of the machine's own.
        """
        name = f"{_PREFIX}-{self.token}-{label}"
        self.names.append(name)  # before it is there: an interrupt may come when ``ip`` has made it
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        if hosts_file is not None:
            _FILES.mkdir(mode=0o755, exist_ok=True)
            (_FILES / name).write_text(hosts_file)
        return name

    def delete(self) -> None:
        """Ends all processes in the namespaces and deletes the namespaces; afterwards nothing of the set is left.

        In a process that was forked from the owner it does nothing.

        Raises:
            HostsUnavailable: one could not be deleted; :func:`remove_leftovers` of a later process tries it again.
        """
        if os.getpid() != self._owner:
            return
        failures, left = [], []
        while self.names:
            try:
                _delete(self.names[-1])
            except HostsUnavailable as error:
                failures.append(error)
                left.append(self.names[-1])
            self.names.pop()
        self.names = left
        if self._lock is not None:
            if not left:
                _lock_path(self.token).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None
        if failures:
            raise failures[0]


def check_available() -> None:
    """Raises :class:`HostsUnavailable` with the reason, where namespaces cannot be made."""
    if sys.platform != "linux":
        raise HostsUnavailable(f"network namespaces exist on Linux only, this is {sys.platform}")
    if os.geteuid() != 0:
        raise HostsUnavailable(
            f"network namespaces need root, this process runs as user {os.geteuid()}: run it with sudo, or under "
            "`lightning-multigpu emulate`, which needs no root where the kernel has user namespaces"
        )
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("mount", "util-linux")):
        if shutil.which(program) is None:
            raise HostsUnavailable(f"{program!r} is not on PATH: install {package} (Debian: apt-get install {package})")


def ip(*arguments: str) -> str:
    """Runs ``ip`` and returns its output; raises :class:`HostsUnavailable` with the kernel's reason."""
    return _command("ip", *arguments)


def ip_batch(namespace: str, commands: Sequence[str]) -> None:
    """Runs many commands of ``ip`` within a namespace, by one process."""
    _command("ip", "-n", namespace, "-batch", "-", given="".join(f"{command}\n" for command in commands))


def ip_json(*arguments: str) -> Any:
    """Runs ``ip -json`` and returns the document."""
    return json.loads(ip("-json", *arguments) or "[]")


def tc(*arguments: str) -> str:
    """Runs ``tc`` in the way of :func:`ip`."""
    return _command("tc", *arguments)


def existing() -> list[str]:
    """Names of all namespaces on this machine that were made by :class:`NamespaceSet`, by whichever process."""
    return sorted(entry["name"] for entry in ip_json("netns", "list") if entry["name"].startswith(f"{_PREFIX}-"))


def remove_leftovers() -> list[str]:
    """Deletes namespaces that their owner could not delete (killed, power cut); returns their names.

    Those that cannot be deleted stay for the next call.
    """
    removed = []
    for lock in sorted(_LOCKS.glob("*.lock")) if _LOCKS.is_dir() else ():
        descriptor = _take_lock(lock)
        if descriptor is None:
            continue
        try:
            names = [name for name in existing() if name.startswith(f"{_PREFIX}-{lock.stem}-")]
            for name in names:
                with contextlib.suppress(HostsUnavailable):
                    _delete(name)
                    removed.append(name)
            if set(names) <= set(removed):
                lock.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
    return removed


def command_in(name: str, command: Sequence[str]) -> list[str]:
    """The command that runs ``command`` in the namespace, as the same process."""
    # `ip netns exec` has given the process mounts of its own, so that nobody else sees this one.
    file = _FILES / name
    with_hosts = ["sh", "-c", _MOUNT_AND_RUN, str(file), *command] if file.exists() else command
    return ["ip", "netns", "exec", name, *with_hosts]


def end_with_parent() -> None:
    """In a child before its program starts: the kernel kills it when the thread that has started it has ended."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def processes_in(name: str) -> list[int]:
    """Ids of the processes that run in the namespace."""
    return [int(pid) for pid in ip("netns", "pids", name).split()]


def _delete(name: str) -> None:
    """A namespace lives on, nameless, as long as a process is in it: they are ended first."""
    (_FILES / name).unlink(missing_ok=True)
    if name not in existing():
        return
    deadline = time.monotonic() + _END_TIMEOUT_S
    with contextlib.suppress(HostsUnavailable):  # half made, it can be deleted and not be entered
        while (pids := processes_in(name)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
    ip("netns", "delete", name)


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Raises :class:`HostsUnavailable` with the reason, where the system refuses the process that the block starts."""
    try:
        yield
    except OSError as error:
        hint = refusal(error)
        raise HostsUnavailable(f"{what} cannot be started: {error}{hint and '; '}{hint}") from error


def _command(*command: str, given: str | None = None) -> str:
    with starting(f"`{' '.join(command)}`"):
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostsUnavailable(f"`{' '.join(command)}` failed: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout


def _lock_path(token: str) -> Path:
    return _LOCKS / f"{token}.lock"


def _create_locked(path: Path) -> int:
    """Locks the file under another name first: under its own name it is never seen without its owner's lock."""
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    temporary.rename(path)
    return descriptor


def _take_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None where another process holds it or the file has gone."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
