"""The processes of one command on every emulated host."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from lightning_multigpu.emulation.emulated_hosts import EmulatedHosts, Host
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
        self._hosts = hosts
        self._processes: list[subprocess.Popen[str]] = []
        self._printers: list[threading.Thread] = []
        try:
            for host in hosts:
                with starting(f"the command on {host.name}"):
                    self._start(host, command, {**env, **host.environment()})
        except BaseException:
            self._kill()
            raise

    def wait(self, *, patience_s: float = _PATIENCE_S) -> int:
        """Waits for the end of all of them.

        Args:
            patience_s: how long the others may go on after one has failed; what is left then is killed.

        Returns:
            0 if all have ended well, else the exit status of the first that failed, as a shell reports it.
        """
        first, deadline = 0, float("inf")
        while True:
            codes = [process.poll() for process in self._processes]
            failed = [code for code in codes if code]
            if failed and not first:
                first, deadline = failed[0], time.monotonic() + patience_s
            if None not in codes:
                break
            if time.monotonic() > deadline:
                left = [f"host{node_rank}" for node_rank, code in enumerate(codes) if code is None]
                print(f"{', '.join(left)}: not ended {patience_s:g} s after another host, killed", file=sys.stderr)
                self._kill()
            time.sleep(_POLL_S)
        for printer in self._printers:
            printer.join(timeout=5)
        return first if first >= 0 else 128 - first

    def send_signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def __enter__(self) -> HostsJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def _start(self, host: Host, command: Sequence[str], variables: Mapping[str, str]) -> None:
        if host.node_rank == 0:
            self._processes.append(host.popen(command, env=variables))
            return
        process = host.popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._processes.append(process)
        self._print(process.stdout, sys.stdout, host.name)
        self._print(process.stderr, sys.stderr, host.name)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _print(self, source: IO[str] | None, target: IO[str], name: str) -> None:
        def copy() -> None:
            assert source is not None
            with source, contextlib.suppress(ValueError, OSError):
                for line in source:
                    target.write(f"[{name}] {line}")
                    target.flush()

        self._printers.append(threading.Thread(target=copy, name=f"output-of-{name}", daemon=True))
        self._printers[-1].start()
