"""What ``configure_model`` builds is built by each stage for itself, with the values that one device would give it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.chain import Chain, find_chain
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.strategies.pipeline.split_model import built_by_stages
from tests.strategies.tasks import Case, dataset, eval_loader, make_trainer
from tests.world import World, rank

WIDTH = 64
CASE = Case(max_epochs=1, num_samples=32)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(width))
        self.register_buffer("shift", torch.rand(width))
        nn.init.trunc_normal_(self.linear.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(self.norm(x)) + self.shift)


class Deep(L.LightningModule):
    """Everything is made in ``configure_model``, and all biases are drawn again when it is there."""

    num_calls = 0
    width = WIDTH

    def configure_model(self) -> None:
        self.num_calls += 1
        if hasattr(self, "blocks"):
            return
        self.first = nn.Linear(6, self.width)
        self.blocks = nn.ModuleList(Block(self.width) for _ in range(8))
        self.head = nn.Linear(self.width, 3)
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


def loader() -> DataLoader[Any]:
    return DataLoader(dataset(CASE.num_samples), batch_size=8)


def real(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items() if not isinstance(value, Placeholder)}


def train(schedule: Any = None, balance: Any = "parameters") -> dict[str, Any]:
    ranks = 1 if schedule is None else 2
    torch.manual_seed(7 + 10 * rank() if ranks > 1 else 7)  # rank 0's random state counts
    module = Deep()
    strategy = PipelineStrategy(num_micro_batches=4, schedule=schedule, balance=balance) if ranks > 1 else "auto"
    trainer = make_trainer(CASE, strategy, ranks, use_distributed_sampler=False)
    trainer.fit(module, loader(), eval_loader(8))
    drawn = torch.rand(1)
    if schedule == "1f1b":  # validation is of the same module, whose layers have to go elsewhere
        trainer = make_trainer(CASE, PipelineStrategy(balance=[6, 2]), ranks)
    metrics = trainer.validate(module, eval_loader(8), verbose=False)
    return {
        "weights": real(module.state_dict()),
        "num_weights": len(module.state_dict()),
        "val_loss": metrics[0]["val_loss"],
        "held": module.num_held,
        "calls": module.num_calls,
        "drawn": drawn,
    }


def assert_same(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    for name, value in weights.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("schedule", "balance"), [("1f1b", "time"), ("zero_bubble", "parameters")])
def test_trains_as_on_one_device(schedule: str, balance: str, world2: World) -> None:
    reference = train()
    last, first = world2.run(train, schedule, balance)
    for result in (last, first):
        assert_same(result["weights"], reference["weights"])
        assert result["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-6)
        assert balance == "time" or result["held"] == reference["held"] / 2
        assert result["num_weights"] == len(reference["weights"])
        assert torch.equal(result["drawn"], reference["drawn"]), "random states are those of one device"
    assert list(last["weights"]) == list(reference["weights"]), "rank 0 has the whole model at the end"
    assert len(first["weights"]) < len(reference["weights"]), "no other rank has"
    assert last["calls"] == 2, "of the two calls that build the first has left no trace, then comes validation's"


def peak_bytes_of(function: Callable[[], None], profile: Any = None) -> int:
    """The most bytes that tensors took at any time within the call, or since the profile was started."""
    if profile is None:
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        profile.start()
    function()
    profile.stop()
    total = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak


class Profiled(Deep):
    """Notes the most bytes that tensors took at any time from before ``configure_model`` to the start of training."""

    def setup(self, stage: str) -> None:
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self.profile.start()

    def on_fit_start(self) -> None:
        self.peak_bytes = peak_bytes_of(lambda: None, self.profile)
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


class Saving(Deep):
    """Saves after its second batch, and notes the bytes that it took meanwhile."""

    path: Path
    width = 256  # large in comparison with messages

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.peak_bytes = peak_bytes_of(lambda: self.trainer.save_checkpoint(self.path))


def saved(path: Path, ranks: int = 2) -> tuple[int, int]:
    torch.manual_seed(7)
    module = Saving()
    module.path = path
    strategy = PipelineStrategy(num_micro_batches=4) if ranks > 1 else "auto"
    make_trainer(CASE, strategy, ranks, use_distributed_sampler=False).fit(module, loader())
    return module.peak_bytes, max(value.nbytes for value in module.parameters())


def test_a_checkpoint_is_written_tensor_by_tensor(tmp_path: Path, world2: World) -> None:
    """Rank 0 had all of the model and of the optimizer's state in memory while it saved."""
    (streamed_bytes, largest_bytes), other = world2.run(saved, tmp_path / "streamed")
    saved(tmp_path / "one", ranks=1)
    assert max(streamed_bytes, other[0]) < 2 * largest_bytes
    streamed, one = (torch.load(tmp_path / name, weights_only=True) for name in ("streamed", "one"))
    assert list(streamed["state_dict"]) == list(one["state_dict"])
    assert_same(streamed["state_dict"], one["state_dict"])
    states, of_one = (file["optimizer_states"][0]["state"] for file in (streamed, one))
    torch.testing.assert_close(states, of_one, rtol=1e-9, atol=1e-11)


class Reversed(Deep):
    """Registers its head in front of the layers and what it computes before them behind: the first guess is wrong."""

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        self.head = nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(8))
        self.first = nn.Linear(6, WIDTH)


def left_in_parts(directory: Path, ranks: int = 2) -> dict[str, Any]:
    """Trains, saves, validates with the parts in other places, and goes on from the file; with what is refused."""

    def strategy(**options: Any) -> Any:
        return PipelineStrategy(num_micro_batches=4, gather_at_end=False, **options) if ranks > 1 else "auto"

    torch.manual_seed(7)
    module: Deep = Reversed()
    trainer = make_trainer(CASE, strategy(), ranks, use_distributed_sampler=False)
    saves = ModelCheckpoint(directory, filename="last", save_on_train_epoch_end=True)
    trainer.callbacks.append(saves)  # type: ignore[attr-defined]
    trainer.fit(module, loader())
    held = {name for name in real(dict(module.named_parameters())) if not name.startswith("blocks")}
    found: dict[str, Any] = {"held outside of the layers": held, "refused": []}
    inputs = torch.zeros(2, 6).double()
    if ranks > 1:
        for attempt in (lambda: trainer.save_checkpoint(directory / "late"), lambda: module(inputs).sum().item()):
            with pytest.raises(PipelineError) as caught:
                attempt()
            found["refused"].append(str(caught.value))
    validating = make_trainer(CASE, strategy(balance=[6, 2]), ranks)
    found["val_loss"] = validating.validate(module, eval_loader(8), verbose=False)[0]["val_loss"]
    module = Reversed()
    again = make_trainer(CASE, strategy(), ranks, max_epochs=2, use_distributed_sampler=False)
    again.fit(module, loader(), ckpt_path=directory / "last.ckpt")
    return {**found, "weights": real(module.state_dict())}


def test_parts_stay_where_they_are_after_the_run(tmp_path: Path, world2: World) -> None:
    """The first guess of what stands before and behind the layers is wrong, too."""
    reference = left_in_parts(tmp_path / "one", ranks=1)
    results = world2.run(left_in_parts, tmp_path)
    assert [result["held outside of the layers"] for result in results] == [
        {"head.weight", "head.bias"},
        {"first.weight", "first.bias"},
    ]
    assert set.union(*(set(result["weights"]) for result in results)) == set(reference["weights"])
    for result in results:
        assert_same(result["weights"], reference["weights"])
        assert result["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-6)
        late, computed = result["refused"]
        assert "gather_at_end=False has left each rank its part of the model; save it during the run" in late
        assert "gather_at_end=False left it on another rank; load a checkpoint to have all values" in computed
    assert not (tmp_path / "late").exists()


class Looking(Deep):
    def configure_model(self) -> None:
        super().configure_model()
        assert float(self.blocks[0].linear.weight.sum()) < 1e9  # type: ignore[union-attr,operator]


class Copying(Deep):
    def configure_model(self) -> None:
        super().configure_model()
        self.blocks[7].linear.bias = nn.Parameter(self.blocks[0].linear.bias * 2)  # type: ignore[union-attr,operator]


def split(module: L.LightningModule) -> tuple[Chain, list[tuple[int, int]]]:
    return find_chain(module, "auto", 2), [(0, 4), (4, 8)]


def built(module: L.LightningModule, position: int) -> Ownership:
    with built_by_stages(module, Precision(), split, position, 2):
        module.configure_model()
    return Ownership(module, *split(module), position, 2, Alone(None))  # type: ignore[arg-type]


def test_values_that_are_looked_at_are_refused() -> None:
    words = r"Looking.configure_model\(\) cannot be run stage by stage.*build them in Looking.__init__"
    with pytest.raises(ValueError, match=words):
        built(Looking(), 0)


class Alone:
    """A world of one rank, or of this one and ranks that say something."""

    def __init__(self, *others: Any) -> None:
        self.others = others
        self.num_ranks = 1 + len(others)
        self.ranks = list(range(self.num_ranks))

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *self.others]


def test_what_no_rank_has_is_told_on_every_rank() -> None:
    first, copying = (built(Copying(), position) for position in (0, 1))
    for mine, missing, words in (
        (first, {"blocks.4.scale", "blocks.5.scale", "blocks.6.scale", "head.weight"}, "blocks.4.scale, .* 1 more: c"),
        (copying, first.missing(), "blocks.7.linear.bias: .*independently of each other"),
    ):
        with pytest.raises(ValueError, match=rf"no rank of a pipeline has values of {words}"):
            mine.share(Alone(missing), Alone())  # type: ignore[arg-type]
