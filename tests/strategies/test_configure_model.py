"""What ``configure_model`` builds is built by each stage for itself, with the values that one device would give it."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.pipeline.splitting.chain import Chain, find_chain
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.splitting.placeholder import Placeholder
from lightning_multigpu.strategies.pipeline.split_model import built_by_stages, share_values
from tests.strategies.tasks import Case, dataset, eval_loader, make_trainer
from tests.world import World, rank

WIDTH = 64
CASE = Case(max_epochs=2, num_samples=32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH))
        nn.init.trunc_normal_(self.linear.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(self.norm(x)) + self.shift)


class Deep(L.LightningModule):
    """Everything is made in ``configure_model``, and all biases are drawn again when it is there."""

    num_calls = 0

    def configure_model(self) -> None:
        self.num_calls += 1
        if hasattr(self, "blocks"):
            return
        self.first = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, 3)
        self.apply(self.draw)

    def draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.bias, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_held = sum(not isinstance(value, Placeholder) for value in self.blocks.parameters())
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(ranks: int = 1) -> DataLoader[Any]:
    return DataLoader(dataset(CASE.num_samples), batch_size=8 // ranks)


def train(strategy: Any = "auto", ranks: int = 1, pipelines: int = 1, other_split: Any = None) -> dict[str, Any]:
    torch.manual_seed(7 + 10 * rank() if ranks > 1 else 7)  # rank 0's random state counts
    module = Deep()
    trainer = make_trainer(CASE, strategy, ranks, use_distributed_sampler=pipelines > 1)
    if pipelines == 1:
        trainer.fit(module, loader(), eval_loader(8))
    else:
        trainer.fit(module, DataLoader(dataset(CASE.num_samples), batch_size=4, shuffle=True), eval_loader(8))
    drawn = torch.rand(1)
    if other_split is not None:
        trainer = make_trainer(CASE, other_split, ranks)
    metrics = trainer.validate(module, eval_loader(8), verbose=False)
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "val_loss": metrics[0]["val_loss"],
        "held": module.num_held,
        "calls": module.num_calls,
        "drawn": drawn,
    }


def train_in_stages(ranks: int = 2, **options: Any) -> dict[str, Any]:
    pipelines = ranks // options.get("pipeline_parallel_size", ranks)
    # Validation is of the same module, whose layers have to go elsewhere.
    other = PipelineStrategy(balance=[6, 2]) if options.get("schedule") == "1f1b" else None
    result = train(PipelineStrategy(num_micro_batches=4, **options), ranks, pipelines, other)
    real = {name: value for name, value in result["weights"].items() if not isinstance(value, Placeholder)}
    return {**result, "weights": real, "num_weights": len(result["weights"])}


def assert_same(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    for name, value in weights.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_trains_as_on_one_device(schedule: str, world2: World) -> None:
    reference = train()
    last, first = world2.run(train_in_stages, schedule=schedule)
    for result in (last, first):
        assert_same(result["weights"], reference["weights"])
        assert result["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-6)
        assert result["held"] == reference["held"] / 2
        assert result["num_weights"] == len(reference["weights"])
        assert torch.equal(result["drawn"], reference["drawn"]), "random states are those of one device"
    assert list(last["weights"]) == list(reference["weights"]), "rank 0 has the whole model at the end"
    assert len(first["weights"]) < len(reference["weights"]), "no other rank has"
    assert last["calls"] == 2, "of the two calls that build the first has left no trace, then comes validation's"


def test_pipelines_side_by_side(world4: World) -> None:
    results = world4.run(train_in_stages, 4, pipeline_parallel_size=2)
    for result in results[1:]:
        assert_same(result["weights"], results[0]["weights"])
    assert [len(r["weights"]) == r["num_weights"] for r in results] == [True, False, False, False]


def test_layers_that_move_when_they_are_measured(world2: World) -> None:
    reference = train()
    for result in world2.run(train_in_stages, balance="time"):
        assert_same(result["weights"], reference["weights"])


class Profiled(Deep):
    """Notes the most bytes that tensors took at any time from before ``configure_model`` to the start of training."""

    def setup(self, stage: str) -> None:
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self.profile.start()

    def on_fit_start(self) -> None:
        self.profile.stop()
        total = peak = 0
        for event in self.profile.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                total += event.nbytes()
                peak = max(peak, total)
        self.peak_bytes = peak
        del self.profile


def peak() -> tuple[int, int, int]:
    module = Profiled()
    make_trainer(CASE, PipelineStrategy(num_micro_batches=4), 2).fit(module, loader())
    tensors = [*module.parameters(), *module.buffers()]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return module.peak_bytes, sum(sizes), max(sizes)


def test_no_rank_ever_has_more_than_its_part_and_one_tensor(world2: World) -> None:
    for peak_bytes, whole_bytes, largest_bytes in world2.run(peak):
        assert whole_bytes / 2 < peak_bytes < whole_bytes / 2 + 2 * largest_bytes < 0.8 * whole_bytes


def save_and_resume(ranks: int, path: str) -> dict[str, Any]:
    """Trains one epoch, saves, and goes on from there with another module whose first values are others."""
    strategy: Any = [PipelineStrategy(num_micro_batches=4) if ranks > 1 else "auto" for _ in range(2)]
    torch.manual_seed(7)
    trainer = make_trainer(CASE, strategy[0], ranks, max_epochs=1, use_distributed_sampler=False)
    module = Deep()
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    torch.manual_seed(8)
    again = make_trainer(CASE, strategy[1], ranks, use_distributed_sampler=False)
    module = Deep()
    again.fit(module, loader(), ckpt_path=path)
    saved = torch.load(path, weights_only=True) if trainer.is_global_zero else {}
    again.strategy.barrier()
    again.strategy.remove_checkpoint(path)
    values = module.state_dict()
    return {
        "weights": {name: value for name, value in values.items() if not isinstance(value, Placeholder)},
        "saved": saved.get("state_dict"),
        "states": len(saved["optimizer_states"][0]["state"]) if saved else None,
    }


def test_checkpoints_are_whole_and_resume(world2: World, tmp_path: Any) -> None:
    reference = save_and_resume(1, os.fspath(tmp_path / "one.ckpt"))
    results = world2.run(save_and_resume, 2, os.fspath(tmp_path / "two.ckpt"))
    for result in results:
        assert_same(result["weights"], reference["weights"])
    assert_same(results[0]["saved"], reference["saved"])
    assert list(results[0]["saved"]) == list(reference["saved"])
    assert results[0]["states"] == reference["states"]


class Looking(Deep):
    def configure_model(self) -> None:
        super().configure_model()
        assert float(self.blocks[0].linear.weight.sum()) < 1e9  # type: ignore[union-attr,operator]


class Copying(Deep):
    def configure_model(self) -> None:
        super().configure_model()
        self.blocks[7].linear.bias = nn.Parameter(self.blocks[0].linear.bias * 2)  # type: ignore[union-attr,operator]


class FromTemplate(Deep):
    """Takes values from a module that does not stay."""

    def configure_model(self) -> None:
        super().configure_model()
        template = nn.Linear(WIDTH, 3)
        self.head.load_state_dict(template.state_dict())


def split(module: L.LightningModule) -> tuple[Chain, list[tuple[int, int]]]:
    return find_chain(module, "auto", 2), [(0, 4), (4, 8)]


def built(module: L.LightningModule, position: int) -> Ownership:
    with built_by_stages(module, Precision(), split, position, 2):
        module.configure_model()
    return Ownership(module, *split(module), position, 2)


def test_values_that_are_looked_at_are_refused() -> None:
    words = r"Looking.configure_model\(\) cannot be run stage by stage.*build them in Looking.__init__"
    with pytest.raises(ValueError, match=words):
        built(Looking(), 0)


def test_values_of_what_does_not_stay_are_there_for_those_who_take_them() -> None:
    torch.manual_seed(7)
    whole = FromTemplate()
    whole.configure_model()
    for position in (0, 1):
        torch.manual_seed(7)
        module = FromTemplate()
        built(module, position)
        assert isinstance(module.head.weight, Placeholder) == (position == 0)
        assert position == 0 or torch.equal(module.head.weight, whole.head.weight)


class Alone:
    """A world of one rank, or of this one and ranks that say something."""

    def __init__(self, *others: Any) -> None:
        self.others = others

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *self.others]


def test_what_another_rank_lacks_is_told_on_every_rank() -> None:
    other = (False, ["blocks.0.scale", "a", "b", "c", "d"])
    with pytest.raises(ValueError, match=r"rank 1 has no values of blocks\.0\.scale, a, b and 2 more, which it is"):
        share_values(built(Deep(), 1), Alone(other), Alone(), Alone())  # type: ignore[arg-type]


def test_values_that_come_from_other_stages_are_refused() -> None:
    words = "rank 0 has no values of blocks.7.linear.bias, which it is to hold.*independently of each other"
    with pytest.raises(ValueError, match=words):
        share_values(built(Copying(), 1), Alone(), Alone(), Alone())  # type: ignore[arg-type]
