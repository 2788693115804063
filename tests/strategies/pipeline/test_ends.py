"""What stands before and behind the layers lives on the stages that use it, and trains as on one device."""

from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.placeholder import Placeholder
from tests.strategies.pipeline.fitted import assert_same_outcomes, outcome
from tests.strategies.tasks import Case, fit_module
from tests.world import World

VOCABULARY, LENGTH, WIDTH = 40, 3, 6
CASE = Case(trainer={"accumulate_grad_batches": 2})


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) + bias)


class Wide(L.LightningModule):
    """Its embedding and head are larger than its layers."""

    clip: float | None = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.build()
        self.accuracy = torchmetrics.MeanMetric()
        self.losses: list[float] = []
        self.held: list[set[str]] = []

    def build(self) -> None:
        torch.manual_seed(6)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.through(self.embedded(tokens), torch.zeros(()))

    def through(self, x: Tensor, bias: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.held.append({name for name, value in self.named_parameters() if not isinstance(value, Placeholder)})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Tied(Wide):
    def build(self) -> None:
        super().build()
        self.head.weight = self.tokens.weight


class SparseTied(Tied):
    clip = None  # not for sparse gradients

    def build(self) -> None:
        super().build()
        self.tokens.sparse = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Reversed(Wide):
    """Registers its parts in another order than it uses them: by what it registers it would be split evenly."""

    def build(self) -> None:
        torch.manual_seed(6)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.tokens = nn.Embedding(VOCABULARY + 14, WIDTH)


class Mixed(Wide):
    """Has a tied head as well, and every layer adds what is computed before the layers."""

    def build(self) -> None:
        super().build()
        self.bias = nn.Embedding(LENGTH, WIDTH)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.through(self.embedded(tokens), self.bias(torch.arange(LENGTH)))


class Shifted(Mixed):
    """Its layers move to earlier stages as the first batch shows where the embedding and the head are used."""

    def build(self) -> None:
        torch.manual_seed(6)
        self.head = nn.Linear(WIDTH, VOCABULARY + 14, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.tokens, self.bias = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)


class EmbeddingLoss(Wide):
    def forward(self, tokens: Tensor) -> Tensor:
        self.term = self.embedded(tokens)
        return self.through(self.term, torch.zeros(()))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) + self.term.square().mean()


class Branching(Wide):
    """What it computes before the layers depends on values."""

    def embedded(self, tokens: Tensor) -> Tensor:
        x = super().embedded(tokens)
        return x.neg() if x.abs().max() > 0 else x


class Normed(Wide):
    """Keeps statistics of what it computes before the layers."""

    def build(self) -> None:
        super().build()
        self.norm = nn.BatchNorm1d(LENGTH)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.norm(super().embedded(tokens))  # type: ignore[no-any-return]


class Noisy(Wide):
    """Draws the noise of its layers behind that of its embeddings."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.dropout(self.embedded(tokens), 0.5, self.training)
        return self.through(x, torch.rand(WIDTH))


class Apart(Wide):
    """Its validation runs no layer, on which a stage waited forever for the one before it."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_size", self.embedded(batch["tokens"]).square().mean())


class Metric(Wide):
    """Its validation uses the head on the embeddings, when the optimizer has states already."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        found = self.head(self.embedded(batch["tokens"])).argmax(-1)
        super().validation_step(batch, batch_idx)
        self.accuracy(found.double().mean())
        self.log("val_found", self.accuracy)


def text() -> Any:
    texts = [torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(i)) for i in range(16)]
    return [{"tokens": tokens[:-1], "targets": tokens[1:]} for tokens in texts]


def train(cls: type[Wide], strategy: Any, ranks: int, path: Path | None = None, resume: Path | None = None) -> Any:
    module = cls().double()
    loaders = [DataLoader(text(), batch_size=size) for size in (8, 16)]
    max_epochs = 2 if resume is None else 3
    options: dict[str, Any] = {"use_distributed_sampler": False, "gradient_clip_val": cls.clip, "ckpt_path": resume}
    trainer = fit_module(module, strategy, ranks, CASE, *loaders, max_epochs=max_epochs, **options)
    if path is not None:
        trainer.save_checkpoint(path)
    reduced = []
    if ranks > 1:
        strategy.meter.flush()
        reduced = [each.group for each in strategy.meter.steps[-1].operations if each.operation == "all_reduce"]
    return {**outcome(module, trainer), "held": module.held, "reduced": reduced}


@cache
def one_device(cls: type[Wide]) -> Any:
    return train(cls, None, 1)


def pipelined(classes: list[type[Wide]], ranks: int, **options: Any) -> list[Any]:
    options = {"num_micro_batches": 4, **options}
    return [train(cls, PipelineStrategy(**options), ranks) for cls in classes]


def outside(result: Any) -> list[set[str]]:
    """The parameters outside of the layers that a rank held after the first batch, and after the last."""
    batches = result["held"][0], result["held"][-1]
    return [{name for name in held if not name.startswith("layers")} for held in batches]


TOKENS, HEAD, BIAS = "tokens.weight", "head.weight", "bias.weight"
NORM = ("norm.weight", "norm.bias")
ON_FOUR: dict[type[Wide], list[set[str]]] = {  # by position
    Wide: [{TOKENS}, set(), set(), {HEAD}],
    Mixed: [{TOKENS, BIAS}, {BIAS}, {BIAS}, {TOKENS, BIAS}],  # the tied weight, by its first name
}


def test_each_stage_has_what_it_uses(world4: World) -> None:
    """An embedding and a head were on all ranks, with gradients and optimizer states."""
    results = world4.run(pipelined, list(ON_FOUR), 4)
    wide, mixed = world4.output(0).split("Pipeline over ")[1:]
    assert "stage 3 on rank 0: layer 3, 336 B of parameters" in wide
    assert "parameters in all: 2.26 kB on rank 3, 336 B on rank 2, 336 B on rank 1, 2.26 kB" in wide
    assert "parameters in all: 2.40 kB on rank 3, 480 B on rank 2, 480 B on rank 1, 2.40 kB" in mixed
    for kind, (cls, expected) in enumerate(ON_FOUR.items()):
        of_ranks = [result[kind] for result in results]
        assert [outside(result)[-1] for result in reversed(of_ranks)] == expected, cls
        assert_same_outcomes(of_ranks, one_device(cls))


def test_pipelines_side_by_side_move_alike(world4: World) -> None:
    """On the same batches.

    A stage averages what it does not share before it sums what it shares: so the last stage averages while the first
    one runs backward, for which sums would wait.
    """
    results = [result for (result,) in world4.run(pipelined, [Mixed], 4, pipeline_parallel_size=2)]
    assert_same_outcomes(results, one_device(Mixed))
    assert all(result["reduced"].index("data") < result["reduced"].index("pipeline") for result in results)


@pytest.mark.parametrize(
    ("cls", "of_first", "of_last", "options"),
    [
        (SparseTied, {TOKENS}, {TOKENS}, {}),
        (Reversed, {TOKENS}, {HEAD}, {}),
        (Shifted, {TOKENS, BIAS}, {HEAD, BIAS}, {}),
        (Branching, {TOKENS}, {TOKENS, HEAD}, {}),
        (EmbeddingLoss, {TOKENS}, {TOKENS, HEAD}, {}),
        (Apart, {TOKENS}, {TOKENS, HEAD}, {}),
        (Metric, {TOKENS}, {TOKENS, HEAD}, {}),
        (Noisy, {TOKENS}, {TOKENS, HEAD}, {}),  # a placeholder draws no random numbers
        (Normed, {TOKENS, *NORM}, {HEAD}, {"num_micro_batches": 1}),
        (Wide, {TOKENS}, {TOKENS, HEAD}, {"replicated": ["tokens"]}),
        (Mixed, {TOKENS, BIAS}, {TOKENS, BIAS}, {"schedule": "interleaved"}),
    ],
)
def test_values_that_a_stage_needs_are_there(
    cls: type[Wide], of_first: set[str], of_last: set[str], options: dict[str, Any], world2: World
) -> None:
    (last,), (first,) = world2.run(pipelined, [cls], 2, **options)
    assert (outside(first)[-1], outside(last)[-1]) == (of_first, of_last)
    if cls is Metric:
        assert (outside(first)[0], outside(last)[0]) == ({TOKENS}, {HEAD}), "before validation"
    if cls is not Noisy:
        assert_same_outcomes([last, first], one_device(cls))
    if cls is Reversed:
        of_layers = {name for name in first["held"][-1] if name.startswith("layers")}
        assert len(of_layers) == 2 * 1, "the split counts what the first batch has moved"


def test_names_that_there_are_not_are_refused() -> None:
    with pytest.raises(ValueError, match="replicated names 'embedding', which is no part of the module"):
        train(Wide, PipelineStrategy(replicated=["embedding"]), 2)


def test_the_balance_of_parameters_counts_them() -> None:
    """An embedding of as many parameters as two layers stood on a stage with as many layers as the others."""
    width = 8
    module = nn.Sequential(
        nn.Embedding(2 * width, width),
        nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(10)),
        nn.Linear(width, width, bias=False),
    )
    for replicated, expected in ((False, [(0, 2), (2, 6), (6, 10)]), (True, [(0, 3), (3, 6), (6, 10)])):
        options = PipelineStrategy(module="1", replicated=replicated).pipeline_options
        assert options.bounds(options.chain(module, 3, torch.device("cpu")), 3) == expected


class Looking(Wide):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx:  # each stage has one of them
            float((self.tokens.weight.detach() + self.head.weight.detach()).sum())


def test_a_hook_that_looks_at_them_is_told_how_to_keep_them(world2: World) -> None:
    name = "(tokens|head).weight"
    words = rf"computes with parameter {name} \(outside of the layers; replicated=\['{name}'\] keeps it"
    world2.run_raising(PipelineError, words, pipelined, [Looking], 2)


def resumed(path: Path, own: Path) -> Any:
    return train(Tied, PipelineStrategy(num_micro_batches=4), 2, path=own, resume=path)


def test_checkpoints_of_tied_weights_are_those_of_one_device(world2: World, tmp_path: Path) -> None:
    train(Tied, None, 1, path=tmp_path / "one")
    reference = train(Tied, None, 1, path=tmp_path / "three", resume=tmp_path / "one")
    assert_same_outcomes(world2.run(resumed, tmp_path / "one", tmp_path / "own"), reference)
    found, expected = (torch.load(tmp_path / name, weights_only=False) for name in ("own", "three"))
    assert list(found["state_dict"]) == list(expected["state_dict"])
    states, of_one = (checkpoint["optimizer_states"][0]["state"] for checkpoint in (found, expected))
    torch.testing.assert_close(states, of_one, rtol=1e-9, atol=1e-12)
