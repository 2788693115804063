"""Commands run as root of a user namespace, so that they may make network namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from lightning_multigpu.emulation.namespaces import HostsUnavailable, end_with_parent, starting

# Process ids of its own: when the first process in there ends, the kernel ends all others. Mounts of its own: `ip
# netns` needs a /run that it may write to.
_UNSHARE = (
    *("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c", 'mount -t tmpfs tmpfs /run && exec "$@"', "sh"),
)


def check_rootless() -> None:
    """Checks that this user may make user namespaces.

    Raises:
        HostsUnavailable: with the kernel's reason and the fix.
    """
    if sys.platform != "linux":
        raise HostsUnavailable(f"network namespaces exist on Linux only, this is {sys.platform}")
    if shutil.which("unshare") is None:
        raise HostsUnavailable("'unshare' is not on PATH: install util-linux (Debian: apt-get install util-linux)")
    with starting("`unshare`"):
        tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise HostsUnavailable(
            f"user {os.geteuid()} may not make user namespaces ({tried.stderr.strip() or f'exit {tried.returncode}'}): "
            "run it with sudo, or have an administrator allow them (sysctl kernel.unprivileged_userns_clone=1, "
            "user.max_user_namespaces above 0, kernel.apparmor_restrict_unprivileged_userns=0, where they exist)"
        )


def run_rootless(command: Sequence[str]) -> int:
    """Runs the command there; its files belong to this user, and it sees itself as user 0.

    SIGTERM is handed on to the command; SIGINT reaches it from the terminal as it reaches this process.

    Returns:
        The exit status, as a shell reports it.
    """
    with starting("`unshare`"):
        process = subprocess.Popen([*_UNSHARE, *command], preexec_fn=end_with_parent)

    def hand_on(number: int, frame: FrameType | None) -> None:
        for child in _children(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    before = signal.signal(signal.SIGTERM, hand_on)
    interrupt_before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt_before)
    return code if code >= 0 else 128 - code


def _children(pid: int) -> list[int]:
    """``unshare`` itself waits with its signals blocked; its child is the command."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
