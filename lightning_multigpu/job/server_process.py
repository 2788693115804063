"""Processes of parameter servers, which a rank starts and ends."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

from lightning_multigpu.job.guardian.proc import ended_text

# With -P, and this process's path on standard input: -m would put the working folder before all other folders.
_CODE = (
    "import json, sys; settings = json.loads(sys.stdin.readline()); sys.path[:] = settings.pop('path'); "
    "from lightning_multigpu.engine.parameter_server.server import main; main(**settings)"
)
_END_S = 5.0


class ServerProcess:
    """Parameter server ``number`` of job ``name`` in the store at ``host``: a child, which ends with this process."""

    def __init__(self, host: str, port: int, name: str, number: int, *, num_threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE], stdin=subprocess.PIPE, start_new_session=True
        )
        settings = {"host": host, "port": port, "name": name, "number": number, "num_threads": num_threads}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # check raises if it has ended
            self._process.stdin.write(json.dumps({**settings, "path": sys.path}).encode() + b"\n")
            self._process.stdin.flush()

    def check(self) -> None:
        """Raises RuntimeError if it has ended."""
        if (status := self._process.poll()) is not None:
            raise RuntimeError(
                f"a parameter server (pid {self._process.pid}) {ended_text(status)}; what it printed is above"
            )

    def close(self) -> None:
        """Waits for its end, when all workers have left; kills it if that takes long."""
        assert self._process.stdin is not None
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
