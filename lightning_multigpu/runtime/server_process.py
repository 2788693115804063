"""Processes of parameter servers, which a rank starts and ends."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys

from lightning_multigpu.guardian.workers import SERVER

# With -P, and this process's path on standard input: -m would put the working folder before all other folders.
_CODE = (
    "import json, sys; settings = json.loads(sys.stdin.readline()); sys.path[:] = settings.pop('path'); "
    f"from {SERVER} import main; main(**settings)"
)
_START_S = 120.0
_END_S = 5.0


class ServerProcess:
    """A parameter server on this host: a child of this process, which ends with it.

    The constructor starts it; :attr:`port` waits until it listens.

    Args:
        host: the address of this host at which it listens.
        secret: the secret of the job.
        num_threads: its threads for averages and updates.
    """

    def __init__(self, host: str, secret: bytes, *, num_threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        settings = {"host": host, "secret": secret.hex(), "num_threads": num_threads, "path": sys.path}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # port raises if it has ended
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def port(self) -> int:
        """The port at which it listens.

        Raises:
            RuntimeError: it has ended, or says nothing.
        """
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            status = (
                f"has ended with exit status {self._process.wait()}" if ready else f"says nothing in {_START_S:g} s"
            )
            raise RuntimeError(f"a parameter server (pid {self._process.pid}) {status}; what it printed is above")
        return int(json.loads(line)["port"])

    def close(self) -> None:
        """Waits for its end, when all workers have left; kills it if that takes long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
