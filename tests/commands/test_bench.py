"""``lightning-multigpu bench``: what is refused before any process starts, the helps, and what a header tells."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch

from lightning_multigpu.bench.collectives import implementations
from lightning_multigpu.bench.jobs.host_agents import HostAgents
from lightning_multigpu.bench.jobs.placement import placement
from lightning_multigpu.bench.machine import header, header_lines
from lightning_multigpu.bench.strategies.models import MODELS
from lightning_multigpu.cli import main
from lightning_multigpu.commands.benches.bench_strategies import MODEL_NAMES


@pytest.fixture(autouse=True)
def _starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process was about to be started")

    monkeypatch.setattr(HostAgents, "__init__", refuse)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "bench takes a subcommand first, one of collectives, strategies"),
        ("--devices=2", "bench takes a subcommand first, one of collectives, strategies"),
        ("colectives", "Did you mean 'collectives'?"),
        ("collectives --operations all_reduc", "--operations: 'all_reduc' is unknown. Did you mean 'all_reduce'?"),
        ("collectives --backends ring,glo", "--backends: 'glo' is unknown. Did you mean 'gloo'?"),
        ("collectives --operation all_reduce", "'--operation' is no option here. Did you mean '--operations'?"),
        ("collectives --min-size 64q", "argument --min-size: size '64q': pass a whole number of bytes"),
        ("collectives --min-size 2k --max-size 1k", "--max-size=1024 is below --min-size=2048"),
        ("collectives --max-size 100000g", "GiB are free; pass less"),
        ("collectives --step-factor 1", "argument --step-factor: '1': pass a whole number of at least 2"),
        ("collectives --dtype float31", "argument --dtype: invalid choice: 'float31'"),
        ("collectives --devices 1", "a collective needs 2 ranks or more; pass --devices=2"),
        ("collectives --devices two", "argument --devices: 'two': pass a whole number of at least 1"),
        ("collectives --timeout 0", "argument --timeout: '0': pass a number above 0"),
        ("collectives --link-gbit inf", "argument --link-gbit: 'inf': pass a number above 0"),
        ("collectives --num-nodes 2", "--num-nodes=2: run the same command on each host"),
        ("collectives --json no/such/file.json", "--json=no/such/file.json: there is no directory no/such"),
        ("collectives --plot picture.doc", "--plot=picture.doc: a picture's name ends in one of png, svg, pdf"),
        ("strategies --strategies ring_dpd", "Did you mean 'ring_ddp'?"),
        ("strategies --strategies ddp ring_ddp:buckets=1", "RingDDPStrategy has no option 'buckets'"),
        ("strategies --baseline fsdp", "--baseline=fsdp is not among --strategies ddp ring_ddp; add it there"),
        ("strategies --model resnet", "--model=resnet: pass one of mlp, gpt, or the class of yours"),
        (
            "strategies --model tests.bench.models.Tinny",
            "tests.bench.models has no class 'Tinny'. Did you mean 'Tiny'?",
        ),
        ("strategies --model tests.bench.models.NoData", "model: NoData has neither example_batch(batch_size)"),
        ("strategies --model tests.bench.models.NoData", "add one of them"),
        ("strategies --model lightning.pytorch.strategies.DDPStrategy", "subclass of LightningModule"),
        ("strategies --model tests.bench.planted.LIAR", "tests.bench.planted has no class 'LIAR'"),
        ("strategies --model tests.bench.models.WithLoader --batch-size 3", "WithLoader has a loader of its own"),
        (
            "strategies --model tests.bench.models.OwnModel --data tests.bench.models.NoSuch",
            "--data=tests.bench.models.N",
        ),
        ("strategies --config no.yaml", "--config=no.yaml: No such file"),
        ("strategies --config no.yaml --model mlp", "--config has a model and its data: leave --model and --data out"),
        ("strategies --plot picture.doc", "--plot=picture.doc: a picture's name ends in one of png, svg, pdf"),
        ("strategies --strategies ring_ddp:compression=int4", "'powersgd'. Did you mean 'int8'?"),
        ("strategies --steps 0", "argument --steps: '0': pass a whole number of at least 1"),
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


def test_a_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return found(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert main(["bench", "collectives", "--plot=times.png"]) == 2
    assert "matplotlib, which is not installed; pip install 'lightning-multigpu[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("bench", ["collectives", "strategies"])
def test_help_names_every_option_once(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", bench, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for option in ("--devices", "--num-nodes", "--threads", "--repetitions", "--warm-up", "--timeout", "--json"):
        assert len(re.findall(rf"^  {option}\b", text, re.MULTILINE)) == 1
    if bench == "collectives":
        assert all(f"  {row.name} " in text for row in implementations.IMPLEMENTATIONS)


def test_models_of_the_help_are_those_of_the_bench() -> None:
    assert tuple(MODELS) == MODEL_NAMES


def test_help_of_the_benches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert re.search(r"^  bench collectives +time", capsys.readouterr().out, re.MULTILINE)


class TestHeader:
    HEADER = header(
        placement(2, environment={}),
        threads=3,
        device_type="cpu",
        command=["bench", "collectives", "--json", "a.json", "--plot=b.png", "--operations", "all reduce"],
    )

    def test_tells_what_the_figures_cannot_be_read_without(self) -> None:
        assert (self.HEADER["ranks"], self.HEADER["threads_per_rank"], self.HEADER["device"]) == (2, 3, "cpu")
        assert self.HEADER["versions"]["torch"] == torch.__version__
        text = "\n".join(header_lines(self.HEADER))
        for part in (self.HEADER["date"], self.HEADER["machine"]["processor"], "2 ranks (1 x 2), 3 intra-op thread(s)"):
            assert part in text
        assert all(line.startswith("# ") for line in text.splitlines())

    def test_command_can_be_repeated(self) -> None:
        assert self.HEADER["command"] == (
            "lightning-multigpu bench collectives --json a.json --plot=b.png --operations 'all reduce'"
        )
