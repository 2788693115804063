"""The examples, run as a user would run them: as scripts and from the configurations."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from examples.hugging_face import CausalLM
from lightning_multigpu.cli import main
from tests import documents
from tests.documents import ROOT, run


@pytest.mark.launch
def test_digits_are_read_by_two_processes(tmp_path: Path) -> None:
    output = run(tmp_path, str(ROOT / "examples/digits.py"), "--strategy=ring_ddp", "--accelerator=cpu")
    [accuracy] = re.findall(r"^test accuracy: (.+)$", output, re.MULTILINE)
    assert float(accuracy) >= 0.95
    after = output[output.index("test accuracy") :]
    for row in ("throughput", "step time", "all-reduce time per step", "exposed communication per", "sent per step"):
        assert row in after
    assert "where the time of a step went: runs/digits/version_0/report.html" in after
    assert (tmp_path / "runs/digits/version_0/report.html").is_file()
    report = json.loads((tmp_path / "runs/digits/version_0/multigpu_report.json").read_text())
    assert report["strategy"]["name"] == "ring_ddp"
    assert report["world"]["size"] == 2


@pytest.mark.launch
def test_notebook_trains_what_was_typed_into_it(tmp_path: Path) -> None:
    """In an interpreter as a kernel is: the classes of its cells are in no file that a rank could import."""
    output = run(tmp_path, "-c", documents.as_typed(ROOT / "examples/notebook.ipynb"), forked=False)
    reached, here = map(float, re.findall(r"^(?:val_accuracy of the run|of the weights in .*): (.+)$", output, re.M))
    assert reached > 0.8
    assert here == pytest.approx(reached, abs=2e-3)
    assert "ring_ddp_spawn: 2 ranks on 1 node, 120 optimizer steps" in output
    assert "written to runs/notebook/version_0/multigpu_report.json" in output


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    """Outputs name directories of the machine, and change with every run."""
    cells = json.loads(path.read_text())["cells"]
    assert [cell["source"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_configuration_saves_the_newest_state(path: Path) -> None:
    """After Ctrl-C the newest file was five epochs old: ``save_last`` followed the best epoch."""
    callbacks = yaml.safe_load(path.read_text())["trainer"]["callbacks"]
    savers = [each["init_args"] for each in callbacks if each["class_path"].endswith("ModelCheckpoint")]
    assert {"filename": "last", "save_on_exception": True} in savers


SHOWN = ("single_device", "ring_ddp", "ddp_sharded", "dp", "cpu_ps", "sharded_ps", "gpipe", "tensor_split", "hybrid")


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # Lightning calls it
@pytest.mark.parametrize("name", SHOWN)
def test_configuration_is_one_that_the_command_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", f"--config={ROOT / f'configs/{name}.yaml'}", "--print_config"])
    assert ended.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["trainer"]["strategy"]
    if name in ("single_device", "ring_ddp"):
        assert shown["data"]["init_args"]["batch_size"] * int(shown["trainer"]["devices"]) == 64, "alike"


@pytest.mark.launch
@pytest.mark.parametrize(
    ("name", "options"), [("ring_ddp", ()), ("global_batch", ("--trainer.strategy=ring_ddp", "--trainer.devices=2"))]
)
def test_configuration_trains(tmp_path: Path, name: str, options: tuple[str, ...]) -> None:
    """With 64 images a step, under another strategy than its own too."""
    config = f"--config={ROOT / f'configs/{name}.yaml'}"
    run(tmp_path, "-m", "lightning_multigpu", "fit", config, "--trainer.max_epochs=1", *options)
    report = json.loads((tmp_path / f"runs/{name}/version_0/multigpu_report.json").read_text())
    assert report["strategy"] == {"name": "ring_ddp", "options": {}}
    assert (report["global_batch"], report["steps"]) == (64, 20)
    assert (tmp_path / f"runs/{name}/version_0/checkpoints/last.ckpt").is_file()


@pytest.mark.launch
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # Lightning calls it
def test_a_decoder_of_hugging_face_is_fine_tuned_and_goes_back_to_hugging_face(tmp_path: Path) -> None:
    config = str(ROOT / "configs/hugging_face.yaml")
    sizes = ("--model.width=32", "--model.num_layers=2", "--data.context=32", "--data.batch_size=8")
    few = ("--trainer.max_steps=3", "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1")
    output = run(tmp_path, "-m", "lightning_multigpu", "fit", f"--config={config}", *sizes, *few)
    assert "pipeline_1f1b: 2 ranks on 1 node, 3 optimizer steps" in output
    [checkpoint] = tmp_path.glob("runs/hugging_face/version_0/checkpoints/*.ckpt")
    trained = CausalLM.load_from_checkpoint(checkpoint, map_location="cpu").model
    trained.save_pretrained(tmp_path / "saved")
    again = CausalLM(pretrained=str(tmp_path / "saved")).model
    torch.testing.assert_close(again.state_dict(), trained.state_dict(), rtol=0, atol=0)
    assert len(again.generate(torch.tensor([[84, 104]]), max_new_tokens=2)[0]) == 4
