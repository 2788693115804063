"""Ranks that the command line starts before it knows that the run begins: they import meanwhile, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lightning_multigpu.commands import fit
from lightning_multigpu.commands.fit import ranks_to_start
from lightning_multigpu.commands.usage import COMMAND
from lightning_multigpu.job.waiting_ranks import _PIPE, _waiting, are_waiting, launch_rank, ranks_started
from tests import preforked

ROOT = Path(__file__).parents[2]
WAITING = """
import os
from lightning_multigpu.job.waiting_ranks import wait_if_started_early
wait_if_started_early(lambda: print("ready", flush=True))
print(os.environ.get("GIVEN"), os.environ.get("LOCAL_RANK"), len(os.environ))
"""
PROJECT = """
import os
import psutil
from lightning.pytorch.demos.boring_classes import BoringModel

if "LOCAL_RANK" not in os.environ:
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    print("ranks before the launch:", sum("__main__.py fit" in command for command in commands))


class Model(BoringModel):
    def on_train_start(self):
        rank, size = os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]
        os.write(1, f"trains: {self.global_rank} {rank} {size}\\n".encode())  # as a whole, unlike print
"""
RING = {"strategy": "ring_ddp", "devices": 2}


def test_a_rank_that_cannot_start_leaves_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EAGAIN, "again")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="again"), ranks_started([1, 2], ["a command"]):
        pass
    assert os.listdir("/proc/self/fd") == before


@pytest.fixture
def waiting() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that waits, and the end of its pipe to write to."""
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", WAITING],
        env=os.environ | {_PIPE: str(reader), "LOCAL_RANK": "1", "PYTHONPATH": str(ROOT)},
        pass_fds=[reader],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        os.close(reader)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process, writer
        process.kill()


def test_a_rank_begins_with_the_environment_of_its_launch(waiting: tuple[Any, int]) -> None:
    process, writer = waiting
    with open(writer, "w") as pipe:
        json.dump({"GIVEN": "1", "LOCAL_RANK": "3"}, pipe)
    assert process.communicate(timeout=30)[0] == "1 3 2\n"


@pytest.mark.parametrize("sent", ["", '{"GIVEN": "1", "LOC'])
def test_a_rank_ends_silently_when_the_first_one_has_gone(waiting: tuple[Any, int], sent: str) -> None:
    process, writer = waiting
    with open(writer, "w") as pipe:
        pipe.write(sent)
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == 0


def test_ctrl_c_ends_it_without_a_traceback(waiting: tuple[Any, int]) -> None:
    process, writer = waiting
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == ""
    os.close(writer)


def test_a_rank_that_is_not_needed_is_gone_before_the_command_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lightning_multigpu.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with ranks_started([1, 2], [*COMMAND, "fit"]):
        assert are_waiting()
        process, _ = _waiting[1]
        taken = launch_rank(2, {})
    assert not are_waiting()
    assert process.returncode == -signal.SIGKILL
    assert taken.poll() is None, "a rank that was launched goes on"
    taken.kill()
    taken.wait()


@pytest.mark.parametrize(
    ("trainer", "environment", "count"),
    [
        (RING, {}, 2),
        ({"strategy": "gpipe"}, {"PL_TRAINER_DEVICES": "2"}, 2),
        ({**RING, "strategy": {"class_path": "RingDDPStrategy", "init_args": {"bucket_cap_mb": 5}}}, {}, 2),
        ({**RING, "devices": 64}, {}, 3),
        ({**RING, "strategy": "ddp"}, {}, 1),
        ({**RING, "strategy": {"class_path": "RingDDPStrategy", "init_args": {"start_method": "fork"}}}, {}, 1),
        ({**RING, "devices": "auto"}, {}, 1),
        (None, {}, 1),
        (RING, {"SLURM_NTASKS": "2"}, 1),
    ],
)  # fmt: skip
def test_ranks_that_a_command_line_will_need(
    trainer: object, environment: dict[str, str], count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At most one for each core: on a machine with fewer they would delay the error message of a wrong setting."""
    monkeypatch.setattr(fit, "usable_cores", lambda: 3)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    for saved in ([f"--config={tmp_path}/config.yaml"], ["--resume", str(tmp_path), "--seed_everything=1"]):
        assert ranks_to_start(saved, environment) == count


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["--trainer.strategy=gpipe"], 2),
        (["--trainer.strategy.class_path=RingDDPStrategy", "--trainer.devices", "3"], 3),
        (["--trainer.strategy.start_method=spawn"], 1),
        (["--config=no.yaml"], 1),
    ],
)
def test_options_override_files(
    options: list[str], count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fit, "usable_cores", lambda: 3)
    (tmp_path / "run.yaml").write_text("trainer: {devices: 2}")
    assert ranks_to_start(["-c", f"{tmp_path}/run.yaml", *options], {}) == count


@pytest.mark.parametrize(
    ("argv", "count"),
    [
        (["/bin/lightning-multigpu", "fit", "--x"], 1),
        (["program.py", "fit", "--x"], 0),  # it calls main(arguments): a rank would run the program
    ],
)
def test_only_this_command_line_is_run_again(argv: list[str], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(fit, "ranks_to_start", lambda *_: 2)
    monkeypatch.setattr(fit, "ranks_started", lambda ranks, _: nullcontext(started.extend(ranks)))
    monkeypatch.setattr(fit, "import_module", lambda _: SimpleNamespace(run=lambda *_: 0))
    assert fit.run("fit", ["--x"]) == 0
    assert started == [1][:count]


@pytest.mark.launch
def test_ranks_import_while_the_first_one_does(tmp_path: Path) -> None:
    """They were started at the launch, and imported for seconds while the first rank waited for them."""
    (tmp_path / "project.py").write_text(PROJECT)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = ["accelerator=cpu", "strategy=ring_ddp", "devices=2", "max_steps=1", "logger=false"]
    settings += [f"enable_{name}=false" for name in ("checkpointing", "progress_bar", "model_summary")]
    command = [sys.executable, "-m", "lightning_multigpu", "fit", "--model=project.Model"]
    command += [f"--trainer.{setting}" for setting in settings]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    early = min(2, len(os.sched_getaffinity(0))) - 1  # only where the second rank has a core of its own
    ended = preforked.run(command, env=environment, cwd=tmp_path, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert f"ranks before the launch: {early}" in ended.stdout
    assert sorted(line for line in ended.stdout.splitlines() if line.startswith("trains")) == [
        "trains: 0 0 2",
        "trains: 1 1 2",
    ]
