"""Modules of any form, cut at named submodules: they train as on one device, and each stage holds its own part."""

from __future__ import annotations

import ast
from collections import OrderedDict
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.optimizer_state import held_states
from lightning_multigpu.engine.pipeline.splitting.chain import find_chain
from lightning_multigpu.engine.placeholder import Placeholder
from tests.strategies.pipeline.fitted import assert_same_outcomes, loss_by_hand, outcome
from tests.strategies.tasks import Case, assert_same_weights, data_ranks, make_trainer
from tests.world import World

SEED = 23
WIDTH, VOCABULARY = 6, 9
POINTS = ["net.middle", "net.deep", "net.up"]


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

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.tokens(batch["tokens"])
        x = x + 0.1 * torch.randn_like(x) if self.training else x
        found = self.net(x, (batch["tokens"] > 1)[:, None].to(x.dtype), scale=0.7)
        return self.head(found["y"] + 0.1 * found["skip"])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.logits(batch), batch["targets"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.held = [name for name, value in self.named_parameters() if not isinstance(value, Placeholder)]
        optimizer = self.trainer.optimizers[0]
        self.num_states = sum(bool(state) for state in held_states(optimizer).values())
        self.own_buffers = [name for name, value in self.named_buffers() if not isinstance(value, Placeholder)]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.num_validated += 1
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.logits(batch).argmax(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class ByHand(LadderTask):
    """The same on one device, in the same micro-batches with the same random numbers."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = loss_by_hand(self, batch, batch_idx, self.begins(), SEED)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def begins(self) -> list[nn.Module]:
        return [self.net, self.net.middle, self.net.deep, self.net.up]


class ByHandOnce(ByHand):
    def begins(self) -> list[nn.Module]:
        return [self.net, self.net.deep]


def tokens(num_samples: int) -> Any:
    pairs = torch.randint(VOCABULARY, (num_samples, 2), generator=torch.Generator().manual_seed(1))
    return [{"tokens": token, "targets": target} for token, target in pairs]


CASE = Case(
    trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 0.3, "max_epochs": 2}
)


def train(module: LadderTask, strategy: Any, ranks: int, *, sanity: int = 0, **further: Any) -> dict[str, Any]:
    torch.manual_seed(SEED)
    trainer = make_trainer(CASE, strategy, ranks, use_distributed_sampler=False, num_sanity_val_steps=sanity, **further)
    # The last batch is a short one. Were its micro-batches of two sizes, BatchNorm would see them in another order.
    pipelines, rank = data_ranks(trainer), getattr(trainer.strategy, "data_parallel_rank", 0)
    loader = DataLoader(tokens(56)[rank::pipelines], batch_size=16 // pipelines)
    trainer.fit(module, loader, DataLoader(tokens(10), batch_size=5))
    return {
        **outcome(module, trainer),
        "num_validated": module.num_validated - sanity,
        "held": module.held,
        "buffers": module.own_buffers,
        "predicted": [int(x) for batch in trainer.predict(module, loader) or [] for x in batch],
    }


def cut(ranks: int, *, points: list[str] = POINTS, sanity: int = 0, **options: Any) -> dict[str, Any]:
    # The check traces the module four times more: one schedule does for all.
    options = {"verify_steps": 2 * (options.get("schedule") == "gpipe"), **options}
    strategy = PipelineStrategy(split_points=points, num_micro_batches=4, start_method="popen", **options)
    return train(LadderTask(), strategy, ranks, sanity=sanity)


@pytest.fixture(scope="module")
def by_hand() -> dict[str, Any]:
    return train(ByHand(), "auto", 1)


@pytest.fixture(scope="module")
def by_hand_once() -> dict[str, Any]:
    return train(ByHandOnce(), "auto", 1)


def assert_same(results: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    assert_same_outcomes(results, reference)
    assert results[0]["predicted"] == reference["predicted"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_stages_train_as_one_device(schedule: str, by_hand_once: dict[str, Any], world2: World) -> None:
    results = world2.run(cut, 2, points=["net.deep"], schedule=schedule, sanity=1)
    assert_same(results, by_hand_once)
    assert [result["num_validated"] for result in results] == 2 * [by_hand_once["num_validated"]], "steps leave traces"


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_two_stages_a_rank_train_as_one_device(schedule: str, by_hand: dict[str, Any], world2: World) -> None:
    assert_same(world2.run(cut, 2, schedule=schedule), by_hand)


def test_four_stages_train_as_one_device(by_hand: dict[str, Any], world4: World) -> None:
    assert_same(world4.run(cut, 4, sanity=1), by_hand)


def test_activations_are_computed_again(by_hand: dict[str, Any], world2: World) -> None:
    assert_same(world2.run(cut, 2, schedule="interleaved", activation_checkpointing=True), by_hand)


@pytest.mark.parametrize("sanity", [0, 1])
def test_a_stage_holds_what_its_piece_uses(sanity: int, world2: World) -> None:
    """Whether training or validation comes first, and with what only one of the two uses."""
    last, first = world2.run(cut, 2, points=["net.deep"], sanity=sanity)
    everywhere = {"net.down.weight"}
    norms = [f"net.{norm}.{name}" for norm in ("first", "second", "auxiliary") for name in ("weight", "bias")]
    own = {"tokens.weight", "net.middle.weight", *norms}
    assert set(first["held"]) == everywhere | own
    assert set(last["held"]) == everywhere | {"net.deep.1.weight", "net.deep.1.bias", "head.weight", "head.bias"}
    assert last["buffers"] == []
    assert len(first["buffers"]) == 10


class Whole(LadderTask):
    """The LightningModule's own forward pass is cut, and a parameter of it is used outside of that too."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        found = self.net(x, (tokens > 1)[:, None].to(x.dtype), scale=0.7)
        return self.head(found["y"])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch["tokens"]), batch["targets"]) + self.head.bias.square().sum()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch["tokens"]).argmax(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def without_chance(module: LadderTask) -> LadderTask:
    """Its micro-batches are independent of each other, and of random numbers."""
    for name, part in module.net.named_children():
        if isinstance(part, nn.BatchNorm1d):
            setattr(module.net, name, nn.LayerNorm(WIDTH))
    module.net.deep[2] = nn.Identity()
    return module


class LadderQuiet(LadderTask):
    """Without noise."""

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.tokens(batch["tokens"])
        found = self.net(x, (batch["tokens"] > 1)[:, None].to(x.dtype), scale=0.7)
        return self.head(found["y"] + 0.1 * found["skip"])


def resume() -> tuple[list[float], dict[str, Tensor]]:
    path = "cut.ckpt"
    strategy = PipelineStrategy(split_points=["net.deep"], num_micro_batches=4)
    case = Case(max_epochs=1)
    loader = DataLoader(tokens(32), batch_size=16)
    torch.manual_seed(SEED)
    first = make_trainer(case, strategy, 2, use_distributed_sampler=False)
    first.fit(without_chance(LadderQuiet()), loader)
    first.save_checkpoint(path)
    module = without_chance(LadderQuiet())
    again = make_trainer(
        Case(max_epochs=2), PipelineStrategy(split_points=["net.up"], num_micro_batches=4), 2,
        use_distributed_sampler=False,
    )  # fmt: skip
    again.fit(module, loader, ckpt_path=path)
    again.strategy.barrier()
    again.strategy.remove_checkpoint(path)
    assert module.num_states == len(module.held), "states of parameters that other stages have"
    return module.losses, {name: value.clone() for name, value in module.state_dict().items()}


def test_a_run_goes_on_with_other_split_points(world2: World) -> None:
    """The states of the optimizer go where the parameters are, once that is known."""
    module = without_chance(LadderQuiet())
    trainer = make_trainer(Case(max_epochs=2), "auto", 1)
    trainer.fit(module, DataLoader(tokens(32), batch_size=16))
    for losses, weights in world2.run(resume):
        assert losses == pytest.approx(module.losses[2:], rel=1e-9)
        assert_same_weights({"weights": weights}, {"weights": module.state_dict()})


class LadderLate(LadderQuiet):
    """Builds its net when the ranks know of each other."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(6)
            self.net = without_chance(LadderQuiet()).net


def trained(cls: type[LadderTask], strategy: Any = "auto", ranks: int = 1, **further: Any) -> dict[str, Any]:
    module = cls()
    return train(module if cls is LadderLate else without_chance(module), strategy, ranks, **further)


def cut_quiet(cls: type[LadderTask], ranks: int, precision: str = "64-true", **options: Any) -> dict[str, Any]:
    strategy = PipelineStrategy(**{"split_points": ["net.deep"], "num_micro_batches": 4, **options})
    return trained(cls, strategy, ranks, precision=precision)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Whole, {"module": "", "split_points": ["head"]}),
        (Whole, {"module": ""}),
        (LadderLate, {}),
    ],
    ids=["head", "whole", "configure_model"],
)
def test_other_modules_are_cut(cls: type[LadderTask], options: dict[str, Any], world2: World) -> None:
    """The LightningModule itself, and one that is built by configure_model, whose whole weights are on rank 0."""
    results, reference = world2.run(cut_quiet, cls, 2, **options), trained(cls)
    assert_same(results[:1] if cls is LadderLate else results, reference)


def test_two_pipelines_side_by_side(world4: World) -> None:
    reference = trained(LadderQuiet)
    for result in world4.run(cut_quiet, LadderQuiet, 4, pipeline_parallel_size=2):
        assert_same_weights(result, reference)


def test_bfloat16(world2: World) -> None:
    """Cut or not, every operation rounds its inputs alike; what differs is the order of sums."""
    reference = trained(LadderQuiet, precision="bf16-mixed")
    for result in world2.run(cut_quiet, LadderQuiet, 2, precision="bf16-mixed"):
        for name, value in reference["weights"].items():
            assert torch.linalg.vector_norm(result["weights"][name] - value) <= 3e-2 * torch.linalg.vector_norm(value)


class Residuals(nn.Sequential):
    """A container whose own forward pass adds to what its layers compute."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + layer(x)
        return x


class Between(nn.Module):
    """Computes between its layers: something is added, a result is changed in place, or an older one is used."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        names = ["first", "second", "third", "fourth"]
        layers = OrderedDict((name, nn.Linear(WIDTH, WIDTH)) for name in names)
        self.layers = Residuals(layers) if kind == "inside" else nn.Sequential(layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "inside":
            return self.layers(x)  # type: ignore[no-any-return]
        results = [x]
        for layer in self.layers:
            y = results[-1] if self.kind != "older" or len(results) < 3 else results[-1] + results[-2]
            y = layer(y)
            if self.kind == "in place":
                y.mul_(0.9)
            results.append(y + results[-1] if self.kind == "residual" else y)
        return results[-1]


class BetweenTask(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.net = Between(kind)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.head(self.net(self.tokens(batch["tokens"])))
        return nn.functional.cross_entropy(logits, batch["targets"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


KINDS = ("residual", "inside", "in place", "older")


def pasted(kinds: list[str], strategies: list[Any], ranks: int = 2) -> list[dict[str, Any]]:
    """Trains each kind with its strategy, given as code or as a name."""
    found = []
    for kind, strategy in zip(kinds, strategies, strict=True):
        module = BetweenTask(kind)
        given = eval(strategy, {"PipelineStrategy": PipelineStrategy}) if "(" in strategy else strategy
        trainer = make_trainer(Case(max_epochs=1), given, ranks, use_distributed_sampler=False)
        trainer.fit(module, DataLoader(tokens(16), batch_size=8))
        found.append({"weights": module.state_dict()})
    return found


def test_what_is_computed_between_layers_is_told_a_line_that_trains_it(world2: World) -> None:
    """The answer was to rewrite the module; the line in the message trains it as it is, like one device."""
    kinds, schedules = list(KINDS), ("1f1b", "gpipe", "1f1b", "interleaved")
    lines = []
    for kind, schedule in zip(kinds, schedules, strict=True):
        before = f"PipelineStrategy(schedule={schedule!r})"
        errors = world2.run_raising(PipelineError, r"unchanged.* PipelineStrategy\(", pasted, [kind], [before])
        (options,) = {str(error).partition("PipelineStrategy(")[2].partition(")")[0] for error in errors}
        assert options.startswith("module='net', split_points=['net.layers.")
        lines.append(f"PipelineStrategy({options}, schedule={schedule!r})")
    references = pasted(kinds, ["auto"] * len(kinds), 1)
    for results in world2.run(pasted, kinds, lines):
        for result, reference in zip(results, references, strict=True):
            assert_same_weights(result, reference)


class Convolutions(L.LightningModule):
    """Layers are attributes, and most parameters are in one of them."""

    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.net = ConvNet() if nested else None
        if not nested:
            for name, layer in ConvNet().named_children():
                self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return ConvNet.forward(self, x) if self.net is None else self.net(x)  # type: ignore[arg-type, no-any-return]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.pool, self.fc1, self.fc2 = nn.MaxPool2d(2), nn.Linear(32, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))  # type: ignore[no-any-return]


def convolved(nested: bool, strategy: Any, ranks: int) -> dict[str, Any]:
    module, generator = Convolutions(nested=nested), torch.Generator().manual_seed(5)
    images, labels = torch.randn(24, 1, 8, 8, generator=generator), torch.randint(3, (24,), generator=generator)
    trainer = make_trainer(Case(max_epochs=1), strategy, ranks, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(TensorDataset(images, labels), 8))
    return {"weights": trainer.strategy.lightning_module_state_dict()}


def suggested(nested: bool, stages: int) -> list[str]:
    """The split points of the message that the module gets without any."""
    with pytest.raises(ValueError, match=r"split_points=") as caught:
        find_chain(Convolutions(nested=nested), "auto", stages)
    return ast.literal_eval(str(caught.value).rpartition("split_points=")[2].rstrip(")"))  # type: ignore[no-any-return]


def cut_as_suggested(nested: bool, ranks: int) -> dict[str, Any]:
    points = suggested(nested, ranks)
    return convolved(nested, PipelineStrategy(split_points=points, start_method="popen"), ranks)


@pytest.mark.parametrize(("nested", "ranks"), [(False, 2), (True, 4)])
def test_layers_that_are_attributes_are_cut_where_the_message_says(
    nested: bool, ranks: int, world2: World, world4: World
) -> None:
    """The message said to use fewer devices, since no cut makes stages of similar size."""
    world = world2 if ranks == 2 else world4
    assert_same_weights(world.run(cut_as_suggested, nested, ranks)[0], convolved(nested, "auto", 1))
    assert len(suggested(nested, 8)) == 3
