"""Parameter servers that are started by hand."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.callbacks import Callback

from lightning_multigpu import ParameterServerStrategy
from lightning_multigpu.callbacks import RunReport
from lightning_multigpu.cli import main
from lightning_multigpu.commands.serve import _options, _parser
from lightning_multigpu.communication.job_secret import JOB_SECRET
from tests import preforked
from tests.strategies.parameter_server.test_asynchronous_training import EVERY, Seen, loader, trained_on
from tests.strategies.tasks import Case, Classifier, assert_same_weights, eval_loader, make_trainer, state, train_loader
from tests.world import World

SECRET = "0123456789abcdef" * 4
NOWHERE = ["--host", "192.0.2.1"]
CASE = Case(optimizer="adamw", max_epochs=2, trainer={"gradient_clip_val": 0.3})


@contextmanager
def serving(*options: str, secret: str = SECRET) -> Iterator[tuple[int, preforked.Process]]:
    command = [sys.executable, "-m", "lightning_multigpu", "serve", "--port", "0", "--threads", "1", *options]
    environment = {**os.environ, JOB_SECRET: secret}
    with preforked.Process(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            assert words[:4] == ["Listening", "on", "127.0.0.1", "port"]
            yield int(words[4].rstrip(",")), process
        finally:
            process.kill()


def fit(addresses: list[str]) -> dict[str, Any]:
    os.environ[JOB_SECRET] = SECRET
    module = Classifier("adamw")
    strategy: Any = "auto" if not addresses else ParameterServerStrategy(servers=addresses, join_timeout_s=20)
    trainer = make_trainer(CASE, strategy, 2 if addresses else 1)
    try:
        trainer.fit(module, train_loader(CASE, trainer))
        trainer.validate(module, eval_loader(), verbose=False)  # the servers have ended with the fit
        trainer.test(module, eval_loader(), verbose=False)
    finally:
        del os.environ[JOB_SECRET]
    return {"weights": state(module)}


@pytest.mark.launch
def test_workers_train_on_servers_that_are_there(world2: World) -> None:
    with serving() as (first_port, first), serving() as (second_port, second):
        addresses = [f"127.0.0.1:{first_port}", f"127.0.0.1:{second_port}"]
        reference = fit([])
        for result in world2.run(fit, addresses):
            assert_same_weights(result, reference)
        for process in (first, second):
            assert process.communicate(timeout=30)[0] == "The job has ended\n"
            assert process.returncode == 0


class Meets(Callback):
    """After a batch the first worker waits until the other has trained on one."""

    def __init__(self, directory: Path, *, is_late: bool) -> None:
        self.sign, self.is_late = directory / "joined", is_late

    def on_train_batch_end(self, *_: Any) -> None:
        deadline_s = time.monotonic() + 60
        while not self.is_late and not self.sign.exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        if self.is_late:
            self.sign.touch()


def takes_part(address: str, directory: Path, *, joins: bool) -> dict[str, Any]:
    os.environ[JOB_SECRET] = SECRET
    module = Seen()
    strategy = ParameterServerStrategy(mode="async", servers=[address], joins=joins, join_timeout_s=20)
    report = RunReport()
    callbacks = [Meets(directory, is_late=joins), report]
    trainer = make_trainer(Case(max_epochs=3), strategy, 1, callbacks=callbacks, default_root_dir=str(directory))
    try:
        trainer.fit(module, loader(), eval_loader())
    finally:
        del os.environ[JOB_SECRET]
    ranks = [] if report.report is None else [each["rank"] for each in report.report["ranks"]]
    return {
        "samples": module.samples,
        "weights": state(module),
        "validated": len(module.versions),
        "reported": ranks,
    }


@pytest.mark.launch
def test_a_worker_joins_a_job_that_trains(tmp_path: Path) -> None:
    with (
        serving() as (port, process),
        contextlib.closing(World(1)) as first,
        contextlib.closing(World(1)) as late,
        ThreadPoolExecutor() as pool,
    ):
        address = f"127.0.0.1:{port}"
        late.run_raising(RuntimeError, "no asynchronous job here", takes_part, address, tmp_path, joins=True)
        training = pool.submit(first.run, takes_part, address, tmp_path, joins=False)
        results: list[dict[str, Any]] = []
        while not results:  # the job may not be there yet
            with contextlib.suppress(RuntimeError):
                results = late.run(takes_part, address, tmp_path, joins=True)
        results += training.result()
        assert process.wait(30) == 0
    joined, began = results
    assert trained_on(results) == dict.fromkeys(range(3), EVERY)
    assert joined["samples"]
    assert (began["validated"], joined["validated"]) == (3, 0)
    assert (began["reported"], joined["reported"]) == ([0, 1], []), "both were rank 0, and the job failed at its end"
    assert_same_weights(joined, began)


@pytest.mark.launch
def test_workers_of_another_job_are_not_let_in(world2: World) -> None:
    with serving(secret="f" * 64) as (port, process):
        words = f"parameter server 0 of 1 .127.0.0.1 port {port}. is not there: .* is it a server of this job"
        world2.run_raising(RuntimeError, words, fit, [f"127.0.0.1:{port}"])
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


@pytest.mark.parametrize(
    ("secret", "arguments", "words"),
    [
        ("", [], f"{JOB_SECRET} is not set: make one with 'openssl rand -hex 32'"),
        ("short", [], f"{JOB_SECRET} has 5 characters; it must have 32 or more"),
        (SECRET, ["--port", "70000"], "--port 70000 is not between 0 and 65535"),
        (SECRET, NOWHERE, "cannot listen on 192.0.2.1 port 7000: "),
        (SECRET, ["--prot", "1"], "--prot"),
    ],
)
def test_wrong_settings_are_refused(
    secret: str, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(JOB_SECRET, secret)
    assert main(["serve", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "{path}: prot is not a setting. Did you mean 'port'?"),
        ("config: other.yaml", "{path}: config is not a setting. Known: host, port, threads"),
        ("port: many", "{path}: argument --port: invalid int value: 'many'"),
        ("port: 7000.5", "{path}: argument --port: invalid int value: '7000.5'"),
        ("threads: true", "{path}: threads=True is neither a number nor a text"),
        ("host: [a, b]", "{path}: host=['a', 'b'] is neither a number nor a text"),
        ("threads: -1", "{path}: --threads -1 is not between 0 and 1024"),
        ("", "{path}: not settings, as in 'port: 7000', but None"),
        (None, "--config={path}: there is no such file"),
    ],
)
def test_wrong_settings_of_a_file_are_refused(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 2
    assert words.format(path=path) in capsys.readouterr().err


def test_options_of_the_command_line_override_those_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("host: 192.0.2.1\nthreads: 3\n")
    options = _options(_parser("serve"), ["--config", str(path), "--host", "127.0.0.1"])
    assert (options.host, options.threads) == ("127.0.0.1", 3)


def test_the_example_shows_the_defaults() -> None:
    parser = _parser("serve")
    example = Path(__file__).parents[2] / "configs/serve/server.yaml"
    defaults = vars(parser.parse([]))
    assert yaml.safe_load(example.read_text()) == {key: defaults[key] for key in defaults.keys() - {"config"}}


def test_named_servers_need_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_SECRET, raising=False)
    trainer = make_trainer(CASE, ParameterServerStrategy(servers=["127.0.0.1:7000"]), 1)
    with pytest.raises(ValueError, match=f"{JOB_SECRET} is not set, by which servers and ranks know each other"):
        trainer.fit(Classifier(), train_loader(CASE, 1))
