"""What happens to a rank, its host or its whole job from outside; each function is called in the rank that it is about.

Processes of the job are those that have the rank's ``JOB_MARK`` in their environment. A host is a network namespace of
:class:`~lightning_multigpu.emulation.EmulatedHosts`; ``SWITCH`` is the process that
holds that of its switch, ``HOSTS`` those of the hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pdb
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

_MARK = "FAULT_JOB_MARK"
_GUARDIAN = os.path.join("guardian", "__main__.py")

# How long a control lasts; more than the job's failure_timeout_s.
CONTROL_S = float(os.environ.get("CONTROL_S", "7"))


# Faults


def cut() -> None:
    """The host's interface goes down."""
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


def drop() -> None:
    """The switch forwards nothing from or to this host any more: nobody is told."""
    port = f"port{os.environ['NODE_RANK']}"
    _ip(os.environ["SWITCH"], "link", "set", port, "nomaster")


def sever() -> None:
    """Nothing passes any more between this host and the one after it; both go on talking with the others."""
    node, next_node = int(os.environ["NODE_RANK"]), int(os.environ["NODE_RANK"]) + 1
    for here, there in ((node, next_node), (next_node, node)):
        nobody = f"10.77.0.{there + 1} lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
        _ip(os.environ["HOSTS"].split()[here], "neigh", "replace", *nobody.split())


def _ip(pid: str, *arguments: str) -> None:
    subprocess.run(["nsenter", "--target", pid, "--net", "ip", *arguments], check=True)


def vanish() -> None:
    """The host is gone with all its processes, and no connection of theirs is closed."""
    cut()
    for pid in [*_others_of_this_host(), os.getpid()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_guardian() -> None:
    others = [pid for pid in _others_of_this_host() if _GUARDIAN.encode() in _read(pid, "cmdline")]
    (guardian,) = [pid for pid in others if _is_of_job(pid, os.environ[_MARK])]
    os.kill(guardian, signal.SIGKILL)


# Controls


def slow() -> None:
    """The rank takes its time: a compiler, a slow disk, a slow loader."""
    time.sleep(CONTROL_S)


def hold() -> None:
    """The rank computes in C and holds the interpreter lock: no other thread of it can answer."""
    ctypes.PyDLL(None).usleep(int(1e6 * CONTROL_S))


def breakpoint_() -> None:
    """The rank waits for somebody to type into its debugger."""
    typist = subprocess.Popen(["sh", "-c", f"sleep {CONTROL_S}; echo c"], stdout=subprocess.PIPE, text=True)
    assert typist.stdout is not None
    debugger = pdb.Pdb(stdin=typist.stdout, stdout=sys.stderr, nosigint=True)
    debugger.set_trace()
    typist.communicate()
    sys.settrace(None)


def trace() -> None:
    """A debugger holds all threads of the rank."""
    _aside(_trace, os.getpid())


def pause() -> None:
    """All processes of the job stop, guardians included, and go on one after the other: a laptop's lid."""
    _aside(_pause, os.environ[_MARK])


def _aside(function: object, *arguments: object) -> None:
    """Calls it in a process that is not the job's."""
    name = getattr(function, "__name__", "")
    environment = {key: value for key, value in os.environ.items() if key != _MARK}
    code = f"from tests.launch import outside_faults; outside_faults.{name}(*{arguments!r})"
    subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)


def _pause(mark: str) -> None:
    pids = [pid for pid in _pids() if _is_of_job(pid, mark)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        random.shuffle(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(CONTROL_S)


def _trace(pid: int) -> None:
    attach, detach, all_children = 16, 17, 0x40000000  # PTRACE_ATTACH, PTRACE_DETACH, __WALL
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    held = []
    for thread in sorted(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()):
        if ptrace(attach, thread, None, None) == 0:
            os.waitpid(thread, all_children)
            held.append(thread)
    assert b" t " in _read(pid, "stat"), "the main thread is held"
    time.sleep(CONTROL_S)
    for thread in held:
        ptrace(detach, thread, None, None)


def _is_of_job(pid: int, mark: str) -> bool:
    return f"{_MARK}={mark}".encode() in _read(pid, "environ").split(b"\0")


def _others_of_this_host() -> list[int]:
    own = os.readlink("/proc/self/ns/net")
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and os.readlink(f"/proc/{pid}/ns/net") == own:
                found.append(pid)
    return found


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
