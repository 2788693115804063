"""Modules of any form, cut at named submodules: they train as on one device, and each stage holds its own part."""

from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.optimizer_state import held_states
from lightning_multigpu.engine.placeholder import Placeholder
from tests.strategies.pipeline.fitted import assert_same_outcomes, outcome
from tests.strategies.tasks import Case, assert_same_weights, fit_module, make_trainer, state
from tests.world import World

SEED = 23
WIDTH, VOCABULARY = 6, 9


class Ladder(nn.Module):
    """A skip connection over all split points, dropout, BatchNorm, work in place, tied weights, two kinds of input."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)  # BatchNorm leaves a bias a gradient of rounding errors only
        self.first = nn.BatchNorm1d(WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.BatchNorm1d(WIDTH)
        self.deep = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up.weight = self.down.weight
        self.auxiliary = nn.BatchNorm1d(WIDTH)  # in training only
        self.register_buffer("offset", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor, mask: Tensor, *, scale: float) -> dict[str, Any]:
        skip = torch.relu(self.first(self.down(x)))
        y = self.second(self.middle(skip * mask)) + self.offset
        if self.training:
            y = y + 0.1 * self.auxiliary(y)
        z = self.deep(y) * scale
        return {"y": torch.tanh(self.up(z + skip)), "skip": skip, "nothing": None}


class LadderTask(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.net = Ladder()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.losses: list[float] = []
        self.num_validated = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        found = self.net(x, (tokens > 1)[:, None].to(x.dtype), scale=0.7)
        return self.head(found["y"] + 0.1 * found["skip"])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch["tokens"]), batch["targets"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.held = [name for name, value in self.named_parameters() if not isinstance(value, Placeholder)]
        self.num_states = sum(bool(state) for state in held_states(self.trainer.optimizers[0]).values())
        self.own_buffers = [name for name, value in self.named_buffers() if not isinstance(value, Placeholder)]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.num_validated += 1
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch["tokens"]).argmax(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def tokens(num_samples: int) -> Any:
    pairs = torch.randint(VOCABULARY, (num_samples, 2), generator=torch.Generator().manual_seed(1))
    return [{"tokens": token, "targets": target} for token, target in pairs]


CUT: dict[str, Any] = {"split_points": ["net.deep"], "num_micro_batches": 4}
CASE = Case(
    trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 0.75, "max_epochs": 1}
)


def train(task: LadderTask, ranks: int = 1, *, sanity: int = 0, **options: Any) -> dict[str, Any]:
    torch.manual_seed(SEED)
    strategy = PipelineStrategy(**{**CUT, **options}) if ranks > 1 else "auto"
    trainer = make_trainer(CASE, strategy, ranks, use_distributed_sampler=False, num_sanity_val_steps=sanity)
    # The last batch is a short one. Were its micro-batches of two sizes, BatchNorm would see them in another order.
    loader = DataLoader(tokens(56), batch_size=16)
    trainer.fit(task, loader, DataLoader(tokens(10), batch_size=5))
    return {
        **outcome(task, trainer),
        "num_validated": task.num_validated - sanity,
        "held": task.held,
        "buffers": task.own_buffers,
        "predicted": [int(x) for batch in trainer.predict(task, loader) or [] for x in batch],
    }


def assert_same(results: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    assert_same_outcomes(results, reference)
    assert results[0]["predicted"] == reference["predicted"]


EVERYWHERE = {"net.down.weight"}
NORMS = [f"net.{norm}.{name}" for norm in ("first", "second", "auxiliary") for name in ("weight", "bias")]
HELD = [
    EVERYWHERE | {"net.deep.1.weight", "net.deep.1.bias", "head.weight", "head.bias"},
    EVERYWHERE | {"tokens.weight", "net.middle.weight", *NORMS},
]
"""By the last stage, and by the first."""


def test_a_stage_holds_what_its_piece_uses(world2: World) -> None:
    """Also of what training or validation alone uses, whichever comes first: here validation, below training."""
    results = world2.run(lambda: train(LadderTask(), 2, sanity=1, verify_steps=0))
    assert [set(result["held"]) for result in results] == HELD
    assert [len(result["buffers"]) for result in results] == [0, 10]


class Whole(LadderTask):
    """The LightningModule's own forward pass is cut, and a parameter of it is used outside of that too."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) + self.head.bias.square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def without_chance(module: LadderTask) -> LadderTask:
    """Its micro-batches are independent of each other, and of random numbers."""
    for name, part in module.net.named_children():
        if isinstance(part, nn.BatchNorm1d):
            setattr(module.net, name, nn.LayerNorm(WIDTH))
    module.net.deep[2] = nn.Identity()
    return module


def resumable(module: LadderTask, point: str | None, **options: Any) -> L.Trainer:
    torch.manual_seed(SEED)
    strategy, ranks = (PipelineStrategy(split_points=[point], num_micro_batches=4), 2) if point else (None, 1)
    loader = DataLoader(tokens(32), batch_size=16)
    return fit_module(without_chance(module), strategy, ranks, Case(), loader, use_distributed_sampler=False, **options)


def resume() -> dict[str, Any]:
    module, path = LadderTask(), "cut.ckpt"
    resumable(LadderTask(), "net.deep", max_epochs=1).save_checkpoint(path)
    again = resumable(module, "net.up", max_epochs=2, ckpt_path=path)
    again.strategy.barrier()
    again.strategy.remove_checkpoint(path)
    assert module.num_states == len(module.held), "states of parameters that other stages have"
    return {"losses": module.losses, "weights": state(module)}


def test_a_run_goes_on_with_other_split_points(world2: World) -> None:
    """The states of the optimizer go where the parameters are, once that is known."""
    module = LadderTask()
    resumable(module, None, max_epochs=2)
    for result in world2.run(resume):
        assert result["losses"] == pytest.approx(module.losses[2:], rel=1e-9)
        assert_same_weights(result, {"weights": state(module)})


class LadderLate(LadderTask):
    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(6)
            self.net = without_chance(LadderTask()).net


def trained(cls: type[LadderTask], ranks: int = 1, **options: Any) -> dict[str, Any]:
    module = cls()
    return train(module if cls is LadderLate else without_chance(module), ranks, **options)


one_device = cache(trained)


def test_stages_train_as_one_device(world2: World) -> None:
    reference = one_device(LadderTask)
    results = world2.run(trained, LadderTask, 2)
    assert_same(results, reference)
    assert [set(result["held"]) for result in results] == HELD
    assert [result["num_validated"] for result in results] == 2 * [reference["num_validated"]], "steps leave traces"
    points = ["net.middle", "net.deep", "net.up"]
    assert_same(world2.run(trained, LadderTask, 2, split_points=points, schedule="interleaved"), reference)


WHOLE = {"module": "", "split_points": ["net.middle", "net.deep", "head"], "schedule": "interleaved"}


@pytest.mark.parametrize(("cls", "options"), [(Whole, WHOLE), (LadderLate, {})])
def test_other_modules_are_cut(cls: type[LadderTask], options: dict[str, Any], world2: World) -> None:
    """The LightningModule itself, and one that is built by configure_model, whose whole weights are on rank 0."""
    results = world2.run(trained, cls, 2, **options)
    assert_same(results[:1] if cls is LadderLate else results, one_device(cls))
