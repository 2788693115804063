"""Presets and the source's arithmetic, compared with figures worked out by hand."""

from pathlib import Path

import pytest

from benchmarks.published import table
from lightning_multigpu.cli import main
from lightning_multigpu.planning.scaling.machine import World
from lightning_multigpu.planning.scaling.presets import MODELS, NODES, profile_of
from lightning_multigpu.planning.scaling.step_model import Candidate, ImpossibleError, predict

A100 = NODES["a100_100gbit"]


class TestModels:
    @pytest.mark.parametrize("name", MODELS)
    def test_parameters_are_those_of_the_layers(self, name: str) -> None:
        model = MODELS[name]
        embeddings = (50_257 + 2048) * model.width
        assert 12 * model.layers * model.width**2 + embeddings == pytest.approx(model.parameters, rel=0.03)

    def test_a_step(self) -> None:
        """6 x 125e6 x 8,192 FLOPs at half of 312e12; Adam moves 2 x 14 + 2 bytes of each parameter at 2 TB/s."""
        profile = profile_of("gpt3_125m", A100)
        phases = profile.phases
        assert profile.samples == 4
        assert phases.forward_s + phases.backward_s == pytest.approx(6 * 125e6 * 8192 / 156e12)
        assert phases.optimizer_s == pytest.approx(30 * 125e6 / 2e12)
        assert (profile.held.total, profile.gradient_bytes) == (16 * 125e6, 2 * 125e6)
        layer_bytes = 4 * (34 * 2048 * 768 + 5 * 12 * 2048**2)
        assert profile.activations_bytes == 12 * layer_bytes
        assert sum(size for size, _ in profile.gradients) == pytest.approx(profile.gradient_bytes, rel=1e-4)

    @pytest.mark.parametrize(
        ("strategy", "message"),
        [("sync_ps", "runs on the host"), ("gpipe", "stages of a preset"), ("tensor_split", "no split of the layers")],
    )
    def test_what_is_not_known_is_refused(self, strategy: str, message: str) -> None:
        with pytest.raises(ImpossibleError, match=message):
            predict(profile_of("gpt3_125m", A100), A100.machine("a100"), Candidate(strategy), World(1, 2))


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


class TestPublished:
    def test_the_result_has_the_table_and_the_page_rows_of_it(self) -> None:
        root = Path(__file__).parents[2]
        result = (root / "benchmarks/results/published.txt").read_text()
        assert "\n".join(table()) in result, "python -m benchmarks.published prints the table"
        header = "| what | published | planner | difference |\n|---|---|---|---|\n"
        lines = (root / "docs/planning.md").read_text().partition(header)[2].partition("\n\n")[0].splitlines()
        assert len(lines) > 1
        assert all(any(row.startswith(line) for row in table()) for line in lines)
