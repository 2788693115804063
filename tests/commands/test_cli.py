"""The command line as a user meets it: what it accepts, and one clear message for what it does not."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import lightning as L
import pytest
import torch.distributed as dist
import yaml
from lightning.pytorch import Callback
from lightning_utilities.core.imports import RequirementCache

from lightning_multigpu.cli import COMMANDS, main
from lightning_multigpu.commands.training import TrainingParser, _instance
from lightning_multigpu.commands.usage import COMMAND

pytestmark = [
    # LightningCLI itself calls what jsonargparse 5 will remove, and jsonargparse tells so in two warnings.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    # float16 training skips its first steps while it looks for a loss scale.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU"),
    pytest.mark.filterwarnings("ignore:Precision 16-mixed is not supported by the model summary"),
]

ROOT = Path(__file__).parents[2]
MODULE = """
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel


class Model(BoringModel):
    def __init__(self, hidden: int = 3) -> None:
        super().__init__()


class Data(BoringDataModule):
    pass


class Broken(BoringModel):
    def __init__(self) -> None:
        raise ValueError("a bug of the user's")
"""
MODULE_COMMAND = (sys.executable, "-m", "lightning_multigpu")
ON_CPU = ("--model=project.Model", "--trainer.accelerator=cpu")
QUIET = (
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
)
RING = (*ON_CPU, "--trainer.strategy.class_path=lightning_multigpu.RingDDPStrategy")


@pytest.fixture
def project(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory is a user's project; its module can be imported from there and nowhere else."""
    (directory / "project.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "project", raising=False)
    yield directory
    sys.modules.pop("project", None)
    if dist.is_initialized():
        dist.destroy_process_group()


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one message of a command line that is refused with exit status 2."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.count("error:") == 1
    return captured.err[captured.err.index("lightning-multigpu") :].strip()


def config(project: Path, text: str) -> str:
    (project / "run.yaml").write_text(text)
    return "run.yaml"


def with_package() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class TestFrame:
    def test_help_lists_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--help"]) == 0
        printed = capsys.readouterr().out
        for command in COMMANDS:
            assert f"  {command.name} " in printed
            assert command.summary in printed

    def test_help_of_fit_is_lightnings(self, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["fit", "--help"])
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert "--trainer.barebones" in printed
        assert "--resume RUN" in printed

    def test_only_one_rank_of_a_host_reports(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Under torchrun with 8 ranks a typo was reported 8 times."""
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert main(["strategis"]) == 2
        assert capsys.readouterr().err == ""


class TestWithoutLightning:
    """Importing Lightning and torch takes seconds, and answers that need neither came after them."""

    LINES = (
        "--help", "--version", *(f"{command.name} --help" for command in COMMANDS if command.module != "training"),
        "bench --help", "strategies", "strategies --jsno", "fitt", "bench", "doctor --jsno",
        "plan --example=seed", "bench strategies --model=resnet", "bench collectives --jsno",
        "plan --strategies ring_dpd", "bench collectives --backends glo", "serve --master-port=0",
    )  # fmt: skip

    def test_answers_that_need_neither(self, project: Path) -> None:
        script = (
            "import contextlib, io, sys",
            "from lightning_multigpu.cli import main",
            "for line in sys.argv[1:]:",
            "    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):",
            "        main(line.split())",
            "    assert line.removesuffix(' --help') in printed.getvalue() or not line.endswith(' --help'), line",
            "    print(line, *sorted({'lightning', 'torch', 'torchmetrics'} & sys.modules.keys()), sep=': ')",
        )
        command = [sys.executable, "-c", "\n".join(script), *self.LINES]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=with_package(), check=False)
        assert tuple(ended.stdout.splitlines()) == self.LINES, ended.stderr
        assert "--strategies: 'ring_dpd' is unknown. Did you mean 'ring_ddp'?" in ended.stderr


class TestAccepted:
    def test_a_strategys_class_without_its_module(self, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = "{bucket_cap_mb: 5, average_every: 50, outer_optimizer: nesterov}"
        strategy = f"{{class_path: RingDDPStrategy, init_args: {options}}}"
        file = config(
            project, f"model: project.Model\ntrainer: {{accelerator: cpu, devices: 1, strategy: {strategy}}}\n"
        )
        arguments = ("fit", "-c", file, "--data=project.Data", "--trainer.fast_dev_run=true", *QUIET)
        assert main(arguments) == 0
        assert "error" not in capsys.readouterr().err

    def test_a_strategy_outside_of_this_repository(self, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The class of docs/developing.md; a path was an invalid name, or this pack's class of that name."""
        page = (Path(__file__).parents[2] / "docs/developing.md").read_text()
        (project / "my_module.py").write_text(page.partition("```python\n")[2].partition("```")[0])
        arguments = ("fit", "--model=project.Model", "--data=project.Data", *ON_CPU, "--trainer.devices=1", *QUIET)
        assert main([*arguments, "--trainer.strategy=my_module.MyStrategy", "--trainer.fast_dev_run=true"]) == 0
        assert "step 0\n" in capsys.readouterr().out

    def test_printed_configuration_can_be_used_again(self, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
        outer = "--trainer.strategy.outer_optimizer={lr: 0.5}"
        average = "--trainer.strategy.average_every=50"
        options = (*RING, "--trainer.strategy.bucket_cap_mb=5", average, outer, "--trainer.devices=2")
        printed = []
        for arguments in (options, ("-c", "run.yaml")):
            with pytest.raises(SystemExit) as ended:
                main(["fit", *arguments, "--print_config"])
            assert ended.value.code == 0
            printed.append(capsys.readouterr().out)
            config(project, printed[0])
        assert printed[0] == printed[1]
        strategy = yaml.safe_load(printed[0])["trainer"]["strategy"]
        assert strategy["class_path"] == "lightning_multigpu.RingDDPStrategy"
        assert strategy["init_args"]["bucket_cap_mb"] == 5
        assert strategy["init_args"]["outer_optimizer"] == {"lr": 0.5}

    def test_hosts_and_ranks_of_emulate(
        self, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Host 0 trained alone, and host 1 waited in vain."""
        monkeypatch.setenv("PL_TRAINER_NUM_NODES", "3")
        monkeypatch.setenv("PL_TRAINER_DEVICES", "2")
        with pytest.raises(SystemExit):
            main(["fit", "--model=project.Model", "--trainer.devices=5", "--print_config"])
        trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
        assert (trainer["num_nodes"], trainer["devices"]) == (3, "5"), "what is given stands"
        without_command = L.Trainer(accelerator="cpu", strategy="ring_ddp", logger=False, enable_checkpointing=False)
        assert (without_command.num_nodes, without_command.num_devices) == (3, 2)
        with pytest.raises(SystemExit):
            main(["fit", "--model=project.Model", "--print_config"])
        assert int(yaml.safe_load(capsys.readouterr().out)["trainer"]["devices"]) == 2
        message = error_of(capsys, "fit", "--model=project.Model", "--trainer.num_nodes=1")
        assert "num_nodes=1, and there are 3 hosts" in message, "each host trained by itself, as a configuration said"

    def test_a_run_can_be_repeated_in_its_directory(self, project: Path) -> None:
        """LightningCLI refuses to write its configuration over that of an earlier run, with a traceback."""
        for _ in range(2):
            assert main(["fit", *ON_CPU, "--trainer.devices=1", "--trainer.max_steps=1", *QUIET]) == 0

    @pytest.mark.parametrize("command", ["validate", "test", "predict"])
    def test_the_other_commands(self, command: str, project: Path) -> None:
        assert main([command, *ON_CPU, "--trainer.strategy=ring_ddp", "--trainer.fast_dev_run=true", *QUIET]) == 0


class TestRefused:
    @pytest.mark.parametrize(
        ("text", "key", "problem"),
        [
            ("trainer: {max_epoch: 3}", "trainer.max_epoch", "does not accept option"),
            ("trainer: {strategy: {class_path: lightning_multigpu.RingDDPStrategy, init_args: {bucket_mb: 3}}}",
             "trainer.strategy", "Option 'bucket_mb' is not accepted"),
            ("trainer: {strategy: {class_path: lightning_multigpu.RingDPStrategy}}", "trainer.strategy",
             "has no attribute 'RingDPStrategy'"),
            ("trainer: {strategy: ring_dpp}", "Did you mean 'ring_ddp'?", "an invalid strategy name"),
            ("model: {class_path: project.Model, init_args: {hidden: x}}", "model", "Expected a <class 'int'>"),
            ("model: project.Modl", "model", "module 'project' has no attribute 'Modl'"),
            ("trainer: [\n", "in", "Problems parsing config"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_in_a_file(
        self, text: str, key: str, problem: str, project: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = "" if text.startswith("model") else "model: project.Model\n"
        message = error_of(capsys, "fit", "--config", config(project, f"{model}{text}\n"))
        assert key in message
        assert problem in message

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "lightning-multigpu: error: the command comes first, one of new, fit, "),
            (["--config", "run.yaml", "fit"], "lightning-multigpu: error: the command comes first, one of new, fit, "),
            (["strategis"], "lightning-multigpu: error: 'strategis' is not a command; known are new, fit, "),
            (["strategis"], "Did you mean 'strategies'?"),
            (["fit", *ON_CPU, "--trainer.max_epoch=3"], "--trainer.max_epoch=3"),
            (["fit", *ON_CPU, "--trainer.devices=0"], "devices='0')` value is not a valid input using cpu"),
            (["fit", *RING, "--trainer.sync_batchnorm=true"],
             "fit: error: sync_batchnorm=True on CPU: torch synchronises BatchNorm on GPUs only; pass "),
            (["fit", *RING, "--trainer.strategy.process_group_backend=nccl"],
             "process_group_backend='nccl' moves no tensors on 'cpu' in this build of torch; pass "),
            (["fit", "--config=rnu.yaml"], "File does not exist: "),
            (["fit"], "the following arguments are required: fit.model"),
            (["strategies", "--jsno"], "'--jsno' is no option here."),
            (["emulate", "--nodes", "2"], "no command to run"),
            (["emulate", "--nodes", "0", "--", "true"], "num_hosts=0 is out of range"),
            (["emulate", "--devices", "0", "--", "true"], "--devices 0"),
            (["plan", "--example=gpt3_175"], "Did you mean 'gpt3_175b'?"),
            (["plan", "--example=gpt3_13b", "--preset=a100_100gb"],
             "--preset: 'a100_100gb' is unknown. Did you mean 'a100_100gbit'?"),
            (["plan", "--preset=a100"], "--preset is no option without --example"),
            (["plan", "--example=seed", "--batch=2"], "--batch is no option with --example=seed, which takes --nodes"),
            (["plan", "--example=gpt3_13b"], "name a machine by --preset: a100, h100"),
            (["plan", "--example=gpt3_13b", "--machine=m.json"], "--machine is no option with --example"),
            (["plan", "--example=gpt3_13b", "--trainer.devices=2"], "takes no configuration and no options of fit"),
        ],
    )  # fmt: skip
    def test_refused_arguments(
        self, arguments: list[str], message: str, project: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert message in error_of(capsys, *arguments)

    def test_logger_whose_package_is_missing(
        self, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A newcomer who tried the configuration of W&B got the stacks of two libraries, and the fix below them."""
        monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", RequirementCache("no-wandb>=1"))
        message = error_of(capsys, "fit", *ON_CPU, f"--config={ROOT / 'configs/loggers/wandb.yaml'}")
        assert message == (
            "lightning-multigpu fit: error: WandbLogger needs a missing package: pip install -U 'no-wandb>=1'"
        )

    def test_bug_in_the_users_module_keeps_its_own_traceback(self, project: Path) -> None:
        """jsonargparse turned it into a list of types that a model may have, without the line that raised."""
        with pytest.raises(ValueError, match=r"^a bug of the user's$") as caught:
            main(["fit", "--model=project.Broken"])
        assert caught.traceback[-1].path == project / "project.py"


@pytest.mark.parametrize("command", [MODULE_COMMAND, COMMAND], ids=["module", "path"])
def test_files_of_the_working_folder_come_last(command: Sequence[str], tmp_path: Path) -> None:
    """A torch.py in a folder that another user may write to ran as the user of the command, and of its ranks."""
    for name in ("torch", "yaml", "json", "lightning"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger ran')")
    command = [*command, "strategies"]
    ended = subprocess.run(command, cwd=tmp_path, env=with_package(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "ring_ddp" in ended.stdout


def test_the_parser_goes_to_spawned_ranks_which_save_the_settings() -> None:
    """``--trainer.strategy=ring_ddp_spawn`` ended with "Can't pickle local object"."""
    parser = TrainingParser()
    parser.add_instantiator(_instance, Callback)
    assert isinstance(pickle.loads(pickle.dumps(parser)), TrainingParser)
