"""Parameter servers that are started by hand."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_multigpu import ParameterServerStrategy
from lightning_multigpu.cli import main
from lightning_multigpu.job import failure_watch
from tests import preforked
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    eval_loader,
    fit_module,
    state,
    trained_weights,
)
from tests.world import World, free_port, rank

CASE = Case(optimizer="adamw", max_epochs=2, trainer={"gradient_clip_val": 0.3})
COMMAND = [sys.executable, "-m", "lightning_multigpu", "serve"]


@contextmanager
def serving(port: int) -> Iterator[preforked.Process]:
    """A server that looks for the job of a port."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    with preforked.Process(COMMAND, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"Waiting for the job at 127.0.0.1 port {port}\n"
            yield process
        finally:
            process.kill()


class OneMore(Callback):
    """Starts a server that the job does not need."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if rank() == 0:
            finished = preforked.run(COMMAND, timeout=30)
            assert "The job has failed: the job has its 2 servers already (num_servers)" in finished.stdout
            assert finished.returncode == 1


def fit(port: int) -> dict[str, Any]:
    os.environ["MASTER_PORT"] = str(port)
    module, strategy = (
        Classifier("adamw"),
        ParameterServerStrategy(servers="external", num_servers=2, join_timeout_s=20),
    )
    trainer = fit_module(module, strategy, 2, CASE, callbacks=[OneMore()])
    trainer.validate(module, eval_loader(), verbose=False)  # the servers have ended with the fit
    trainer.test(module, eval_loader(), verbose=False)
    return {"weights": state(module)}


@pytest.mark.launch
def test_workers_train_on_servers_that_wait_for_them(world2: World) -> None:
    port = free_port()
    with ExitStack() as stack:
        processes = [stack.enter_context(serving(port)) for _ in range(2)]
        reference = trained_weights(lambda: Classifier("adamw"), None, 1, CASE)
        for result in world2.run(fit, port):
            assert_same_weights(result, reference)
        printed = [process.communicate(timeout=30)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], printed
        assert sorted(printed) == [f"Serving as server {k} of 2\nThe job has ended\n" for k in range(2)]


class Interrupts(Callback):
    """Presses Ctrl-C where the server runs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if rank() == 0 and trainer.global_step == 1:
            os.kill(self.pid, signal.SIGINT)


@pytest.mark.launch
def test_a_server_that_is_interrupted_tells_the_workers(world2: World) -> None:

    def work(port: int, server_pid: int) -> None:
        os.environ["MASTER_PORT"] = str(port)
        strategy = ParameterServerStrategy(servers="external", join_timeout_s=20)
        with mock.patch.object(failure_watch, "_SETTLE_S", 0.5):  # for a rank that knows the cause
            fit_module(Classifier(), strategy, 2, CASE, max_epochs=1000, callbacks=[Interrupts(server_pid)])

    words = r"parameter server 0 of 1 \(127.0.0.1\) has failed: the server was interrupted"
    with serving(port := free_port()) as process:
        world2.run_raising(RuntimeError, words, work, port, process.pid)
        assert process.wait(30) == 130


@pytest.mark.parametrize(("address", "port"), [("", "7000"), ("127.0.0.1", ""), ("127.0.0.1", "70000"), ("h", "many")])
def test_a_server_needs_an_address(
    address: str, port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    assert main(["serve"]) == 2
    assert f"MASTER_ADDR={address} MASTER_PORT={port}: a server finds the job by" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_external_servers_need_an_address_that_both_sides_know(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "7000")
    monkeypatch.delenv(missing)
    strategy = ParameterServerStrategy(servers="external", join_timeout_s=1)
    with pytest.raises(ValueError, match=f"servers='external': {missing} is not set, by which servers find the job"):
        fit_module(Classifier(), strategy, 1, CASE)
