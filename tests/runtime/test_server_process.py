"""A parameter server as a new interpreter; those of training runs in the tests are forked."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lightning_multigpu.runtime.server_process import ServerProcess


def test_a_server_listens_and_ends_with_the_process_that_has_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch.py in the working folder, of another user perhaps, was imported in the place of torch."""
    for name in ("torch", "json", "lightning_multigpu"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger ran')")
    monkeypatch.chdir(tmp_path)
    server = ServerProcess("127.0.0.1", bytes(range(32)), num_threads=1)
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=30).close()
        assert server._process.stdin is not None
        server._process.stdin.close()
        assert server._process.wait(30) == 1
    finally:
        server.close()
