"""``lightning-multigpu bench``: what is refused before any process starts, the helps, and what a header tells."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_multigpu.bench.collectives.implementations import IMPLEMENTATIONS
from lightning_multigpu.bench.jobs.host_agents import HostAgents
from lightning_multigpu.bench.jobs.placement import placement
from lightning_multigpu.cli import main
from lightning_multigpu.commands.benches.bench_options import header, header_lines


@pytest.fixture(autouse=True)
def _starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process was about to be started")

    monkeypatch.setattr(HostAgents, "__init__", refuse)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "bench takes a subcommand first, one of collectives, strategies"),
        ("colectives", "Did you mean 'collectives'?"),
        ("collectives --operations all_reduc", "--operations: 'all_reduc' is unknown. Did you mean 'all_reduce'?"),
        ("collectives --backends ring,glo", "--backends: 'glo' is unknown. Did you mean 'gloo'?"),
        ("collectives --min-size 64q", "argument --min-size: size '64q': pass a whole number of bytes"),
        ("collectives --min-size 2k --max-size 1k", "--max-size=1024 is below --min-size=2048"),
        ("collectives --step-factor 1", "argument --step-factor: '1': pass a whole number of at least 2"),
        ("collectives --devices 1", "a collective needs 2 ranks or more; pass --devices=2"),
        ("collectives --devices two", "argument --devices: 'two': pass a whole number of at least 1"),
        ("collectives --link-gbit inf", "argument --link-gbit: 'inf': pass a number above 0"),
        ("collectives --num-nodes 2", "--num-nodes=2: run the same command on each host"),
        ("collectives --json no/such/file.json", "--json=no/such/file.json: there is no directory no/such"),
        ("strategies --strategies ring_dpd", "Did you mean 'ring_ddp'?"),
        ("strategies --model resnet", "argument --model: invalid choice: 'resnet' (choose from "),
        ("strategies --config no.yaml", "--config=no.yaml: No such file"),
        ("strategies --config no.yaml --model mlp", "--config has a model, and data in batches: leave --model"),
        ("strategies --json no/such/file.json", "--json=no/such/file.json: there is no directory no/such"),
    ],
)
def test_what_is_wrong_is_refused_in_one_message(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lightning-multigpu bench: error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("data: {}", "it has no 'model'"),
        ("{model: gpt, optimizer: SGD}", "configure_optimizers()"),
        ("model: lightning.pytorch.strategies.DDPStrategy", "subclass of LightningModule"),
        ("{model: tests.bench.models.OwnModel, data: tests.bench.models.No}", "data=tests.bench.models.No cannot"),
    ],
)
def test_a_configuration_file_has_a_model_with_its_optimizer(
    keys: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(keys)
    assert main(["bench", "strategies", f"--config={tmp_path}/config.yaml"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
@pytest.mark.parametrize("bench", ["collectives", "strategies"])
def test_a_gpu_that_is_not_there(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", bench, "--device=cuda"]) == 2
    assert "pass" in capsys.readouterr().err


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="torch has MPI")
def test_a_back_end_that_torch_was_built_without(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", "--backends=mpi"]) == 2
    assert (
        "mpi is not part of this build of torch; pass some of shared_memory, ring, hierarchy, compressed, gloo"
        in capsys.readouterr().err
    )


def test_help_names_every_implementation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "collectives", "--help"])
    text = capsys.readouterr().out
    assert all(f"  {row.name} " in text for row in IMPLEMENTATIONS)


def test_the_header_tells_what_the_figures_cannot_be_read_without() -> None:
    command = "lightning-multigpu bench collectives --operations 'all reduce'"
    head = header(placement(2, environment={}), threads=3, device_type="cpu", command=command)
    assert (head["ranks"], head["threads_per_rank"], head["device"]) == (2, 3, "cpu")
    assert head["versions"]["torch"] == torch.__version__
    assert head["command"] == command
    text = "\n".join(header_lines(head))
    for part in (head["date"], head["machine"]["processor"], "2 ranks (1 x 2), 3 intra-op thread(s)"):
        assert part in text
    assert all(line.startswith("# ") for line in text.splitlines())
