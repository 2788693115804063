"""Hugging Face's decoders in an ordinary LightningModule train as on one device.

They are built from a configuration: nothing is downloaded. Parts of them compute in float32 whatever the precision
(RMSNorm, the loss), so the batches are such that splitting them only divides by powers of two.
"""

from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_multigpu.engine.placeholder import Placeholder
from tests.strategies.tasks import Case, assert_same_weights, make_strategy, make_trainer, state
from tests.world import World

VOCABULARY, LENGTH = 24, 5
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}


SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4, "max_position_embeddings": 8}


def gpt2() -> PreTrainedModel:
    """With a head that is tied to the embedding."""
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(n_positions=8, n_embd=8, n_layer=4, n_head=2, loss_type="ForCausalLM", **TOKENS, **no_dropout)
    return GPT2LMHeadModel(config)


def llama() -> PreTrainedModel:
    """With rotary embeddings and a head of its own."""
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **SIZES, **TOKENS))


def t5() -> PreTrainedModel:
    """An encoder and a decoder, which share the embedding and the head."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}  # tracing a layer takes seconds
    return T5ForConditionalGeneration(T5Config(dropout_rate=0.0, decoder_start_token_id=0, **sizes, **TOKENS))


def bert() -> PreTrainedModel:
    """A classifier, with three embeddings before its layers and a pooler behind them."""
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=VOCABULARY, num_labels=3, num_attention_heads=2, **SIZES, **no_dropout)
    return BertForSequenceClassification(config)


class Decoder(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.losses: list[float] = []
        self.num_held = 0
        torch.manual_seed(3)
        self.model: Any = {"gpt2": gpt2, "llama": llama, "t5": t5, "bert": bert}[kind]()
        # More parameters than the blocks have, but no chain.
        self.heads = nn.ModuleList(nn.Linear(8, 80) for _ in range(8))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["input_ids"][:, 0] % 3 if self.kind == "bert" else batch["labels"]
        loss: Tensor = self.model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        return loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.num_held = sum(not isinstance(parameter, Placeholder) for parameter in self.model.parameters())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        labels = batch["labels"] if self.kind == "t5" else None  # from which its decoder gets its inputs
        return self.model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def texts(num_samples: int) -> Any:
    """Of 5 and of 3 tokens by turns, padded in front or behind; padding is no target."""
    tokens = torch.randint(VOCABULARY, (num_samples, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1::4, 3:] = 0
    mask[3::4, :2] = 0
    columns = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    return [{name: column[index] for name, column in columns.items()} for index in range(num_samples)]


def num_targets(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def num_all_targets(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"] != -100).sum())


def train(kind: str, name: str | None, **options: Any) -> dict[str, Any]:
    module = Decoder(kind)
    if name is None:
        trainer = make_trainer(CASE, "auto", 1)
    else:
        verify_steps = 2 * (name == "pipeline_1f1b")  # one does for all
        options = {"num_micro_batches": 4, "loss_reduction": num_targets, "verify_steps": verify_steps, **options}
        trainer = make_trainer(CASE, make_strategy(name, **options), 2)
    trainer.fit(module, DataLoader(texts(16), batch_size=8), DataLoader(texts(8), batch_size=4))
    val_loss = float(trainer.callback_metrics["val_loss"])
    outputs = trainer.predict(module, DataLoader(texts(8), batch_size=4)) or []
    return {
        "weights": state(module),
        "losses": module.losses,
        "val_loss": val_loss,
        "held": module.num_held,
        "logits": [output.logits for output in outputs],
        "caches": [getattr(output, "past_key_values", None) is not None for output in outputs],
        "tied": getattr(module.model.get_output_embeddings(), "weight", 0)
        is module.model.get_input_embeddings().weight,
        "hooks": len(module.model._forward_pre_hooks),
        "generates": "generate" not in vars(module.model),
    }


CASE = Case(max_epochs=1, trainer={"use_distributed_sampler": False, "gradient_clip_val": 0.5})


@cache
def one_device(kind: str) -> dict[str, Any]:
    return train(kind, None)


CUT = {"split_points": ["model.decoder"], "verify_steps": 0}  # the check traces the model four times more


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("gpt2", "pipeline_1f1b", {}),
        ("llama", "pipeline_zero_bubble", {}),
        ("llama", "pipeline_1f1b", {"activation_checkpointing": True}),
        ("bert", "pipeline_1f1b", {"loss_reduction": "mean"}),
        ("t5", "pipeline_1f1b", {"loss_reduction": num_all_targets, **CUT}),
    ],
    ids=["gpt2", "llama", "computed again", "a classifier", "an encoder and a decoder"],
)
def test_trains_as_on_one_device(kind: str, name: str, options: dict[str, Any], world2: World) -> None:
    """With a cache, blocks that are computed again would find their own keys in it."""
    reference, results = one_device(kind), world2.run(train, kind, name, **options)
    for result in results:
        assert_same_weights(result, reference)
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-6)
        assert result["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-6)
        assert result["tied"] == reference["tied"]
        assert 0 < result["held"] < reference["held"]
        assert (result["hooks"], result["generates"]) == (0, True)
    torch.testing.assert_close(results[0]["logits"], reference["logits"], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(results[1]["logits"], results[0]["logits"], rtol=0, atol=0)
    assert results[0]["caches"] == [False, False]


def train_whole(**options: Any) -> dict[str, Any]:
    module = Decoder("gpt2")
    strategy = make_strategy("ring_ddp", find_unused_parameters=True, **options)  # it has heads without a use
    make_trainer(CASE, strategy, 2).fit(module, DataLoader(texts(16), batch_size=4))
    return {"weights": state(module), "hooks": len(module.model._forward_pre_hooks)}


def test_blocks_that_run_again_on_whole_models(world2: World) -> None:
    plain, *_ = world2.run(train_whole)
    for result in world2.run(train_whole, activation_checkpointing=True):
        assert_same_weights(result, plain)
        assert result["hooks"] == 0
