"""Pipelines side by side with split layers in their stages train as one device."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_multigpu.callbacks import RunReport
from lightning_multigpu.engine.tensor_split.parts import local
from lightning_multigpu.planning.pipelines.stage_costs import StageCosts
from tests.report.examples import assert_follows_schema
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    data_ranks,
    dataset,
    eval_loader,
    fit,
    make_strategy,
    make_trainer,
    state,
)
from tests.strategies.tensor_parallel.language import LENGTH, VOCABULARY, WIDTH, Attention, Task, fused, normed
from tests.world import World

CLIPPED = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}


def hybrid(**options: Any) -> Any:
    """With two micro-batches, as many as there are stages; the tests that train the classifier have the default."""
    return make_strategy("hybrid", **{"num_micro_batches": 2, **options})


def sizes(data: int, pipeline: int, tensor: int) -> dict[str, int]:
    return {"data_parallel_size": data, "pipeline_parallel_size": pipeline, "tensor_parallel_size": tensor}


def test_pipelines_of_whole_layers_side_by_side(world4: World) -> None:
    """The other shapes are those of test_gradients_in_hooks.py."""
    case = Case(optimizer="adamw", num_samples=24, trainer=CLIPPED, validate=True, max_epochs=1)
    reference: Any = fit(case, None, 1)
    for result in world4.run(fit, replace(case, strategy=sizes(2, 2, 1)), "hybrid", 4):
        assert_same_weights(result, reference)
        assert result["metrics"] == pytest.approx(reference["metrics"], rel=1e-9)


def test_pipelines_of_split_layers(world4: World) -> None:
    ways = (
        {"schedule": "interleaved"},
        {"schedule": "zero_bubble"},
        {"balance": "memory", "activation_checkpointing": True},
    )
    case = Case(num_samples=24, trainer=CLIPPED, max_epochs=1)
    reference: Any = fit(case, None, 1)
    fits = lambda: [fit(replace(case, strategy=options), "hybrid", 4) for options in ways]  # noqa: E731
    for results in world4.run(fits, timeout_s=180):
        for result in results:
            assert_same_weights(result, reference)


class Noting(Callback):
    """The elements of parameters that the rank holds, and the number of its pipeline."""

    held = 0
    pipeline: int | None = None

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if trainer.world_size > 1 and (stages := strategy.stage_record()) is not None:
            self.pipeline = stages.pipeline
        self.held = sum(local(p).numel() for p in module.parameters() if trainer.world_size == 1 or strategy.holds(p))


class Dealt(Task):
    """The tokens of each global batch are dealt out to the data ranks."""

    def train_dataloader(self) -> Any:
        tokens = torch.randint(VOCABULARY, (16, LENGTH), generator=torch.Generator().manual_seed(1))
        data, ranks = TensorDataset(tokens), data_ranks(self.trainer)
        order = DistributedSampler(data, 1, 0, shuffle=True, seed=0) if ranks == 1 else None
        return DataLoader(data, batch_size=4 // ranks, shuffle=order is None, sampler=order)


class Built(Dealt):
    def __init__(self) -> None:
        super().__init__(nn.Identity)

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            torch.manual_seed(3)
            self.model = fused()


def built(ranks: int) -> dict[str, Any]:
    task, noting = Built(), Noting()
    plan = {"*.attention.qkv": "column", "*.attention.proj": "row"}
    strategy = hybrid(plan=plan) if ranks > 1 else "auto"
    make_trainer(Case(max_epochs=1), strategy, ranks, callbacks=[noting], gradient_clip_val=0.5).fit(task)
    return {"weights": state(task), "held": noting.held}


def test_configure_model_builds_stages_whose_layers_are_split_by_a_plan(world4: World) -> None:
    reference = built(1)
    results = world4.run(built, 4)
    assert_same_weights(results[0], reference)
    for result in results:
        assert 0.4 * reference["held"] < result["held"] < 0.6 * reference["held"], "the rest is whole"


def log_probabilities() -> nn.Module:
    hidden = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), hidden, nn.Linear(WIDTH, VOCABULARY), nn.LogSoftmax(-1))


class Logits(Dealt):
    """The head is a layer of the pipeline that another one follows, and what it returns goes to another stage."""

    def __init__(self) -> None:
        super().__init__(log_probabilities)
        self.tokens = torchmetrics.SumMetric()

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        return F.nll_loss(self.model(tokens)[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.tokens(batch[0])
        self.log("tokens", self.tokens, on_epoch=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(8 * LENGTH).view(8, LENGTH) % VOCABULARY), batch_size=2)


def logits(ranks: int, **options: Any) -> dict[str, Any]:
    task, noting = Logits(), Noting()
    strategy = hybrid(**options) if ranks > 1 else "auto"
    report = RunReport(print_table=False, write_file=False)
    trainer = make_trainer(Case(max_epochs=1), strategy, ranks, callbacks=[noting, report])
    trainer.fit(task)
    tokens = float(trainer.callback_metrics["tokens"])
    found = {"weights": state(task), "tokens": tokens, "held": noting.held, "report": report.report}
    return {**found, "pipeline": noting.pipeline}


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2)], ids=str)
def test_logits_between_layers_and_sums_of_samples(world4: World, shape: tuple[int, int, int]) -> None:
    """What is split leaves no stage in parts, and ranks of a tensor group do not count a sample twice."""
    reference = logits(1)
    options = {"balance": [3, 1]} if shape[1] > 1 else {}
    results = world4.run(logits, 4, **options, **sizes(*shape))
    for result in results:
        assert_same_weights(result, reference)
        assert result["tokens"] == reference["tokens"]
        assert result["held"] < 0.6 * reference["held"]
        report = result["report"]
        assert_follows_schema(report)
        assert len(report["tensor_split"]["ranks"]) == shape[1] * shape[2], "those of one pipeline"
    assert len({result["pipeline"] for result in results}) == shape[0] * shape[2]
    assert options == {} or results[0]["held"] == 0, "the last stage has no parameters"


def fit_task(make: Callable[[], L.LightningModule], strategy: Any, ranks: int, **options: Any) -> dict[str, Any]:
    task = make()
    with pytest.MonkeyPatch.context() as patch:  # of what has been measured
        patch.setattr(StageCosts, "bounds", lambda self, balance: [(0, 1), (1, 4)])
        make_trainer(Case(max_epochs=1), strategy, ranks, **options).fit(task)
    return {"weights": state(task)}


def test_whole_layers_within_blocks_that_move_to_another_stage(world4: World) -> None:
    """The norms of queries get a part of their gradient on each rank of a tensor group."""
    make, options = partial(Dealt, partial(normed, 4)), {"gradient_clip_val": 0.5}
    reference = fit_task(make, "auto", 1, **options)
    for result in world4.run(lambda: fit_task(make, hybrid(balance="time"), 4, **options)):
        assert_same_weights(result, reference)


class SometimesNormed(Dealt):
    """Does without the norms within its attention in every other batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for part in self.model.modules():
            if isinstance(part, Attention):
                part.is_normed = batch_idx % 2 == 0


def test_whole_layers_within_blocks_that_a_batch_does_not_use(world2: World) -> None:
    """They got a gradient of zeros, and momentum moved them; one device leaves them alone."""
    make = partial(SometimesNormed, normed)
    reference = fit_task(make, "auto", 1)
    for result in world2.run(lambda: fit_task(make, make_strategy("hybrid", **sizes(1, 1, 2)), 2)):
        assert_same_weights(result, reference)


class Written(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.values: list[float] = []

    def write_on_batch_end(self, *args: Any) -> None:
        self.values += args[2].tolist()


def written() -> list[float]:
    writer = Written()
    make_trainer(Case(), make_strategy("hybrid"), 4, callbacks=[writer]).predict(Classifier(), eval_loader(21))
    return writer.values


def test_each_prediction_is_written_once(world4: World) -> None:
    expected = [float(x[0]) for x, _ in dataset(21, seed=6)]
    found = [value for values in world4.run(written) for value in values]
    assert sorted(found) == pytest.approx(sorted(expected))


def test_gradients_between_pipelines_are_compressed(world4: World) -> None:
    case = Case(max_epochs=1)
    reference: Any = fit(case, None, 1)
    options = {**sizes(2, 1, 2), "compression": "int8", "shared_memory": False}
    for result in world4.run(fit, replace(case, strategy=options), "hybrid", 4):
        flat, expected = (
            torch.cat([value.flatten() for value in each["weights"].values()]) for each in (result, reference)
        )
        difference = torch.linalg.vector_norm(flat - expected) / torch.linalg.vector_norm(expected)
        assert 1e-6 < difference < 1e-2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (sizes(1, 1, 2), r"times tensor_parallel_size=2 makes 2 ranks, and there are 4"),
        ({"data_parallel_size": 3}, "data_parallel_size=3 times"),
        ({**sizes(2, 2, 1), "plan": {"*": "column"}}, "no layer is split; leave it out, or pass tensor_p"),
        ({**sizes(1, 2, 2), "compression": "bf16"}, r"compression=.* with data_parallel_size=1: no gradients travel"),
        ({"split_points": ["layers.2"]}, "pass tensor_parallel_size=1"),
        ({**sizes(1, 1, 4), "schedule": "interleaved"}, "pass pipeline_parallel_size=2"),
        ({"num_nodes": 2, "tensor_parallel_size": 8}, "a host has 4 ranks"),
        ({"gather_at_end": False, "start_method": "spawn"}, "the parts of the model would be lost"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    num_nodes = options.pop("num_nodes", 1)
    with pytest.raises(ValueError, match=words):
        make_trainer(Case(), make_strategy("hybrid", **options), 4, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(1, (1, 1, 1)), (2, (1, 1, 2)), (3, (3, 1, 1)), (4, (1, 2, 2)), (6, (3, 1, 2)), (8, (2, 2, 2))],
)
def test_sizes_that_are_left_out(ranks: int, expected: tuple[int, int, int]) -> None:
    strategy: Any = make_trainer(Case(), make_strategy("hybrid"), ranks).strategy
    assert (strategy.data_parallel_size, strategy.pipeline_parallel_size, strategy.tensor_parallel_size) == expected
    named = make_trainer(Case(), make_strategy("hybrid", data_parallel_size=1), 4).strategy
    assert named.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
