"""Layers are split over ranks, and train as on one device."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_multigpu import TensorSplitStrategy
from lightning_multigpu._lightning_internals import averaged_copy
from lightning_multigpu.callbacks import RunReport
from lightning_multigpu.engine.optimizer_state import held_states
from lightning_multigpu.engine.tensor_split.parts import local
from lightning_multigpu.planning.split_plan import SplitPlan
from tests.report.shape import assert_follows_schema
from tests.strategies.tasks import Case, assert_same_weights, fit, make_strategy, make_trainer, moving_average, state
from tests.world import World

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 4, 24, 6
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": HEADS, "hidden_size": WIDTH, "intermediate_size": 20}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Attention(nn.Module):
    """Of one's own, as nanoGPT's: ``order`` says how queries, keys and values lie in the fused projection."""

    def __init__(self, order: str = "sections", *, normed: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH // HEADS) if normed else nn.Identity()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH
        self.order, self.is_normed = order, True

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.order == "sections":
            q, k, v = self.qkv(x).split(self.n_embd, dim=2)
        else:
            q, k, v = self.qkv(x).view(batch, length, self.n_head, -1).chunk(3, -1)
        q, k, v = (each.reshape(batch, length, self.n_head, -1).transpose(1, 2) for each in (q, k, v))
        q = self.norm(q) if self.is_normed else q
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.proj(y.reshape(batch, length, self.n_embd))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """The feed-forward block of Llama, and one whose gate and value are fused."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.up = nn.ModuleList([nn.Linear(WIDTH, 40)] if fused else [nn.Linear(WIDTH, 20), nn.Linear(WIDTH, 20)])
        self.down = nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up[0](x).chunk(2, -1) if len(self.up) == 1 else (up(x) for up in self.up)
        return self.down(F.silu(gate) * value)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention, self.feed_forward = nn.LayerNorm(WIDTH), attention, feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed_forward(x)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Stays whole where a function of all hidden features stands between its layers."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.Linear(WIDTH, 20), between, nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.between(self.first(x)))  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """Depends on the number of features; it was wrong by 2 per cent where half of 20 were there."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.002 * x.shape[-1])


class Positioned(FeedForward):
    """Adds something of its own for each position; or the mean over all tokens of the batch."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__(nn.GELU())
        self.mixes, self.positions = mixes, nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (x.mean((0, 1)) if self.mixes else self.positions))


class Language(nn.Module):
    """Embeds tokens, and predicts the next ones."""

    def __init__(self, *blocks: nn.Module, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(input_ids)))  # type: ignore[no-any-return]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 20, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 20, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, x.flip(1))  # type: ignore[no-any-return]


def perceptron(hidden: int = 10) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            n_positions=8, n_embd=WIDTH, n_layer=2, n_head=HEADS, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, **TOKENS
        )
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **LAYERS, **TOKENS)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(num_key_value_heads=2, **LAYERS, **TOKENS)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(num_key_value_heads=2, head_dim=6, **LAYERS, **TOKENS)),
    "bert": lambda: BertForSequenceClassification(BertConfig(num_labels=3, **LAYERS, **NO_DROPOUT, **TOKENS)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            d_model=WIDTH,
            d_kv=4,
            d_ff=20,
            num_layers=2,
            num_heads=HEADS,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            **TOKENS,
        )
    ),
    "fused": lambda: Language(*(Block(Attention(), Gated(fused=True)) for _ in range(2)), tied=True),
    "nanoGPT": lambda: Language(*(Block(Attention(), perceptron(4 * WIDTH)) for _ in range(2))),
    "normed": lambda: Language(*(Block(Attention(normed=True), Gated(fused=True)) for _ in range(2)), tied=True),
    "by heads": lambda: Language(Block(Attention("heads"), Gated(fused=False))),
    "encoder": lambda: Language(encoder()),
    "decoder": lambda: Language(Decoder()),
    "position in layers": lambda: Language(*(Positioned(mixes=False) for _ in range(2))),
    "mixed tokens": lambda: Language(*(Positioned(mixes=True) for _ in range(2))),
    "one bad block": lambda: Language(*(FeedForward(nn.Softmax(-1) if i == 2 else nn.GELU()) for i in range(5))),
    "scaled block": lambda: Language(*(FeedForward(Scaled() if i == 2 else nn.GELU()) for i in range(5))),
    "equal layers": lambda: Language(*(part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))),
}
FOUND: dict[str, dict[str, int]] = {
    "gpt2": {"vocabulary": 1, "attention": 2, "first, second": 2},
    "llama": {"vocabulary": 1, "attention": 2, "gate, up, down": 2},
    "phi3": {"vocabulary": 1, "attention": 2, "gate, up, down": 2},
    "qwen3": {"vocabulary": 1, "attention": 2, "gate, up, down": 2},
    "bert": {"vocabulary": 1, "attention": 2, "first, second": 3},
    "t5": {"vocabulary": 1, "attention": 2, "first, second": 4},  # its own attention has a bias for each head
    "fused": {"vocabulary": 1, "attention": 2, "gate, up, down": 2},
    "nanoGPT": {"vocabulary": 1, "attention": 2, "first, second": 2},
    "normed": {"vocabulary": 1, "attention": 2, "gate, up, down": 2},
    "by heads": {"vocabulary": 1, "attention": 1, "gate, up, down": 1},
    "encoder": {"vocabulary": 1, "attention": 2, "first, second": 2},
    "decoder": {"vocabulary": 1, "attention": 4, "first, second": 2},
    "one bad block": {"vocabulary": 1, "first, second": 4},
    "scaled block": {"vocabulary": 1, "first, second": 5},
    "equal layers": {"vocabulary": 1, "first, second": 2},
}
# These compute norms, softmax or losses in float32 whatever the precision.
RTOL = dict.fromkeys(("gpt2", "llama", "phi3", "qwen3", "t5", "bert"), 1e-4)

# One of each kind of block; the others are found by test_own_transformers, and some are trained below.
TRAINED = ("gpt2", "qwen3", "t5", "fused", "nanoGPT", "encoder", "decoder", "one bad block")
# Attention to an encoder, a second input.
UNUSUAL_TRAFFIC = ("t5", "decoder")


class Task(L.LightningModule):
    def __init__(self, model: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = MODELS[model]()
        self.validated: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        if isinstance(self.model, Language):
            logits = self.model(tokens)
            return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        labels = tokens.sum(1) % 3 if isinstance(self.model, BertForSequenceClassification) else tokens
        return self.model(input_ids=tokens, labels=labels).loss  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(float(self.loss(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Noting(Callback):
    """What was split, by its shape, and the elements of parameters and of the optimizer's state that a rank holds."""

    def __init__(self) -> None:
        self.split: dict[str, int] = {}
        self.plan: SplitPlan | None = None
        self.held = self.state = 0

    def on_train_start(self, trainer: L.Trainer, _: Any) -> None:
        if isinstance(trainer.strategy, TensorSplitStrategy):
            trainer.strategy.on_split = lambda plan: setattr(self, "plan", plan)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.held = sum(local(parameter).numel() for parameter in module.parameters())
        self.state = sum(v.numel() for s in held_states(trainer.optimizers[0]).values() for v in s.values())
        for block, _applied in trainer.strategy._layers.split if trainer.world_size > 1 else ():
            self.split[block.shape] = self.split.get(block.shape, 0) + 1


def text(num_samples: int = 16) -> DataLoader[Any]:
    tokens = torch.randint(VOCABULARY, (num_samples, LENGTH), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens), batch_size=4)


class Unfreezing(Callback):
    """All but one layer is frozen in the first epoch, as by BackboneFinetuning."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        module.requires_grad_(False).model.blocks[1].attention.proj.requires_grad_(True)  # type: ignore[union-attr, index]

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.requires_grad_(trainer.current_epoch > 0)
        module.model.blocks[1].attention.proj.requires_grad_(True)  # type: ignore[union-attr, index]


def train(
    model: str, ranks: int, *, unfreezes: bool = False, precision: Any = "64-true", **options: Any
) -> dict[str, Any]:
    task, noting = Task(model), Noting()
    strategy = "auto" if ranks == 1 else make_strategy("tensor_split", **options)
    options = {"gradient_clip_val": 0.5, "use_distributed_sampler": False}
    case = Case(max_epochs=2 if unfreezes else 1, precision=precision, trainer=options)
    trainer = make_trainer(case, strategy, ranks, callbacks=[noting, *[Unfreezing()] * unfreezes])
    trainer.fit(task, text(), text(6))
    classes = {type(parameter) for parameter in task.parameters()}
    return {"weights": state(task), "validated": task.validated, "classes": classes, **vars(noting)}


@functools.cache
def on_one_device(model: str) -> dict[str, Any]:
    return train(model, 1)


@pytest.mark.parametrize("model", TRAINED)
def test_models_train_as_on_one_device(world2: World, model: str) -> None:
    reference = on_one_device(model)
    for result in world2.run(train, model, 2):
        assert result["split"] == FOUND[model]
        assert result["classes"] == {nn.Parameter}
        rtol = RTOL.get(model, 1e-9)
        assert_same_weights(result, reference, rtol=rtol)
        assert result["validated"] == pytest.approx(reference["validated"], rel=rtol)
        for blocks in result["plan"].blocks:
            if blocks.shape != "vocabulary" and model not in UNUSUAL_TRAFFIC:
                found = [(each.direction, each.operation, each.size_bytes) for each in blocks.traffic]
                size = blocks.activation_bytes
                assert found == [("forward", "all_reduce", size), ("backward", "all_reduce", size)], blocks.kind
        if model == "fused":
            assert result["held"] == result["state"] < 0.65 * reference["held"], "norms, biases of row layers are whole"
        if model == "one bad block":
            assert [each.names for each in result["plan"].whole] == ["model.blocks.2.(first, second)"]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt2", {}),
        ("equal layers", {"activation_checkpointing": [nn.Linear]}),
    ],
)
def test_split_layers_are_computed_again(world2: World, model: str, options: dict[str, Any]) -> None:
    reference = on_one_device(model)
    for result in world2.run(train, model, 2, **{"activation_checkpointing": True, **options}):
        assert result["split"] == FOUND[model]
        rtol = RTOL.get(model, 1e-9)
        assert_same_weights(result, reference, rtol=rtol)


@pytest.mark.parametrize("sequence_split", [False, True])
def test_layers_that_are_frozen_in_the_first_batch_are_trained_later(world2: World, sequence_split: bool) -> None:
    """A norm of queries, frozen while the split was tried, had a rank's part of its gradient when it was unfrozen."""
    reference = train("normed", 1, unfreezes=True)
    for result in world2.run(train, "normed", 2, unfreezes=True, sequence_split=sequence_split):
        assert result["split"] == FOUND["normed"]
        assert_same_weights(result, reference)


# The list of layers, and the dimension along which activations are split.
SEQUENCES: dict[str, tuple[str, int]] = {
    "gpt2": ("model.transformer.h", 1),
    "qwen3": ("model.model.layers", 1),
    "bert": ("model.bert.encoder.layer", 1),
    "fused": ("model.blocks", 1),
    "encoder": ("model.blocks", 1),
    "position in layers": ("model.blocks", 0),
}


@pytest.mark.parametrize("model", SEQUENCES)
def test_activations_are_split_along_the_sequence(world2: World, model: str) -> None:
    reference = on_one_device(model)
    layers, dim = SEQUENCES[model]
    for result in world2.run(train, model, 2, sequence_split=True):
        plan, rtol = result["plan"], RTOL.get(model, 1e-9)
        assert f"activations between the blocks of {layers} are split along dimension {dim}" in plan.notes
        assert_same_weights(result, reference, rtol=rtol)
        assert result["validated"] == pytest.approx(reference["validated"], rel=rtol)
        for each in [each for each in plan.blocks if each.shape != "vocabulary"][:2]:
            assert sum(one.sent_bytes for one in each.traffic) == each.formula_bytes(2)
            assert {one.operation for one in each.traffic} == {"all_gather", "reduce_scatter"}


def warned(model: str) -> tuple[dict[str, Any], list[str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = train(model, 2, sequence_split=True)
    return result, [str(each.message) for each in found if "sequence_split" in str(each.message)]


def test_activations_stay_whole_where_tokens_are_mixed_between_blocks(world2: World) -> None:
    reference = on_one_device("mixed tokens")
    results = world2.run(warned, "mixed tokens")
    for result, _ in results:
        (note,) = result["plan"].notes
        assert note.startswith("activations between the blocks of model.blocks stay whole (mean needs the outputs")
        assert_same_weights(result, reference)
    ((warning,), *others) = (messages for _, messages in results)
    assert warning.startswith("sequence_split=True does nothing: activations between the blocks of model.blocks")
    assert others == [[]]


class Stack(nn.Module):
    """Layers with dropout, of which each is a block; they may be run under an activation checkpoint."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.norm = FeedForward(nn.Dropout(0.5)), nn.LayerNorm(WIDTH)
            self.dropout, self.is_checkpointed = nn.Dropout(0.5), False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_checkpointed:
                return x + checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
            return x + self.inner(x)

        def inner(self, x: Tensor) -> Tensor:
            return self.dropout(self.block(self.norm(x)))  # type: ignore[no-any-return]

    def __init__(self, checkpointed: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))
        self.checkpointed = checkpointed
        for layer in self.layers:
            layer.is_checkpointed = checkpointed == "in layers"

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed == "layers" else layer(x)
        return x


def stacked(checkpointed: str) -> dict[str, Any]:
    """Trains on sequences of different lengths; the masks of one layer's dropout, and of one behind all layers."""
    task = Task("fused")
    torch.manual_seed(3)
    stack, last = Stack(checkpointed), nn.Dropout(0.5)
    task.model = Language(stack, last)
    masks: dict[str, list[Tensor]] = {"inside": [], "between": [], "behind": []}
    layer = stack.layers[1]
    for name, part in {"inside": layer.block.between, "between": layer.dropout, "behind": last}.items():  # type: ignore[union-attr]
        part.register_forward_hook(lambda *args, name=name: masks[name].append(local(args[-1]).detach() != 0))  # type: ignore[misc, operator, union-attr]
    generator = torch.Generator().manual_seed(1)
    batches = [[torch.randint(VOCABULARY, (4, length), generator=generator)] for length in (6, 5, 6)]
    option = {"activation_checkpointing": ["Layer"]} if checkpointed == "by the option" else {}
    strategy = make_strategy("tensor_split", sequence_split=True, **option)
    trainer = make_trainer(Case(max_epochs=1), strategy, 2, use_distributed_sampler=False)
    trainer.fit(task, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return {"weights": state(task), "masks": {name: kept[-1] for name, kept in masks.items()}}


def test_dropout_between_blocks_differs_between_ranks_and_is_drawn_again_by_checkpoints(world2: World) -> None:
    first, second = world2.run(stacked, "nothing")
    assert torch.equal(first["masks"]["behind"], second["masks"]["behind"])
    for name, shape in {"inside": (4, 6, 10), "between": (4, 3, WIDTH)}.items():
        mine, theirs = (result["masks"][name] for result in (first, second))
        assert mine.shape == theirs.shape == shape
        assert 0.3 < (mine & theirs).double().mean() / mine.double().mean() < 0.7, "they are independent"
    for checkpointed in ("in layers", "layers", "by the option"):
        for result in world2.run(stacked, checkpointed):
            assert_same_weights(result, first)


class LeavingOut(nn.Module):
    """Layers, of which one is left out in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.dropped = nn.ModuleList(FeedForward(nn.GELU()) for _ in range(3)), -1

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if self.training and number == self.dropped else layer(x)
        return x


class DropsInOneBatch(Callback):
    def __init__(self, dropped: int, batch_idx: int) -> None:
        self.dropped, self.batch_idx = dropped, batch_idx

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        module.model.blocks.dropped = self.dropped if batch_idx == self.batch_idx else -1


class InStep(Task):
    """Calls the layers in the step, with a loss of any number of tokens."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        embedded: Tensor = self.model.embedding(batch[0])  # type: ignore[operator]
        return LeavingOut.forward(self.model.blocks, embedded).square().mean()  # type: ignore[arg-type]


def with_dropped_layer(ranks: int, dropped: int, batch_idx: int, kind: type[Task] = Task) -> dict[str, Any]:
    task = kind("fused")
    torch.manual_seed(3)
    task.model = Language()
    task.model.blocks = LeavingOut()
    strategy = make_strategy("tensor_split", sequence_split=True) if ranks > 1 else "auto"
    callbacks, options = [DropsInOneBatch(dropped, batch_idx)], {"use_distributed_sampler": False}
    make_trainer(Case(max_epochs=1), strategy, ranks, callbacks=callbacks, **options).fit(task, text())
    return {"weights": state(task)}


def test_layers_that_are_left_out(world2: World) -> None:
    """A step without the last layer returned a rank's part of the tokens, and failed where losses met labels.

    So did a first batch without the first layer: the step before it, in evaluation, had begun with another one.
    """
    for dropped, batch_idx, kind in ((0, 0, Task), (0, 1, Task), (2, 1, Task), (2, 1, InStep)):
        reference = with_dropped_layer(1, dropped, batch_idx, kind)
        for result in world2.run(with_dropped_layer, 2, dropped, batch_idx, kind):
            assert_same_weights(result, reference)


@pytest.mark.parametrize("sequence_split", [False, True])
def test_ranks_without_heads_of_their_own(world4: World, sequence_split: bool) -> None:
    """Two heads of keys and values on four ranks, which have two tokens or one of six.

    Attention without heads ended the process of a rank under torch 2.11.
    """
    reference = on_one_device("llama")
    for result in world4.run(train, "llama", 4, sequence_split=sequence_split):
        assert result["split"] == FOUND["llama"]
        assert_same_weights(result, reference, rtol=1e-4)


def test_groups_side_by_side(world4: World) -> None:
    """Two data ranks of two tensor ranks each; the data ranks average through a ring."""
    case = Case(
        optimizer="adamw", trainer={"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}, validate=True, max_epochs=1
    )
    reference: Any = fit(case, None, 1)
    sizes = Case(**{**vars(case), "strategy": {"tensor_parallel_size": 2}})
    for result in world4.run(fit, sizes, "tensor_split", 4):
        assert_same_weights(result, reference)
        assert result["metrics"] == pytest.approx(reference["metrics"], rel=1e-9)


class Normed(FeedForward):
    """With statistics of activations, which averaged weights have to get anew."""

    def __init__(self) -> None:
        super().__init__(nn.GELU())
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


AVERAGING: dict[str, Callable[[], Callback]] = {
    "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1),
    "ema": lambda: moving_average(decay=0.8),
}


def averaged(ranks: int, kind: str, path: str, resume: str | None = None) -> dict[str, Any]:
    task, averaging = Task("fused"), AVERAGING[kind]()
    torch.manual_seed(3)
    task.model = Language(Normed(), Normed())
    strategy = "auto" if ranks == 1 else make_strategy("tensor_split")
    saving = LambdaCallback(
        on_train_epoch_end=lambda trainer, _: None if trainer.current_epoch else trainer.save_checkpoint(path)
    )
    callbacks, options = [averaging, saving], {"use_distributed_sampler": False}
    trainer = make_trainer(Case(max_epochs=3), strategy, ranks, callbacks=callbacks, **options)
    trainer.fit(task, text(), text(6), ckpt_path=resume)
    copy: Any = averaged_copy(averaging)
    return {"weights": state(task), "validated": task.validated[-2:], "average": copy.state_dict()}


@pytest.mark.parametrize("kind", AVERAGING)
def test_averages_of_weights(world2: World, kind: str, tmp_path: Any) -> None:
    """Each rank averages its parts; checkpoints have whole averages, and go on anywhere."""
    one, own, later = (str(tmp_path / name) for name in ("one.ckpt", "own.ckpt", "later.ckpt"))
    reference = averaged(1, kind, one)
    for result in world2.run(averaged, 2, kind, own):
        assert_same_weights(result, reference)
        assert result["validated"] == pytest.approx(reference["validated"], rel=1e-9)
        torch.testing.assert_close(result["average"], reference["average"], rtol=1e-9, atol=1e-11)
    mine, theirs = (torch.load(path, weights_only=False) for path in (own, one))
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert (key in mine) == (key in theirs)
        torch.testing.assert_close(mine.get(key, {}), theirs.get(key, {}), rtol=1e-9, atol=1e-11)
    if kind == "swa":
        (first,), (second,) = (
            [each["average_model_state"] for each in found["callbacks"].values() if "average_model_state" in each]
            for found in (mine, theirs)
        )
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-11)
    gone_on = averaged(1, kind, later, resume=one)
    for result in world2.run(averaged, 2, kind, later, resume=own):
        torch.testing.assert_close(result["weights"], gone_on["weights"], rtol=1e-6, atol=1e-7)


def reported() -> tuple[dict[str, Any], dict[tuple[str, str], int]]:
    """The report of a run, and the collectives inside layers in its last step, by operation and layer."""
    task, report = Task("llama"), RunReport(print_table=False, write_file=False)
    strategy = make_strategy("tensor_split")
    trainer = make_trainer(Case(max_epochs=1), strategy, 2, callbacks=[report], use_distributed_sampler=False)
    trainer.fit(task, text())
    assert report.report is not None
    found = {(each.operation, each.group): each.count for each in strategy.meter.steps[-1].operations}
    return report.report, found


def test_a_report_and_the_meter_tell_what_each_block_sends(world2: World) -> None:
    report, found = world2.run(reported)[0]
    assert_follows_schema(report)
    attention = next(each for each in report["tensor_split"]["blocks"] if each["shape"] == "attention")
    counts = {each["direction"]: (each["operation"], each["count"]) for each in attention["traffic"]}
    assert counts == {"forward": ("all_reduce", 1), "backward": ("all_reduce", 1)}
    layer = "tensor model.model.layers.1.self_attn"
    assert found["all_reduce", f"{layer}.o_proj"] == found["all_reduce", f"{layer}.q_proj"] == 1
    assert ("all_reduce", f"{layer}.k_proj") not in found


class Scored(Task):
    """Computes an accuracy of logits."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.correct = (self.model(batch[0]).argmax(-1) == batch[0]).sum()
        return super().loss(batch)


def planned(plan: Any, kind: type[Task] = Task) -> dict[str, Any]:
    task, noting = kind("fused"), Noting()
    strategy = make_strategy("tensor_split", plan=plan)
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "use_distributed_sampler": False}
    trainer = make_trainer(Case(max_epochs=1), strategy, 2, callbacks=[noting], **options)
    trainer.fit(task, text())
    return {"weights": state(task), "split": noting.split}


def told(plan: Any) -> tuple[dict[str, Any], list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        messages: list[str] = []
        patch.setattr("lightning_multigpu.strategies.tensor_parallel.split_layers.rank_zero_info", messages.append)
        return planned(plan, Scored), messages


def test_a_plan_by_hand(world2: World) -> None:
    task = Task("fused")
    make_trainer(Case(max_epochs=1), "auto", 1, gradient_clip_val=0.5).fit(task, text())
    for result in world2.run(planned, {"*.attention.qkv": "column", "*.attention.proj": "row"}):
        assert result["split"] == {"attention": 2}
        assert_same_weights(result, {"weights": state(task)})
    for plan, split, gathers in (
        (
            {"model.embedding": "vocab", "model.head": "head"},
            {"vocabulary": 1},
            r"values of model\.head for argmax",
        ),
        (
            {"*.blocks.1.feed_forward.up.0": "column"},
            {"plan": 1},
            r"values of model\.blocks\.1\.feed_forward\.up\.0 for ",
        ),
    ):
        for result, (message,) in world2.run(told, plan):
            assert result["split"] == split
            assert_same_weights(result, {"weights": state(task)})
            assert re.search(rf"tensor_split gathers {gathers}.*\(.*test_tensor_split\.py:\d+\)", message)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not make the 2 ranks"),
        ({"data_parallel_size": 2}, "tensor_parallel_size=1: layers are split over 2 ranks or more"),
        ({"plan": {"*.up": "colum"}}, "plan='colum'"),
        ({"plan": {}}, "pass 'auto', or a mapping"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ({"verify_steps": 2}, "verify_steps=2: pass 1 to compare"),
        ({"sequence_split": "again"}, "sequence_split='again' is not a bool"),
        # The biases of row layers differed between the ranks of a group, and the end of the fit raised.
        ({"compression": "int8"}, r"compression=Int8.* use HybridStrategy\(pipeline_parallel_size=1"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_trainer(Case(), make_strategy("tensor_split", **options), 2)


@pytest.mark.parametrize("name", ["tensor_split", "hybrid"])
def test_a_pattern_that_matches_nothing_is_refused(name: str) -> None:
    """The layers that it was meant for stayed whole in silence."""
    plan = {"*.attention.quv": "column", "*.attention.proj": "row"}
    options: dict[str, Any] = {"plan": plan} if name == "tensor_split" else {"tensor": {"plan": plan}}
    trainer = make_trainer(Case(), make_strategy(name, **options), 4 if name == "hybrid" else 2)
    words = r"'\*\.attention\.quv': 'column'} matches no module .* 'model\.blocks\.0\.attention\.qkv'"
    with pytest.raises(ValueError, match=words):  # before a rank is started
        trainer.fit(Task("fused"), text())


@pytest.mark.parametrize("name", ["tensor_split", "hybrid"])
def test_compiled_layers_are_refused(name: str) -> None:
    """The trial failed within torch.compile, by an error that named nothing of the user's."""
    trainer = make_trainer(Case(), make_strategy(name), 4 if name == "hybrid" else 2)
    for number, message in enumerate(["model.blocks.1 is compiled", "model is compiled", "Task is compiled"]):
        task = Task("fused")
        (task.model.blocks[1], task.model, task)[number].compile(backend="eager")  # type: ignore[index, operator, union-attr]
        with pytest.raises(ValueError, match=message):
            trainer.fit(task, text())


class ReadsGradients(Task):
    """Its hooks read whole gradients and weights, and change them."""

    def __init__(self) -> None:
        super().__init__("fused")
        self.norms: list[float] = []

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            size = parameter.grad.numel() ** 0.5
            parameter.grad.mul_(parameter.norm() / parameter.grad.norm() * size / 100)
        self.model.embedding.weight.grad[3] = 0.0  # type: ignore[index, union-attr]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms += [float(norm) for norm in grad_norm(self, 2).values()]
        self.norms.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.1)))


class StepsByHand(Task):
    """Clips between its closure and the step, and leaves a step out."""

    def __init__(self) -> None:
        super().__init__("fused")
        self.norms: list[float] = []

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        self.norms.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.1)))
        if index != 1:
            optimizer.step()

    def on_train_batch_end(self, *args: Any) -> None:
        weight = self.model.embedding.weight  # type: ignore[union-attr]
        assert len(weight) == VOCABULARY
        self.norms += [float(parameter.detach().norm()) for parameter in self.parameters()]


def reads_gradients(ranks: int, kind: type[ReadsGradients | StepsByHand]) -> dict[str, Any]:
    task = kind()
    strategy = make_strategy("tensor_split") if ranks > 1 else "auto"
    make_trainer(Case(max_epochs=1), strategy, ranks, use_distributed_sampler=False).fit(task, text())
    return {"weights": state(task), "norms": task.norms}


@pytest.mark.parametrize("kind", [ReadsGradients, StepsByHand])
def test_hooks_read_whole_gradients(world2: World, kind: type[ReadsGradients | StepsByHand]) -> None:
    """They read a rank's part: norms of Lightning's grad_norm were too small, and ranks clipped by different ones."""
    reference = reads_gradients(1, kind)
    for result in world2.run(reads_gradients, 2, kind):
        assert_same_weights(result, reference)
        assert result["norms"] == pytest.approx(reference["norms"], rel=1e-9)
