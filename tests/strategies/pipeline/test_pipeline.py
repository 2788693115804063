"""What is particular to pipelines: micro-batches, random numbers, what a stage holds, and what it tells the others."""

import subprocess
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning, LambdaCallback, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.micro_batches import num_micro_batches_of, split_batch
from lightning_multigpu.engine.optimizer_state import held_states
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.step_state import seed_of, set_random_state
from lightning_multigpu.strategies import base
from lightning_multigpu.strategies.pipeline.pipeline_checks import (
    check_callbacks,
    check_loggers,
    check_module,
    check_optimizers,
)
from tests.modules import TwoOptimizers
from tests.strategies.pipeline.fitted import assert_same_outcomes, fitted, outcome
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    fit_module,
    make_trainer,
    moving_average,
    train_loader,
)
from tests.world import World, rank

SEED = 17
LENGTH, VOCABULARY, WIDTH = 5, 11, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(x)
        weights = (self.mix(y) @ y.transpose(1, 2)).masked_fill(mask, -1e9).softmax(-1)
        return x + self.dropout(self.out(torch.tanh(weights @ y)))


class Average(torchmetrics.Metric):
    """States are averaged over ranks, so that a rank without samples must not count."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.zeros(()), dist_reduce_fx="mean")
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, value: Tensor) -> None:
        self.value = value.detach().float()
        self.values.append(value.detach().reshape(1))  # type: ignore[union-attr,operator]

    def compute(self) -> Tensor:
        values = self.values if isinstance(self.values, Tensor) else torch.cat(self.values)  # type: ignore[arg-type]
        return self.value + 0 * values.sum()


class TinyGPT(L.LightningModule):
    """Embeddings before and a head behind the blocks, noise and dropout, a mask, dictionaries as batches."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.accuracy = torchmetrics.MeanMetric()
        self.latest_accuracy = Average()
        self.latest = 0.0
        self.losses: list[float] = []
        self.noises: list[float] = []
        self.own = SimpleNamespace(noises=[])  # of this stage: what a list of the module has comes from the last one

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        x = x + 0.1 * torch.randn_like(x)
        self.noises.append(float(x.detach().sum()))
        self.own.noises.append(self.noises[-1])
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(self.norm(x))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(batch["tokens"])), reduce_fx="sum")
        return {"loss": loss, "seen": batch["tokens"][:, 0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if "seen" in outputs:
            assert torch.equal(outputs["seen"], batch["tokens"][:, 0])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.accuracy(loss, weight=len(batch["tokens"]))
        self.log("val_metric", self.accuracy)
        self.latest_accuracy(loss)
        self.log("val_latest", self.latest_accuracy)
        self.latest = float(self.latest_accuracy.compute())  # on one stage only, which must not wait for the others
        self.log("val_loss", loss, sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return batch["targets"][:, 0] + 0 * self(batch["tokens"])[:, 0, 0].long()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class ByHand(TinyGPT):
    """The same on one device, in the same micro-batches with the same random numbers."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = torch.zeros(())
        for micro_batch, part in enumerate(split_batch(batch, num_micro_batches_of(batch, 4))):
            place = (seed_of(SEED, 0), 0, self.current_epoch, batch_idx, micro_batch)
            handles = [
                block.register_forward_pre_hook(lambda *_, i=i, p=place: set_random_state(seed_of(*p, i), self.device))
                for i, block in enumerate(self.blocks, start=1)
            ]
            set_random_state(seed_of(*place, 0), self.device)
            loss = loss + self.loss(part) * len(part["tokens"]) / len(batch["tokens"])
            for handle in handles:
                handle.remove()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(batch["tokens"])), reduce_fx="sum")
        return {"loss": loss}


def text(num_samples: int, shift: int = 0) -> Any:
    """``shift`` makes ranks load different batches, as random augmentation does."""
    generator = torch.Generator().manual_seed(1)
    texts = (torch.randint(VOCABULARY, (num_samples, LENGTH + 1), generator=generator) + shift) % VOCABULARY
    return [{"tokens": tokens[:-1], "targets": tokens[1:]} for tokens in texts]


CASE = Case(
    trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 0.75, "max_epochs": 2}
)


def train(module: TinyGPT, strategy: Any, ranks: int, shift: int = 0, **options: Any) -> dict[str, Any]:
    torch.manual_seed(SEED)
    trainer: Any = make_trainer(CASE, strategy, ranks, use_distributed_sampler=False, **options)
    callbacks = list(trainer.callbacks)
    # 4 batches an epoch, the last of 6 samples: 4 micro-batches of two sizes.
    loader = DataLoader(text(30, shift), batch_size=8)
    # Evaluation draws its noise from another state than one device's: its values are compared between pipelines.
    trainer.fit(module, loader, DataLoader(text(6), batch_size=3))
    left = {
        "clipping over the stages": vars(trainer.precision_plugin).get("clip_grad_by_norm"),
        "metrics gathered over the stages": module.accuracy.dist_sync_fn or module.latest_accuracy.dist_sync_fn,
        "silence on sync_dist": any("use `self.log" in str(message) for _, message, *_ in warnings.filters),
        "a callback": callbacks != trainer.callbacks,
        "a pipeline": ranks > 1 and strategy.stage_record(),
    }
    return {
        **outcome(module, trainer),
        "left": [name for name, value in left.items() if value],
        "noises": module.own.noises,
        "latest": module.latest,
        "predicted": [int(x) for batch in trainer.predict(module, loader) or [] for x in batch],
    }


def pipeline(ranks: int, **options: Any) -> dict[str, Any]:
    return train(TinyGPT(), PipelineStrategy(num_micro_batches=4, **options), ranks)


@pytest.fixture(scope="module")
def by_hand() -> dict[str, Any]:
    return train(ByHand(), "auto", 1)


assert_same = partial(assert_same_outcomes, draws_in_validation=True)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_gpt_trains_as_on_one_device(schedule: str, by_hand: dict[str, Any], world2: World) -> None:
    results = world2.run(pipeline, 2, schedule=schedule)
    assert_same(results, by_hand)
    metrics = results[0]["metrics"]
    assert metrics["val_latest"] == pytest.approx(results[0]["latest"], rel=1e-6)
    assert metrics["val_metric"] == pytest.approx(metrics["val_loss"], rel=1e-6)
    assert [result["predicted"] for result in results] == [[int(each["targets"][0]) for each in text(30)]] * 2
    # What comes before the blocks sees the same noise on every stage, in evaluation as well; dry runs see it again.
    assert list(dict.fromkeys(results[0]["noises"])) == list(dict.fromkeys(results[1]["noises"]))
    assert [result["left"] for result in results] == [[], []], "a run leaves something of its own in other objects"


class Augmented(TinyGPT):
    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        return {name: (value + self.trainer.global_rank) % VOCABULARY for name, value in batch.items()}


def augmented() -> dict[str, Any]:
    return train(Augmented(), PipelineStrategy(num_micro_batches=4, balance=[1, 1, 1, 1]), 4, shift=rank())


def test_four_stages_train_on_the_batch_of_rank_zero(by_hand: dict[str, Any], world4: World) -> None:
    """Which they load differently, and hooks see once."""
    assert_same(world4.run(augmented), by_hand)


FORWARDS: list[bool] = []


class CountedBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        FORWARDS.append(torch.is_grad_enabled())
        return super().forward(x, mask)


class CountedGPT(TinyGPT):
    def __init__(self) -> None:
        super().__init__(tied=True)
        for block in self.blocks[1:3]:
            block.__class__ = CountedBlock

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 0:  # the first batch is also watched, to find which stages use what
            FORWARDS.clear()


def train_counted(choice: Any) -> dict[str, Any]:
    """Also gives the number of forward passes behind the first batch; each of two ranks has one counted block."""
    FORWARDS.clear()
    strategy = PipelineStrategy(num_micro_batches=4, activation_checkpointing=choice, verify_steps=0)
    return {**train(CountedGPT(), strategy, 2, max_epochs=1), "forwards": sum(FORWARDS)}


@pytest.mark.parametrize(("choice", "last"), [(True, 2), ([CountedBlock], 2), (["blocks.1"], 1)])
def test_layers_run_again_where_it_was_asked_for(choice: Any, last: int, world2: World) -> None:
    """They train as layers that are not computed again, dropout included."""
    results = world2.run(train_counted, choice)
    assert_same(results, train(ByHand(tied=True), "auto", 1, max_epochs=1))
    num_micro_batches = (4 - 1) * 4
    assert [result["forwards"] for result in results] == [last * num_micro_batches, 2 * num_micro_batches]


class Shifting(Classifier):
    """Changes its targets in place, and draws a number of NumPy before the layers, as mixup does."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = SimpleNamespace(drawn=[])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.noted.drawn.append(np.random.rand())
        batch[1].add_(1).remainder_(3)
        return super().training_step(batch, batch_idx)


def shift() -> dict[str, Any]:
    np.random.seed(rank())
    result = fitted(Shifting, schedule="interleaved", num_micro_batches=2)
    return {**result, "afterwards": float(np.random.rand())}


def test_stages_of_a_rank_start_from_the_same_batch_and_all_stages_draw_alike(world2: World) -> None:
    """A rank runs the step once for each of its stages: the second one trained on targets that were shifted twice."""
    results, reference = world2.run(shift), fitted(Shifting, 1)
    for seed, result in enumerate(results):
        assert_same_weights(result, reference)
        np.random.seed(seed)
        assert result["afterwards"] == float(np.random.rand()), "numbers outside of steps are the rank's own"
    last, first = (sorted(result["noted"].drawn) for result in results)
    assert last == first
    assert len(set(last)) == len(last) // 2, "the stages of a rank draw alike, too, and batches do not"


class Watched(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        self.with_gradient = [n for n, p in self.named_parameters() if strategy.holds(p) and len(p.grad.numpy())]

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.held = [name for name, value in self.named_parameters() if not isinstance(value, Placeholder)]
        self.states = len(held_states(self.trainer.optimizers[0]))


def watch() -> dict[str, Any]:
    module, strategy = Watched("adamw"), PipelineStrategy(balance=[2, 6])
    before = list(module.parameters())
    fit_module(module, strategy, 2, Case(max_epochs=1), train_loader(Case(), 1))
    strategy.meter.flush()
    return {
        "held": module.held,
        "with gradient": module.with_gradient,
        "states": module.states,
        "same objects": all(a is b for a, b in zip(before, module.parameters(), strict=True)),
        "sent": [(t.count, t.size_bytes) for t in strategy.meter.steps[-1].of("send", "pipeline")],
    }


def test_a_stage_holds_its_own_layers_only(world2: World) -> None:
    last, first = world2.run(watch)
    for result, layer in ((first, "layers.0"), (last, "layers.2")):
        assert result["held"] == result["with gradient"] == [f"{layer}.weight", f"{layer}.bias"]
        assert result["states"] == 2
        assert result["same objects"]
    # Activations of 16 float64 numbers a sample, 8 samples, in 8 micro-batches, one way; gradients the other way.
    activations = 8 * 16 * 8
    assert first["sent"][0] == (8, activations)
    messages, size = last["sent"][0]
    assert messages >= 8
    assert activations <= size


class Unfreezing(BaseFinetuning):
    """The first layers join in the second epoch, with a param group of their own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.first)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.first, optimizer, lr=0.05)


def saves_at_end(path: Path) -> L.Callback:
    return LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(path))


class Tuned(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


@pytest.mark.parametrize(("schedule", "balance"), [("1f1b", [2, 6]), ("zero_bubble", [1, 1, 1, 5])])
def test_layers_of_another_stage_are_unfrozen_in_the_middle(
    schedule: str, balance: list[int], world2: World, tmp_path: Path
) -> None:
    """In the first epoch the whole first stage is frozen."""
    one, two = ([Unfreezing(), saves_at_end(tmp_path / name)] for name in ("one", "two"))
    case = Case(num_samples=24, max_epochs=2)
    reference = fitted(Tuned, 1, case=case, callbacks=one)
    for result in world2.run(fitted, Tuned, case=case, callbacks=two, schedule=schedule, balance=balance):
        assert_same_weights(result, reference)
    (expected,), (found,) = (
        torch.load(tmp_path / name, weights_only=False)["optimizer_states"] for name in ("one", "two")
    )
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == {0, 1, 2, 3}
    torch.testing.assert_close(found["state"], expected["state"], rtol=1e-9, atol=1e-11)


class FirstOnly(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.first.parameters(), lr=0.1)


def test_optimizers_of_different_parameters_make_no_checkpoint(world2: World, tmp_path: Path) -> None:
    def grow(trainer: L.Trainer, module: Any) -> None:
        if trainer.global_rank == 0:
            trainer.optimizers[0].param_groups[0]["params"].extend(module.second.parameters())

    words = r"only one of two has \['layers.2.bias', 'layers.2.weight'\]"
    callbacks = [LambdaCallback(on_train_epoch_start=grow), saves_at_end(tmp_path)]
    world2.run_raising(PipelineError, words, fitted, FirstOnly, callbacks=callbacks)


def steps_in_backward() -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(2))
    weight.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad))
    return torch.optim.SGD([weight], lr=0.1)


def overriding(base: type[Any], hook: str, function: Callable[..., None] = lambda self, *args: None) -> Any:
    """An object of a class "Own" that overrides a hook."""
    return type("Own", (base,), {hook: function})()


# On one device the hook comes after the step, and in a pipeline before it: what it changed counted a step early.
TOO_EARLY = "Own.on_before_zero_grad .* use on_train_batch_start"
EXAMPLE = Classifier()
EXAMPLE.example_input_array = torch.zeros(2, 6)
AVERAGES = "averages a copy of the whole model.*ring_ddp"


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (lambda: check_module(TwoOptimizers()), "TwoOptimizers.automatic_optimization=False.*another strategy"),
        (lambda: check_module(overriding(Classifier, "backward")), "Own overrides backward"),
        (
            lambda: check_module(overriding(Classifier, "training_step", lambda self, dataloader_iter: None)),
            "takes dataloader_iter",
        ),
        (lambda: check_module(overriding(Classifier, "on_before_zero_grad")), TOO_EARLY),
        (lambda: check_callbacks([overriding(L.Callback, "on_before_zero_grad")]), TOO_EARLY),
        (lambda: check_loggers([TensorBoardLogger(".", log_graph=True)], EXAMPLE), "pass log_graph=False"),
        (lambda: check_callbacks([StochasticWeightAveraging(0.1)]), AVERAGES),
        (lambda: check_callbacks([moving_average()]), AVERAGES),
        (lambda: check_callbacks([ModelPruning("l1_unstructured")]), "chooses among all weights.*ring_ddp"),
        (lambda: check_optimizers([torch.optim.LBFGS(nn.Linear(2, 2).parameters())]), r"LBFGS.*SGD or AdamW"),
        (lambda: check_optimizers([steps_in_backward()]), "such a hook runs after each micro-batch"),
    ],
)
def test_what_needs_the_whole_model_is_refused(check: Callable[[], None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "2f2b"}, "schedule='2f2b'.*'gpipe', '1f1b'"),
        ({"num_micro_batches": 0}, "num_micro_batches=0"),
        ({"stages_per_rank": 2}, "stages_per_rank=2 under schedule='1f1b'.*interleaved, zero_bubble"),
        ({"schedule": "interleaved", "stages_per_rank": 1}, "=1 under schedule='interleaved'.*2 or more"),
        ({"replicated": "tokens"}, "replicated='tokens': pass True, or a list of names"),
        ({"batch_dim": -1}, "batch_dim=-1 is out of range; pass a whole number of 0 or more"),
        ({"split_points": "net.up"}, "split_points='net.up' is no list; pass names of submodules"),
        ({"split_points": ["net.up", "net.up"]}, "pass one or more different names"),
        ({"split_points": ["net.up"], "balance": "time"}, "balance='time' and split_points=.*leave one out"),
        ({"split_points": ["a"], "activation_checkpointing": ["Block"]}, "pass True for all"),
        ({"activation_checkpointing": True, "schedule": "zero_bubble"}, "use schedule='interleaved', or leave it out"),
        ({"data_parallel_size": 0}, "data_parallel_size=0"),
        ({"data_parallel_size": 3}, "data_parallel_size=3 does not make the 8 ranks"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3 does not divide the 8 ranks"),
        ({"data_parallel_size": 2, "pipeline_parallel_size": 2}, "=2 times data_parallel_size=2 does not make the 8"),
        ({"data_parallel_size": 8}, "1 device a pipeline: a pipeline has a stage on each device"),
        ({"devices": 1}, "1 device a pipeline: a pipeline has a stage on each device and needs 2 or more"),
        ({"split_points": ["net.up"]}, r"makes 2 stages, and 8 ranks with 1 each have 8; name 7 submodules"),
        ({"gather_at_end": False, "start_method": "spawn"}, "the parts of the model would be lost with the processes"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], words: str) -> None:
    devices, options = options.get("devices", 8), {name: options[name] for name in options if name != "devices"}
    with pytest.raises(ValueError, match=words):
        L.Trainer(strategy=PipelineStrategy(**options), accelerator="cpu", devices=devices)


def test_more_stages_than_layers_are_told_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    trainer = L.Trainer(strategy="gpipe", accelerator="cpu", devices=12, logger=False, enable_checkpointing=False)
    words = r"12 layers or more.*'layers' \(8 layers\)"
    with pytest.raises(ValueError, match=words):
        trainer.fit(Classifier(), DataLoader(text(8)))


def test_in_a_notebook_the_strategy_that_works_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "IS_INTERACTIVE", True)
    for name, words in (
        ("ring_ddp", "strategy='ring_ddp_spawn'"),
        ("gpipe", r"PipelineStrategy\(start_method='spawn'\)"),
    ):
        with pytest.raises(ValueError, match=words):
            L.Trainer(strategy=name, accelerator="cpu", devices=2)


class Drawing(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.own = SimpleNamespace(drawn=set())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.own.drawn.add(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


def side_by_side() -> dict[str, Any]:
    module, case = Drawing(), Case(num_samples=53, max_epochs=1, trainer={"accumulate_grad_batches": 3})
    trainer = fit_module(module, PipelineStrategy(pipeline_parallel_size=2), 4, case)
    trainer.strategy.meter.flush()
    averages = [each for step in trainer.strategy.meter.steps for each in step.of("all_reduce", "data")]
    return {"drawn": module.own.drawn, "averages": [(each.count, each.size_bytes) for each in averages]}


def test_two_pipelines_draw_numbers_of_their_own_and_average_once_a_step(world4: World) -> None:
    results = world4.run(side_by_side)
    for result, size in zip(results, [16 * 3 + 3, 6 * 16 + 16] * 2, strict=True):
        assert result["averages"] == [(1, 8 * size)] * 3
    drawn = [result["drawn"] for result in results]
    assert (drawn[0], drawn[2]) == (drawn[1], drawn[3])
    assert drawn[0].isdisjoint(drawn[2])
