"""The processes of one command on every emulated host."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_multigpu.emulation.emulated_hosts import EmulatedHosts
from lightning_multigpu.emulation.namespaces import starting

_POLL_S = 0.1
_PATIENCE_S = 60.0


class HostsJob:
    """The processes of the command, one a host; a context manager that leaves none of them behind.

    Host 0 has this process's terminal. What the others print comes line by line, behind the name of the host.

    ``env`` are variables for all of them, beside those by which ranks find each other.

    Raises:
        HostsUnavailable: the system refuses one of the processes; those that were started are ended.
    """

    def __init__(self, hosts: EmulatedHosts, command: Sequence[str], *, env: Mapping[str, str]) -> None:
        self._processes: list[subprocess.Popen[Any]] = []
        self._printers: list[subprocess.Popen[bytes]] = []
        try:
            for host in hosts:
                output: dict[str, Any] = {}
                if host.node_rank:
                    # In a session of its own: Ctrl-C in the terminal must not end it before the command.
                    prefix = ["sed", "--unbuffered", f"s/^/[{host.name}] /"]
                    self._printers.append(subprocess.Popen(prefix, stdin=subprocess.PIPE, start_new_session=True))
                    to_printer = self._printers[-1].stdin
                    output = {"stdin": subprocess.DEVNULL, "stdout": to_printer, "stderr": subprocess.STDOUT}
                with starting(f"the command on {host.name}"), output.get("stdout") or contextlib.nullcontext():
                    self._processes.append(host.popen(command, env={**env, **host.environment()}, **output))
        except BaseException:
            self.__exit__()
            raise

    def wait(self, *, patience_s: float = _PATIENCE_S) -> int:
        """Waits for the end of all of them.

        Args:
            patience_s: how long the others may go on after one has failed; what is left then is killed.

        Returns:
            0 if all have ended well, else the exit status of the first that failed, as a shell reports it.
        """
        first, deadline_s = 0, float("inf")
        while None in (codes := [process.poll() for process in self._processes]):
            if not first and any(codes):
                first, deadline_s = next(filter(None, codes)), time.monotonic() + patience_s
            if time.monotonic() > deadline_s:
                left = [f"host{node_rank}" for node_rank, code in enumerate(codes) if code is None]
                print(f"{', '.join(left)}: not ended {patience_s:g} s after another host, killed", file=sys.stderr)
                self.__exit__()
            time.sleep(_POLL_S)
        for printer in self._printers:
            with contextlib.suppress(subprocess.TimeoutExpired):  # something on the host has its output still
                printer.wait(5)
        first = first or next(filter(None, codes), 0)
        return first if first >= 0 else 128 - first

    def send_signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def __enter__(self) -> HostsJob:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for printer in self._printers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                printer.wait(_POLL_S)
            printer.kill()
            printer.wait()
