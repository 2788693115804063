"""A parameter server as a new interpreter; those of training runs in the tests are forked."""

import pickle
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.engine.parameter_server.server import Job
from lightning_multigpu.job.server_process import ServerProcess


def test_a_server_joins_and_ends_with_the_process_that_has_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch.py in the working folder, of another user perhaps, was imported in the place of torch.

    A server that the kernel had killed had "ended with exit status -9".
    """
    for name in ("torch", "json", "lightning_multigpu"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger ran')")
    monkeypatch.chdir(tmp_path)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("servers/job", pickle.dumps(Job("servers", "127.0.0.1", 1, 1, 30.0, 30.0)))
    server = ServerProcess("127.0.0.1", store.port, "servers", 0, num_threads=1)
    try:
        store.wait(["servers/server 0"], timedelta(seconds=60))
        server.check()
        assert server._process.stdin is not None
        server._process.stdin.close()
        server._process.wait(30)
        with pytest.raises(RuntimeError, match=r"a parameter server \(pid \d+\) ended with exit status 1; what it pr"):
            server.check()
        server._process = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE)
        server._process.kill()
        server._process.wait(30)
        with pytest.raises(RuntimeError, match="was ended by SIGKILL"):
            server.check()
    finally:
        server.close()
