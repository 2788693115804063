"""The blocks of Hugging Face's models are found by what the models say, wherever else layers stand in a list."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.hugging_face import block_lists, models_in_stages
from lightning_multigpu.engine.pipeline.splitting.chain import find_chain

TOKENS = {"vocab_size": 16, "bos_token_id": 0, "eos_token_id": 1}
LLAMA = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=2, **TOKENS)


def llama(num_layers: int = 2) -> LlamaModel:
    return LlamaModel(LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": num_layers}))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=3, n_head=1, n_positions=4, **TOKENS))


class Step(nn.Linear): ...


class Planned(PreTrainedModel):
    """Its plan names a list, and says nothing of larger ones."""

    base_model_prefix = "planned"

    class Config(PreTrainedConfig):
        base_model_pp_plan = {"steps": (["x"], ["x"])}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(self.Config())
        self.experts = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))
        self.steps = nn.ModuleList(Step(2, 2) for _ in range(2))
        self.towers = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))


class Unplanned(Planned):
    _no_split_modules = ["Step"]  # noqa: RUF012

    class Config(PreTrainedConfig):
        pass


def beside(**others: nn.Module) -> nn.Module:
    return nn.ModuleDict({"model": llama(), **others})


HEADS = [nn.Linear(99, 99) for _ in range(4)]


@pytest.mark.parametrize(
    ("build", "lists", "chosen"),
    [
        (llama, ["layers"], "layers"),
        (Planned, ["steps"], "steps"),
        (Unplanned, ["steps"], "steps"),
        (gpt2, ["transformer.h"], "transformer.h"),
        (lambda: beside(large=llama(5)), ["model.layers", "large.layers"], "large.layers"),
        (lambda: beside(heads=nn.ModuleList(HEADS)), ["model.layers"], "model.layers"),
        (lambda: beside(head=nn.Sequential(*HEADS[:2])), ["model.layers"], "head"),
    ],
    ids=["plan", "smaller plan", "classes", "gpt2", "larger model", "larger list", "larger sequential"],
)
def test_lists_of_blocks(build: Callable[[], nn.Module], lists: list[str], chosen: str) -> None:
    """By the plan of a model, else by the classes of its blocks; a list beside the model need not be a chain."""
    module = build()
    assert block_lists(module) == lists
    assert find_chain(module, "auto", 2).name == chosen


def test_too_few_blocks_are_not_made_up_for_by_another_list() -> None:
    module = beside(heads=nn.ModuleList(HEADS))
    assert find_chain(module, "heads", 2).name == "heads"
    with pytest.raises(ValueError, match=r"with 3 layers or more.*'model.layers' \(2 layers\)"):
        find_chain(module, "auto", 3)


@pytest.mark.parametrize("build", [gpt2, lambda: LlamaForCausalLM(LLAMA)])
def test_nothing_is_cached_for_the_time_of_a_run(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    tokens = torch.ones(1, 3, dtype=torch.long)
    before = model.config.to_dict()
    with models_in_stages(nn.ModuleDict({"model": model})):
        for output in (model(tokens), model(tokens, use_cache=False), model.base_model(tokens)):
            assert output.past_key_values is None
        with pytest.raises(PipelineError, match=r"is called with use_cache=True.*leave it out"):
            model(tokens, use_cache=True)
        with pytest.raises(PipelineError, match=r"generate\(\) runs the model once for every token.*on one device"):
            model.generate(tokens)
        assert model.config.to_dict() == before, "what a checkpoint keeps of the configuration stays the user's"
    assert model(tokens).past_key_values is not None
    assert model.generate(tokens, max_new_tokens=1, do_sample=False).shape == (1, 4)
