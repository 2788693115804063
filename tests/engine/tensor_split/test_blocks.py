"""Blocks are found by the order in which layers run, and by the inputs that they share."""

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GlmConfig, LlamaConfig, MistralConfig, Phi3Config, Qwen3Config

from lightning_multigpu.engine.tensor_split.blocks import find_blocks, order_of_calls

_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
_TOKENS = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
_ROLES = {"colwise": "column", "rowwise": "row", "embedding": "vocab"}


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config, MistralConfig, GlmConfig, Phi3Config])
def test_all_layers_of_the_plans_of_hugging_face_are_found(kind: Any) -> None:
    """What a model's tensor-parallel plan names is found by the order of calls, with the same roles.

    With half as many heads of keys and values, the fused gate of GLM and Phi-3 has the sizes of fused projections of
    queries, keys and values: it was tried as attention, and stayed whole.
    """
    config = kind(num_key_value_heads=2, head_dim=4, **_SIZES, **_TOKENS)
    model = AutoModelForCausalLM.from_config(config)
    with order_of_calls(model) as called:
        model(input_ids=torch.tensor([[1, 2, 3]]))
    blocks = find_blocks(model, called)
    assert sorted(block.shape for block in blocks) == [*["attention"] * 2, *["gate, up, down"] * 2, "vocabulary"]
    found = {name: role for block in blocks for name, role in block.roles.items()}
    base = f"{model.base_model_prefix}."
    plan = {f"{base}{pattern}": style for pattern, style in config.base_model_tp_plan.items()}
    named = {
        name: style
        for name, part in model.named_modules()
        for pattern, style in plan.items()
        if fnmatchcase(name, pattern) and isinstance(part, nn.Linear | nn.Embedding)
    }
    assert len(named) >= 2 * (4 if kind is Phi3Config else 6)
    for name, style in named.items():
        assert _ROLES[style.partition("_")[0]] == found[name], (name, style)
    assert found["lm_head"] == "head"
