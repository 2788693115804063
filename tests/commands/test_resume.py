"""``fit --resume``: a run that was stopped goes on, and nothing begins anew in silence."""

import csv
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_multigpu.cli import main
from tests import preforked
from tests.strategies.tasks import Classifier, dataset

pytestmark = [
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    # A resumed run saves beside its own logs, and looks for its best checkpoint anew.
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
]

ROOT = Path(__file__).parents[2]


class Model(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if os.environ.get("FAILS_AT") == f"{self.global_rank} {self.global_step}":
            raise ArithmeticError("planted")
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


class Data(L.LightningDataModule):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.size = size

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(12), batch_size=self.size, shuffle=True)


CONFIG = """
trainer:
  accelerator: cpu
  devices: {devices}
  strategy: {strategy}
  precision: 64-true
  max_epochs: {max_epochs}
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {{save_dir: runs, name: {name}, flush_logs_every_n_steps: 1}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{filename: last, save_on_exception: true}}
model: {{class_path: tests.commands.test_resume.Model}}
data: {{class_path: tests.commands.test_resume.Data}}
"""


@pytest.fixture(autouse=True)
def _project(directory: Path) -> None:
    configure("run", max_epochs=1)


def configure(name: str, *, strategy: str = "auto", devices: int = 1, max_epochs: int) -> str:
    path = Path(f"{name}.yaml")
    path.write_text(CONFIG.format(name=name, strategy=strategy, devices=devices, max_epochs=max_epochs))
    return str(path)


def steps(run: str) -> list[int]:
    """The steps that a run has logged, of 6 in each epoch of one device."""
    return [int(row["step"]) for row in csv.DictReader(Path(run, "metrics.csv").read_text().splitlines())]


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.count("error: ") == 1
    return printed[printed.index("error: ") + len("error: ") :].strip()


def test_a_directory_alone_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The saved settings are those of the run; options override them, and a resumed run can be resumed in its turn."""
    assert main(["fit", "--config=run.yaml"]) == 0
    assert steps("runs/run/version_0") == list(range(6))
    assert main(["fit", "--resume", "runs/run/version_0", "--trainer.max_epochs=2"]) == 0
    assert steps("runs/run/version_1") == list(range(6, 12))
    told = "Resumes from runs/run/version_0/checkpoints/last.ckpt (epoch 0, step 6), with the settings of runs/run/"
    assert capsys.readouterr().err.count(told) == 1
    shutil.rmtree("runs/run/version_0")  # the settings of version_1 name a file in it
    assert main(["fit", "--resume=runs/run", "--trainer.max_epochs=3", "--data.size=4"]) == 0
    assert steps("runs/run/version_2") == list(range(12, 15))
    saved = yaml.safe_load(Path("runs/run/version_2/config.yaml").read_text())
    assert saved["ckpt_path"].endswith("runs/run/version_1/checkpoints/last.ckpt")
    assert "resume" not in saved


def test_what_cannot_be_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config=run.yaml"]) == 0
    resume = ["fit", "--resume=runs/run/version_0"]
    assert error_of(capsys, *resume, "--ckpt_path=a.ckpt").startswith("--resume and --ckpt_path exclude each other; ")
    assert error_of(capsys, "fit", "--resume=rnus").startswith("--resume=rnus: there is no such directory")
    assert error_of(capsys, "fit", "--resume").startswith("--resume takes a run's directory")
    assert error_of(capsys, "test", "--resume=runs").startswith("unrecognized arguments: --resume=runs")
    Path("own.yaml").write_text("resume: runs\n")
    of_file = error_of(capsys, "fit", "--config=run.yaml", "--config=own.yaml")
    assert "resume is an option of the command line" in of_file
    os.truncate("runs/run/version_0/checkpoints/last.ckpt", 100)
    with pytest.warns(UserWarning, match="last.ckpt is skipped: it is damaged"):
        assert "there is no complete checkpoint in it or below it" in error_of(capsys, *resume)


@pytest.mark.launch
def test_after_a_fault_the_ranks_go_on() -> None:
    """Rank 1 fails within the second epoch; rank 0 saves where it stands, and both go on from there."""

    def fit(*arguments: str, **variables: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        command = [sys.executable, "-m", "lightning_multigpu", "fit", *arguments]
        ended = preforked.run(command, env=environment, timeout=400)
        assert ("planted" in ended.stderr) == (ended.returncode != 0) == ("FAILS_AT" in variables), ended.stderr
        return str(ended.stderr)

    printed = fit(f"--config={configure('failed', strategy='ring_ddp', devices=2, max_epochs=2)}", FAILS_AT="1 4")
    assert "Process group of 2 over gloo" in printed
    assert "Seed set to 0" in printed
    printed = fit("--resume=runs/failed/version_0")
    assert "Resumes from runs/failed/version_0/checkpoints/last.ckpt (epoch 1, step 4)" in printed
    assert printed.count("Resumes from") == 1, "by one rank"
    assert len(steps("runs/failed/version_1")) == 6 - 4  # under a step too many: Lightning counts the one that failed
