"""A decoder of Hugging Face, fine-tuned as a pipeline: each process holds a part of its blocks.

::

    lightning-multigpu fit --config configs/hugging_face.yaml          a small Llama on Python's own documentation
    lightning-multigpu fit --config configs/hugging_face.yaml \\
        --model.pretrained=Qwen/Qwen3-0.6B --data.pretrained=Qwen/Qwen3-0.6B --data.text=my_book.txt

In code: ``L.Trainer(strategy="pipeline_1f1b", devices=2).fit(CausalLM(), TokenData())``. Both are ordinary Lightning
classes. Without ``pretrained`` nothing is downloaded, and tokens are bytes. A checkpoint becomes a model of Hugging
Face again, for ``from_pretrained`` and ``generate``, by
``CausalLM.load_from_checkpoint(path).model.save_pretrained("my_model")``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.language_model import python_documentation


class CausalLM(L.LightningModule):
    """A decoder that predicts the next token: windows of tokens, of shape (batch, context), to their mean loss.

    Args:
        pretrained: a model of the Hub, or a directory; by default a small Llama with random weights, whose tokens are
            bytes.
        width: features of each token of that Llama.
        num_layers: its blocks.
        learning_rate: of AdamW.
    """

    def __init__(
        self, pretrained: str | None = None, width: int = 128, num_layers: int = 4, learning_rate: float = 1e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.model: Any = (
            LlamaForCausalLM(small_llama(width, num_layers))
            if pretrained is None
            else AutoModelForCausalLM.from_pretrained(pretrained)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        [tokens] = batch
        loss: Tensor = self.model(tokens, labels=tokens).loss  # the model shifts the labels by one
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        [tokens] = batch
        self.log("val_loss", self.model(tokens, labels=tokens).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class TokenData(L.LightningDataModule):
    """A text in windows of ``context`` tokens; the last tenth of them is for validation.

    Args:
        pretrained: the model whose tokenizer is used; by default tokens are bytes.
        text: a file; by default the documentation that comes with Python.
        context: tokens of a window.
        batch_size: windows in a batch: all stages of a pipeline work on the same ones.

    Raises:
        ValueError: in ``setup``, the text is too short.
    """

    def __init__(
        self, pretrained: str | None = None, text: Path | None = None, context: int = 128, batch_size: int = 16
    ) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.text = text
        self.context = context
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        text = python_documentation() if self.text is None else self.text.read_bytes()
        if self.pretrained is None:
            tokens = torch.tensor(list(text))
        else:
            tokenizer: Any = AutoTokenizer.from_pretrained(self.pretrained)
            tokens = torch.tensor(tokenizer(text.decode(errors="replace"))["input_ids"])
        if len(tokens) < 10 * self.context:
            raise ValueError(f"text={self.text} has {len(tokens)} tokens; {10 * self.context} are needed")
        windows = tokens.unfold(0, self.context, self.context)
        num_val = len(windows) // 10
        self.train_set, self.val_set = TensorDataset(windows[:-num_val]), TensorDataset(windows[-num_val:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, batch_size=self.batch_size)


def small_llama(width: int, num_layers: int) -> LlamaConfig:
    """A Llama over bytes, with heads of 32 features."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=max(1, width // 32),
        num_key_value_heads=max(1, width // 32),
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
    )
