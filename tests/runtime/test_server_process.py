"""A parameter server as a new interpreter; those of training runs in the tests are forked."""

from __future__ import annotations

import socket

from lightning_multigpu.runtime.server_process import ServerProcess


def test_a_server_listens_and_ends_with_the_process_that_has_started_it() -> None:
    server = ServerProcess("127.0.0.1", bytes(range(32)), num_threads=1)
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=30).close()
        assert server._process.stdin is not None
        server._process.stdin.close()
        assert server._process.wait(30) == 1
    finally:
        server.close()
