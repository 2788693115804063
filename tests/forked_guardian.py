"""Guardians of the ranks of a test world are forked from a process that has imported the guardian's modules.

An interpreter for a guardian takes 40 ms of processor time, more than many a test of two ranks, and each run of a
``Trainer`` starts one. The server is an interpreter as a guardian has (``-I -S``); guardians that other processes start
are new interpreters.
"""

from __future__ import annotations

import gc
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from typing import Any

_MAX_MESSAGE_BYTES = 100_000
_NAMES = ("listener", "owner_link", "pages")  # descriptors among the settings of a guardian


def fork_guardians() -> None:
    """Starts the server; from here on this process forks its guardians."""
    from lightning_multigpu.job.guardian import start

    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    main = os.path.join(os.path.dirname(start.__file__), "__main__.py")
    command = [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), main]
    with theirs:
        subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def run(settings: dict[str, Any], descriptors: tuple[int, ...]) -> int:
        assert set(descriptors) == {settings[name] for name in _NAMES}
        socket.send_fds(channel, [json.dumps(settings).encode()], [*(settings[name] for name in _NAMES), 2])
        return int(channel.recv(64))

    start._run = run


def _serve(channel: socket.socket, main: str) -> None:
    guardian = runpy.run_path(main)
    for number in guardian["_IGNORED"]:  # those to the process group of the rank
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    while True:
        message, descriptors, *_ = socket.recv_fds(channel, _MAX_MESSAGE_BYTES, 8)
        if not message:
            return
        if os.fork() == 0:
            *of_settings, errors = descriptors
            os.dup2(errors, 2)
            os.close(errors)
            settings = {**json.loads(message), **dict(zip(_NAMES, of_settings, strict=True))}
            sys.stdin = io.StringIO(json.dumps(settings) + "\n")
            sys.stdout = os.fdopen(os.dup(channel.fileno()), "w")
            channel.close()
            try:
                guardian["main"]()  # forks the guardian, and ends this process
            finally:
                os._exit(0)
        os.wait()
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
