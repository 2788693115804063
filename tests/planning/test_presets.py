"""Presets and the source's arithmetic, compared with figures worked out by hand."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.published import table
from lightning_multigpu.cli import main
from lightning_multigpu.commands.plans.scaling_cli import machine_of
from lightning_multigpu.commands.usage import UsageError
from lightning_multigpu.planning.pipelines.pipeline_prediction import ChainFigures, MeasuredParts
from lightning_multigpu.planning.pipelines.stage_costs import PartCost
from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.planning.scaling.machine_model import World
from lightning_multigpu.planning.scaling.model_profile import ModelProfile, Phases, SplitPart
from lightning_multigpu.planning.scaling.presets import MACHINES, MODELS, moved, profile_of
from lightning_multigpu.planning.scaling.step_model import Candidate, ImpossibleError, one_device, predict

A100 = MACHINES["a100_100gbit"]


class TestModels:
    @pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("gpt3")])
    def test_parameters_are_those_of_the_layers(self, name: str) -> None:
        model = MODELS[name]
        embeddings = (50_257 + model.sequence) * model.width
        assert 12 * model.layers * model.width**2 + embeddings == pytest.approx(model.parameters, rel=0.03)

    def test_a_step(self) -> None:
        """6 x 125e6 x 8,192 FLOPs at half of 312e12; Adam moves 2 x 14 + 2 bytes of each parameter at 2 TB/s."""
        model = MODELS["gpt3_125m"]
        profile = moved(profile_of("gpt3_125m", model), A100)
        phases = profile.phases
        assert profile.samples == 4
        assert phases.forward_s + phases.backward_s == pytest.approx(6 * 125e6 * 8192 / 156e12)
        assert phases.optimizer_s == pytest.approx(30 * 125e6 / 2e12)
        assert (profile.held.total, profile.gradient_bytes) == (16 * 125e6, 2 * 125e6)
        layer_bytes = 4 * (34 * 2048 * 768 + 5 * 12 * 2048**2)
        assert profile.activations_bytes == 12 * layer_bytes
        assert sum(size for size, _ in profile.gradients) == pytest.approx(profile.gradient_bytes, rel=1e-4)

    def test_split_layers(self) -> None:
        """Two all-reduces forward and two backward of s b h values for each layer; s b h (10 + 24/t) is saved."""
        part = moved(profile_of("", MODELS["gpt3_125m"], [4, 5]), A100).splits
        assert list(part) == [4], "12 heads are not split over 5"
        assert part[4].collectives == [("all_reduce", 2 * 8192 * 768)] * 48
        assert part[4].phases.forward_s == pytest.approx(6 * 125e6 * 8192 / 156e12 / 3 / 4)
        assert part[4].activations_bytes == 12 * 8192 * (768 * 16 + 5 * 12 * 2048 // 4)

    def test_stages(self) -> None:
        """The bubble of equal stages is (P-1)/(M+P-1); transfers are the machine's."""
        profile = moved(profile_of("", MODELS["gpt3_125m"], [2]), A100)
        found = predict(profile, A100, Candidate("pipeline_1f1b"), World(1, 2))
        assert found.bubble_s / (found.bubble_s + found.compute_s) == pytest.approx(1 / 5)
        assert found.memory.total == pytest.approx(16 * 125e6 / 2)
        assert found.exposed_s > 0

    def test_what_is_not_known_is_refused(self) -> None:
        with pytest.raises(ImpossibleError, match="the host's cores"):
            predict(moved(profile_of("", MODELS["gpt3_125m"]), A100), A100, Candidate("sync_ps"), World(1, 2))


def measured(flops: float = 3e12) -> ModelProfile:
    """A step of 1 s forward, 3 s backward and 1 s around it."""
    held = HeldBytes(400, 400, 800)
    phases = Phases(forward_s=1.0, backward_s=3.0, optimizer_s=0.5, other_s=1.0)
    parts = MeasuredParts(samples=8, parts=[PartCost(), *[PartCost(0.5, 1.5, 40)] * 2, PartCost()])
    nothing = HeldBytes(0, 0, 0)
    return ModelProfile(
        name="Net", samples=8, parameters=100, held=held, activations_bytes=10, flops=flops, gradients=[(400, 1.0)],
        phases=phases,
        splits={2: SplitPart(num_ranks=2, phases=phases.times(0.5), collectives=[], held=held, activations_bytes=10)},
        chain=ChainFigures(name="layers", measured=[parts], held=[nothing, *[HeldBytes(200, 200, 400)] * 2, nothing]),
    )  # fmt: skip


class TestMoved:
    def test_to_gpus(self) -> None:
        """3e12 operations at 150e12 a second take 20 ms, of which forward has a quarter as measured."""
        found = moved(measured(), A100, utilisation=150 / 312)
        phases = found.phases
        assert (phases.forward_s, phases.backward_s) == pytest.approx((0.005, 0.015))
        assert phases.optimizer_s == pytest.approx((2 * 400 + 2 * 800 + 400) / 2e12)
        assert phases.other_s == 1.0, "Lightning's loop, as measured"
        assert one_device(found, A100).step_s == pytest.approx(1.02, rel=1e-6)
        assert found.splits[2].phases.forward_s == pytest.approx(0.005 / 2), "half of the whole"
        assert found.chain is not None
        assert found.chain.parts_of(8)[1].backward_s == pytest.approx(0.0075)
        assert "sync_ps" in found.refused

    def test_to_a_laptop(self) -> None:
        """Passes of a pipeline were moved twice, as the time of one device beside them stayed that of here."""
        laptop = MACHINES["laptop"]
        found = moved(measured(), laptop, utilisation=3 / 96)
        assert not found.refused
        assert found.phases.forward_s == pytest.approx(250)
        assert predict(found, laptop, Candidate("gpipe"), World(1, 2)).compute_s == pytest.approx(500)

    def test_without_operations(self) -> None:
        with pytest.raises(ValueError, match="Net has no matrix product"):
            moved(measured(flops=0.0), A100)


class TestCommand:
    def test_the_source_s_example(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "--example", "seed", "--nodes", "4"]) == 0
        page = capsys.readouterr().out
        for text in ("24.576e14 FLOPs", "2.048/N s", "N x 80 Gb/s", "N x 78.1 Gb/s", "4 nodes: 320 Gb/s",
                     "exactly 312.5; 468.8 for a ring", "IB >= N x P GB/s", "42 GB/s measured = 84 %", "2.4576e14",
                     "0.2048/N s a step", "for 4 nodes 3,125 Gb/s"):  # fmt: skip
            assert text in page

    def test_a_ranking(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        options = ["--example=gpt3_125m", "--preset=a100", "--batch=1", f"--json={tmp_path / 'plan.json'}"]
        assert main(["plan", *options]) == 0
        page = capsys.readouterr().out
        assert page.startswith("Nothing was measured here: ")
        assert "125,000,000 parameters, 1 samples a batch" in page
        assert "First choice: " in page
        assert (tmp_path / "plan.json").stat().st_size > 1000

    def test_the_machine_of_a_configuration(self) -> None:
        """It may have other devices than those that measure the model."""
        assert machine_of(Namespace(preset="a100", machine=None, link_gbit=None), "cpu") is MACHINES["a100"]
        with pytest.raises(UsageError, match="pass one of them"):
            machine_of(Namespace(preset="a100", machine=Path("machine.json")), "cpu")


class TestPublished:
    def test_the_result_has_the_table_and_the_page_rows_of_it(self) -> None:
        root = Path(__file__).parents[2]
        result = (root / "benchmarks/results/published.txt").read_text()
        assert "\n".join(table()) in result, "python -m benchmarks.published prints the table"
        header = "| what | published | planner | difference |\n|---|---|---|---|\n"
        lines = (root / "docs/planning.md").read_text().partition(header)[2].partition("\n\n")[0].splitlines()
        assert len(lines) > 1
        assert all(any(row.startswith(line) for row in table()) for line in lines)
