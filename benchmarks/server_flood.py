"""Training with a parameter server while strangers connect to it: step time, memory of the server.

    python -m benchmarks.server_flood [--connections 8000] [--rate 200]

Two ranks and a server are on this machine, first under sync_ps, then under async_ps. By turns strangers are silent,
send a byte now and then, or send random bytes; each stays for a second if the server lets it.

Step times are compared between windows with strangers at the server, and windows in which the same connections are made
to a listener that has nothing to do with the job: connecting takes processor time of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.guardian_flood import Strangers, compare, fit, windows_of
from benchmarks.guardian_fuzz import resident_kb
from benchmarks.heading import heading
from lightning_multigpu import ParameterServerStrategy
from lightning_multigpu.communication.job_secret import JOB_SECRET
from tests.guardian.job import eventually
from tests.world import free_port

_RANKS = 2
_NOISE_BYTES = 4_000
_END_S = 120.0


def train(directory: Path, mode: Any, server: str) -> None:
    """One rank."""
    fit(directory, devices=_RANKS, strategy=ParameterServerStrategy(mode=mode, servers=[server]))


def flood(directory: Path, mode: str, number: int, rate: float) -> int:
    """Prints the figures of one mode; returns 1 if the job has failed."""
    secret = {JOB_SECRET: os.urandom(32).hex()}
    with contextlib.ExitStack() as stack:
        serve = [sys.executable, "-m", "lightning_multigpu", "serve", "--port", "0", "--threads", "1"]
        server = subprocess.Popen(serve, env={**os.environ, **secret}, stdout=subprocess.PIPE, text=True)
        processes: list[subprocess.Popen[Any]] = [server]
        stack.callback(lambda: [process.kill() for process in processes if process.poll() is None])
        assert server.stdout is not None
        port = int(server.stdout.readline().split()[4].rstrip(","))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [
            sys.executable,
            "-m",
            "benchmarks.server_flood",
            "--train",
            str(directory),
            mode,
            f"127.0.0.1:{port}",
        ]
        for rank in range(_RANKS):
            processes.append(subprocess.Popen(command, env={**os.environ, **secret, **place, "LOCAL_RANK": str(rank)}))
        assert eventually(lambda: (directory / "warm0").exists(), _END_S), "the ranks do not train"
        idle = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=256))
        threading.Thread(target=_accept, args=(idle,), daemon=True).start()
        ports = {False: idle.getsockname()[1], True: port}
        strangers = Strangers(rate, os.urandom(_NOISE_BYTES))
        before_kb = resident_kb(server.pid)
        windows: list[tuple[bool, float, float]] = []
        num_windows, in_window = windows_of(number, rate)
        for _ in range(num_windows):
            for is_flood, at in ports.items():
                since_s = time.time()
                connect = lambda at=at: socket.create_connection(("127.0.0.1", at), 10)  # noqa: E731
                strangers.come(in_window, [connect], counted=is_flood)
                windows.append((is_flood, since_s, time.time()))
        growth_kb = resident_kb(server.pid) - before_kb
        (directory / "stop").touch()
        codes = [process.wait(_END_S) for process in processes]
        ended_s = json.loads((directory / "times").read_text()) if not any(codes) else []
    print(f"\n{mode}_ps")
    for kind, count in sorted(strangers.made.items()):
        print(f"{count:>7} connections: {kind}")
    print(f"exit statuses of the server and the ranks: {codes}; memory of the server: {growth_kb:+} KB")
    if any(codes):
        return 1
    compare(ended_s, windows, "the server")
    return 0


def _accept(listener: socket.socket) -> None:
    """Accepts and closes."""
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=8_000, help="to the server, in each mode")
    parser.add_argument("--rate", type=float, default=200.0, help="connections a second")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(Path(given.train[0]), *given.train[1:])
        return
    windows_of(given.connections, given.rate)
    print(f"# python -m benchmarks.server_flood {' '.join(sys.argv[1:])}".rstrip())
    print(heading(), flush=True)
    failed = 0
    for mode in ("sync", "async"):
        with tempfile.TemporaryDirectory() as directory:
            failed += flood(Path(directory), mode, given.connections, given.rate)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
