"""Parameter servers that are started by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_multigpu import ParameterServerStrategy
from lightning_multigpu.cli import main
from lightning_multigpu.commands.serve import _options, _parser
from lightning_multigpu.communication.job_secret import JOB_SECRET
from tests import preforked
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
