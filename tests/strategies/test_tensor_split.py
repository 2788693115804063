"""Layers are split over ranks, and train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.strategies.tasks import Case, assert_same_weights, fit, make_strategy, make_trainer, state
from tests.world import World

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 4, 24, 6
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": HEADS, "hidden_size": WIDTH, "intermediate_size": 20}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Attention(nn.Module):
    """Of one's own, as nanoGPT's: ``order`` says how queries, keys and values lie in the fused projection."""

    def __init__(self, order: str = "sections", *, size_is_read: bool = True) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH
        self.order, self.size_is_read = order, size_is_read

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        if self.order == "sections":
            q, k, v = self.qkv(x).split(self.n_embd, dim=2)
        else:
            q, k, v = self.qkv(x).view(batch, length, self.n_head, -1).chunk(3, -1)
        q, k, v = (each.reshape(batch, length, self.n_head, -1).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.proj(y.reshape(batch, length, self.n_embd if self.size_is_read else width))  # type: ignore[no-any-return]


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


class MultiheadBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x)[0]  # type: ignore[no-any-return]


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


def perceptron(hidden: int = 10) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            n_positions=8, n_embd=WIDTH, n_layer=2, n_head=HEADS, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, **TOKENS
        )
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **LAYERS, **TOKENS)),
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
    "by heads": lambda: Language(Block(Attention("heads"), Gated(fused=False))),
    "reads its size": lambda: Language(Block(Attention(size_is_read=False), perceptron())),
    "multihead": lambda: Language(MultiheadBlock(), perceptron(), MultiheadBlock()),
    "encoder": lambda: Language(encoder()),
}
FOUND: dict[str, dict[str, int]] = {
    "gpt2": {"vocabulary": 1, "attention": 2, "first, second": 2},
    "llama": {"vocabulary": 1, "attention": 2, "gate, up, down": 2},
    "qwen3": {"vocabulary": 1, "attention": 2, "gate, up, down": 2},
    "bert": {"vocabulary": 1, "attention": 2, "first, second": 3},
    "t5": {"vocabulary": 1, "attention": 2, "first, second": 4},  # its own attention has a bias for each head
    "fused": {"vocabulary": 1, "attention": 2, "gate, up, down": 2},
    "by heads": {"vocabulary": 1, "attention": 1, "gate, up, down": 1},
    "reads its size": {"vocabulary": 1, "first, second": 1},
    "multihead": {"vocabulary": 1, "attention": 2, "first, second": 1},
    "encoder": {"vocabulary": 1, "attention": 2, "first, second": 2},
}
# These compute norms, softmax or losses in float32 whatever the precision.
RTOL = dict.fromkeys(("gpt2", "llama", "qwen3", "t5", "bert"), 1e-4)


class Task(L.LightningModule):
    def __init__(self, model: str, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model, self.optimizer_name = MODELS[model](), optimizer
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
        if self.optimizer_name == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Noting(Callback):
    """What was split, by its shape."""

    def __init__(self) -> None:
        self.split: dict[str, int] = {}
        self.left: list[str] = []

    def on_train_end(self, trainer: L.Trainer, _: Any) -> None:
        for block, _applied in getattr(trainer.strategy, "_split", None) or ():
            self.split[block.shape] = self.split.get(block.shape, 0) + 1


def text(num_samples: int = 16) -> DataLoader[Any]:
    tokens = torch.randint(VOCABULARY, (num_samples, LENGTH), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens), batch_size=4)


def train(model: str, ranks: int, **options: Any) -> dict[str, Any]:
    task, noting = Task(model), Noting()
    strategy = "auto" if ranks == 1 else make_strategy("tensor_split", **options)
    case = Case(max_epochs=2, trainer={"gradient_clip_val": 0.5, "use_distributed_sampler": False})
    trainer = make_trainer(case, strategy, ranks, callbacks=[noting])
    trainer.fit(task, text(), text(6))
    return {"weights": state(task), "validated": task.validated, "split": noting.split}


@pytest.mark.parametrize("model", MODELS)
def test_models_train_as_on_one_device(world2: World, model: str) -> None:
    reference = train(model, 1)
    for result in world2.run(train, model, 2):
        assert result["split"] == FOUND[model]
        rtol = RTOL.get(model, 1e-9)
        for name, value in reference["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=rtol, atol=rtol / 100)
        assert result["validated"] == pytest.approx(reference["validated"], rel=rtol)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "groups"])
def test_trains_as_on_one_device(world2: World, optimizer: str) -> None:
    case = Case(optimizer=optimizer, trainer={"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}, validate=True)
    reference: Any = fit(case, None, 1)
    for result in world2.run(fit, case, "tensor_split", 2):
        assert_same_weights(result, reference)
        assert result["metrics"] == pytest.approx(reference["metrics"], rel=1e-9)
