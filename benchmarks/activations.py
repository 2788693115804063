"""Bytes that autograd keeps for backward, with and without activation checkpointing.

    python -m benchmarks.activations

The GPT of :mod:`benchmarks.plain_gpt` (6.5 M parameters), 32 samples of 64 bytes, float32. What is counted is each
storage that autograd holds at the end of the forward pass, without parameters.
"""

from __future__ import annotations

from torch import nn

from benchmarks.heading import heading
from benchmarks.plain_gpt import batch_of, gpt, loss_of
from lightning_multigpu.engine.activation_checkpointing import Choice, recomputing, selected_layers
from lightning_multigpu.engine.training_memory import SavedActivations


class Module(nn.Module):
    """Its layers are found as those of a user's module are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = gpt()


def kept_bytes(choice: Choice) -> int:
    """Bytes that the loss of one batch keeps."""
    module = Module()
    text, targets = batch_of(32)
    saved = SavedActivations([*module.parameters(), *module.buffers()])
    with recomputing(selected_layers(module, choice), module), saved.counted():
        loss = loss_of(module.layers(text), targets)
    size_bytes = saved.size_bytes
    loss.backward()
    return size_bytes


def main() -> None:
    print(heading())
    for choice in (False, True, ["Block"]):
        print(f"activation_checkpointing={choice!r}: {kept_bytes(choice) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
