"""Network namespaces without names: each is held by a process, and goes with the process that made it."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

# The file is put where it can be written to for a moment: in this mount namespace nobody else sees it. At the end of
# standard input, which also comes when the owner is killed, everything that runs in the namespace is killed.
_HOLD = """
set -e
ip link set lo up
mount -t tmpfs tmpfs /sys
printf %s "$0" > /sys/hosts
mount --bind /sys/hosts /etc/hosts
umount /sys
mount -t sysfs sysfs /sys
echo ready
set +e
read -r end
found=yes
while [ "$found" ]; do
    found=
    for process in /proc/[0-9]*; do
        [ "$process" != /proc/$$ ] && [ "$process/ns/net" -ef /proc/$$/ns/net ] || continue
        kill -KILL "${process#/proc/}" && found=yes
    done
    [ -z "$found" ] || sleep 0.02
done
"""
_END_TIMEOUT_S = 5.0
_UNSHARE = ("unshare", "--user", "--map-root-user")


class HostsUnavailable(RuntimeError):  # noqa: N818 - a state of the machine more than an error of the caller
    """This machine cannot make namespaces; the message says why, and what would help."""


class Namespace:
    """A network and a mount namespace, with the loopback up and an /etc/hosts of its own.

    The kernel removes it with the last of its processes: when it is closed, or when this process has ended, however.

    Raises:
        HostsUnavailable: the process that holds it cannot be started.
    """

    def __init__(self, hosts_file: str) -> None:
        pipe = subprocess.PIPE
        command = ["unshare", "--net", "--mount", "sh", "-c", _HOLD, hosts_file]
        with starting("`unshare`"):
            # In a session of its own: Ctrl-C in the terminal must not end it before the commands on the host.
            self._holder = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
            )
        self.pid = self._holder.pid

    def wait_until_ready(self) -> None:
        """Returns when commands can be run in it; raises :class:`HostsUnavailable` with the kernel's reason."""
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, reason = self._holder.communicate()
            raise HostsUnavailable(f"`unshare --net --mount` failed: {reason.strip()}")

    def run(self, *command: str, given: str | None = None) -> str:
        """What a program of this machine prints, run on its network; :class:`HostsUnavailable` if it fails."""
        shown = f"`{' '.join(command)}`"
        with starting(shown):
            enter = ["nsenter", "--target", str(self.pid), "--net"]
            done = subprocess.run([*enter, *command], input=given, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise HostsUnavailable(f"{shown} failed: {done.stderr.strip() or f'exit {done.returncode}'}")
        return done.stdout

    def command(self, command: Sequence[str], directory: str | os.PathLike[str] | None) -> list[str]:
        """The command that runs ``command`` in the namespace as the same process, in the directory (None: this one)."""
        in_directory = f'cd {shlex.quote(os.fspath(directory or Path.cwd()))} && exec "$@"'
        enter = ["nsenter", "--target", str(self.pid), "--net", "--mount"]
        return [*enter, "sh", "-c", in_directory, "sh", *command]

    def end(self) -> None:
        """Has everything in it killed; does not wait."""
        assert self._holder.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, and may have been collected
            self._holder.stdin.write("end\n")
            self._holder.stdin.flush()

    def wait(self) -> None:
        """Waits until it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._holder.communicate(timeout=_END_TIMEOUT_S)
        self._holder.kill()
        self._holder.communicate()


def check_available() -> None:
    """Raises :class:`HostsUnavailable` with the reason, where namespaces cannot be made."""
    _check_programs(ip="iproute2", tc="iproute2", mount="util-linux", nsenter="util-linux", unshare="util-linux")
    if os.geteuid() != 0:
        raise HostsUnavailable(
            f"network namespaces need root, this process runs as user {os.geteuid()}: run it with sudo, or under "
            "`lightning-multigpu emulate`, which needs no root where the kernel has user namespaces"
        )


def become_root_of_a_user_namespace(command: Sequence[str]) -> NoReturn:
    """Goes on as the command, which sees itself as user 0; :class:`HostsUnavailable` if this user may not."""
    _check_programs(unshare="util-linux")
    with starting("`unshare`"):
        tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise HostsUnavailable(
            f"user {os.geteuid()} may not make user namespaces ({tried.stderr.strip() or f'exit {tried.returncode}'}): "
            "run it with sudo, or have an administrator allow them (sysctl kernel.unprivileged_userns_clone=1, "
            "user.max_user_namespaces above 0, kernel.apparmor_restrict_unprivileged_userns=0, where they exist)"
        )
    os.execvp(_UNSHARE[0], [*_UNSHARE, *command])


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Raises :class:`HostsUnavailable` with the reason, where the system refuses the process that the block starts."""
    try:
        yield
    except OSError as error:
        raise HostsUnavailable(f"{what} cannot be started: {error}") from error


def _check_programs(**package_of: str) -> None:
    if sys.platform != "linux":
        raise HostsUnavailable(f"network namespaces exist on Linux only, this is {sys.platform}")
    for program, package in package_of.items():
        if shutil.which(program) is None:
            raise HostsUnavailable(f"{program!r} is not on PATH: install {package} (Debian: apt-get install {package})")
