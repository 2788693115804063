"""Layers are split over ranks, and train as on one device."""

import functools
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_multigpu import TensorSplitStrategy
from lightning_multigpu.communication.metering.traffic import OperationTotals
from lightning_multigpu.engine.optimizer_state import held_states
from lightning_multigpu.engine.tensor_split.parts import local
from tests.modules import TwoOptimizers
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    assert_trains_alike,
    dataset,
    fit,
    fit_module,
    make_strategy,
    make_trainer,
    moving_average,
    state,
    trained_weights,
)
from tests.strategies.tensor_parallel.language import (
    HEADS,
    VOCABULARY,
    WIDTH,
    Attention,
    Block,
    FeedForward,
    Gated,
    Language,
    Task,
    fused,
    normed,
    text,
)
from tests.world import World

CASE = Case(max_epochs=1, trainer={"use_distributed_sampler": False})
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": HEADS, "hidden_size": WIDTH, "intermediate_size": 20}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Grouped(nn.Module):
    """Attention as Llama's: two heads of queries have one of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, HEADS // 2
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (each[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Mapped(FeedForward):
    """Computes sample by sample in a transform, which ended the search for layers with torch's raw text."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(super().forward)(x)  # type: ignore[no-any-return]


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


def of_hugging_face(kind: str, head: str, **options: Any) -> nn.Module:
    import transformers  # takes seconds, on each rank that does so

    config = getattr(transformers, f"{kind}Config")(**options, **TOKENS)
    return getattr(transformers, f"{kind}{head}")(config)  # type: ignore[no-any-return]


GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
T5 = {"d_model": WIDTH, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": HEADS, "dropout_rate": 0.0}
LLAMA = {**LAYERS, "num_key_value_heads": 2}
GATED = {"vocabulary": 1, "attention": 2, "gate, up, down": 2}
PAIRS = {"vocabulary": 1, "attention": 2, "first, second": 2}
# How a model is made, and the blocks that are found in it.
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "gpt2": (partial(of_hugging_face, "GPT2", "LMHeadModel", n_positions=8, **GPT2), PAIRS),
    "llama": (partial(of_hugging_face, "Llama", "ForCausalLM", **LLAMA), GATED),
    "qwen3": (partial(of_hugging_face, "Qwen3", "ForCausalLM", head_dim=6, **LLAMA), GATED),
    "bert": (
        partial(of_hugging_face, "Bert", "ForSequenceClassification", num_labels=3, **LAYERS, **NO_DROPOUT),
        PAIRS | {"first, second": 3},
    ),
    "t5": (  # its own attention has a bias for each head
        partial(of_hugging_face, "T5", "ForConditionalGeneration", decoder_start_token_id=0, **T5),
        PAIRS | {"first, second": 4},
    ),
    "fused": (fused, GATED),
    "normed": (normed, GATED),
    "by heads": (
        lambda: Language(Block(Attention("heads"), Gated(fused=False))),
        {"vocabulary": 1, "attention": 1, "gate, up, down": 1},
    ),
    "grouped": (lambda: Language(*(Block(Grouped(), Gated(fused=False)) for _ in range(2))), GATED),
    "encoder": (lambda: Language(encoder()), PAIRS),
    "decoder": (lambda: Language(Decoder()), PAIRS | {"attention": 4}),
    "one bad block": (
        lambda: Language(*(FeedForward(nn.Softmax(-1) if i == 2 else nn.GELU()) for i in range(5))),
        {"vocabulary": 1, "first, second": 4},
    ),
    "mapped": (
        lambda: Language(*(Block(Attention(), Mapped(nn.GELU())) for _ in range(2))),
        {"vocabulary": 1, "attention": 2},
    ),
    "equal layers": (
        lambda: Language(*(part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))),
        {"vocabulary": 1, "first, second": 2},
    ),
}
# These compute norms, softmax or losses in float32 whatever the precision.
RTOL = dict.fromkeys(("gpt2", "qwen3", "t5", "bert"), 1e-4)

# One of each kind of block; the others are found by test_own_transformers, and some are trained below.
TRAINED = ("qwen3", "t5", "fused", "encoder", "mapped")


class Noting(Callback):
    """What was split, what its last step has sent, and the elements of parameters and states that a rank holds."""

    def __init__(self) -> None:
        self.split: dict[str, int] = {}
        self.held = self.state = 0
        self.sent: tuple[OperationTotals, ...] = ()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.held = sum(local(parameter).numel() for parameter in module.parameters())
        self.state = sum(v.numel() for s in held_states(trainer.optimizers[0]).values() for v in s.values())
        if isinstance(trainer.strategy, TensorSplitStrategy):
            self.sent = trainer.strategy.meter.steps[-1].operations
            self.split = dict(Counter(block.shape for block, _applied in trainer.strategy._layers.split))


class Unfreezing(Callback):
    """All but one layer is frozen in the first epoch, as by BackboneFinetuning."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        module.requires_grad_(False).model.blocks[1].attention.proj.requires_grad_(True)  # type: ignore[union-attr, index]

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.requires_grad_(trainer.current_epoch > 0)
        module.model.blocks[1].attention.proj.requires_grad_(True)  # type: ignore[union-attr, index]


def train(
    model: str, ranks: int, *, kind: type[Task] = Task, unfreezes: bool = False, **options: Any
) -> dict[str, Any]:
    task, noting = kind(MODELS[model][0]), Noting()
    case = replace(CASE, max_epochs=2 if unfreezes else 1, strategy=options)
    of_trainer: dict[str, Any] = {"callbacks": [noting, *[Unfreezing()] * unfreezes], "gradient_clip_val": 0.5}
    fit_module(task, "tensor_split" if ranks > 1 else None, ranks, case, text(), text(6), **of_trainer)
    classes = {type(parameter) for parameter in task.parameters()}
    return {"weights": state(task), "validated": task.validated, "classes": classes, **vars(noting)}


@functools.cache
def on_one_device(model: str) -> dict[str, Any]:
    return train(model, 1)


@pytest.mark.parametrize("model", TRAINED)
def test_models_train_as_on_one_device(world2: World, model: str) -> None:
    reference = on_one_device(model)
    for result in world2.run(train, model, 2):
        assert result["split"] == MODELS[model][1]
        assert result["classes"] == {nn.Parameter}
        rtol = RTOL.get(model, 1e-9)
        assert_same_weights(result, reference, rtol=rtol)
        assert result["validated"] == pytest.approx(reference["validated"], rel=rtol)
        if model == "fused":
            assert result["held"] == result["state"] < 0.65 * reference["held"], "norms, biases of row layers are whole"
        if model == "qwen3":
            layer = "tensor model.model.layers.1."
            found = {each.group.removeprefix(layer): each.count for each in result["sent"] if layer in each.group}
            of_block = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
            assert found == dict.fromkeys(of_block, 1), "two forward and two backward"


def saved(path: Path) -> dict[str, Tensor]:
    def save(trainer: L.Trainer, module: Any) -> None:
        with pytest.raises(RuntimeError, match=r"data_ptr on .* go on with trainer\.strategy\.whole\(tensor\)"):
            module.model.save_pretrained(path)  # which looks at addresses in memory
        whole = {name: trainer.strategy.whole(value) for name, value in module.model.state_dict().items()}  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            module.model.save_pretrained(path, state_dict=whole)

    task = Task(MODELS["gpt2"][0])
    fit_module(task, "tensor_split", 2, CASE, text(), callbacks=[LambdaCallback(on_train_epoch_end=save)])
    return {name.removeprefix("model."): value for name, value in state(task).items()}


def test_models_of_hugging_face_are_saved_whole_or_not_at_all(world2: World, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    expected = world2.run(saved, tmp_path)[0]
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), expected)


@pytest.mark.parametrize(("model", "choice"), [("gpt2", True), ("equal layers", [nn.Linear])])
def test_split_layers_are_computed_again(world2: World, model: str, choice: Any) -> None:
    for result in world2.run(train, model, 2, activation_checkpointing=choice):
        assert result["split"] == MODELS[model][1]
        assert_same_weights(result, on_one_device(model), rtol=RTOL.get(model, 1e-9))


def test_layers_that_are_frozen_in_the_first_batch_are_trained_later(world2: World) -> None:
    """A norm of queries, frozen while the split was tried, had a rank's part of its gradient when it was unfrozen."""
    reference = train("normed", 1, unfreezes=True)
    for result in world2.run(train, "normed", 2, unfreezes=True):
        assert result["split"] == GATED
        assert_same_weights(result, reference)


def test_ranks_without_heads_of_their_own(world4: World) -> None:
    """Two heads of keys and values on four ranks: attention without heads ended a rank's process under torch 2.11."""
    for result in world4.run(train, "grouped", 4):
        assert result["split"] == GATED
        assert_same_weights(result, on_one_device("grouped"))


def test_groups_side_by_side(world4: World) -> None:
    """Two data ranks of two tensor ranks each; the data ranks average through a ring."""
    options = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
    case = Case(optimizer="adamw", trainer=options, validate=True, max_epochs=1)
    reference: Any = fit(case, None, 1)
    for result in world4.run(fit, replace(case, strategy={"tensor_parallel_size": 2}), "tensor_split", 4):
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


def averaged(ranks: int, kind: str, path: str) -> dict[str, Any]:
    task, averaging = Task(lambda: Language(Normed(), Normed())), AVERAGING[kind]()
    saving = LambdaCallback(on_train_epoch_end=lambda trainer, _: trainer.save_checkpoint(path))
    case, options = replace(CASE, max_epochs=3), {"callbacks": [averaging, saving]}
    fit_module(task, "tensor_split" if ranks > 1 else None, ranks, case, text(), text(6), **options)
    saved = torch.load(path, weights_only=False)
    own = [each["average_model_state"] for each in saved["callbacks"].values() if "average_model_state" in each]
    keys = ("state_dict", "current_model_state", "averaging_state")
    return {
        "weights": state(task),
        "validated": task.validated[-2:],
        "saved": [{name: {**saved[name]} for name in keys if name in saved}, own],
    }


@pytest.mark.parametrize("kind", AVERAGING)
def test_averages_of_weights(world2: World, kind: str, tmp_path: Any) -> None:
    reference = averaged(1, kind, str(tmp_path / "one.ckpt"))
    for result in world2.run(averaged, 2, kind, str(tmp_path / "two.ckpt")):
        assert_same_weights(result, reference)
        assert result["validated"] == pytest.approx(reference["validated"], rel=1e-9)
        torch.testing.assert_close(result["saved"], reference["saved"], rtol=1e-9, atol=1e-11)


class Scored(Task):
    def loss(self, batch: list[Tensor]) -> Tensor:
        self.correct = (self.model(batch[0]).argmax(-1) == batch[0]).sum()
        return super().loss(batch)


def told(plan: Any) -> tuple[dict[str, Any], list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        messages: list[str] = []
        patch.setattr("lightning_multigpu.strategies.tensor_parallel.split_layers.rank_zero_info", messages.append)
        return train("fused", 2, kind=Scored, plan=plan), messages


def test_a_plan_by_hand(world2: World) -> None:
    plan = {"*.attention.qkv": "column", "*.attention.proj": "row", "*.blocks.1.feed_forward.up.0": "column"}
    plan |= {"model.embedding": "vocab", "model.head": "head"}
    for result, messages in world2.run(told, plan):
        assert result["split"] == {"vocabulary": 1, "attention": 2, "plan": 1}
        assert_same_weights(result, on_one_device("fused"))
        for gathers, file in (("head for argmax", "test_tensor_split"), ("blocks.1.feed_forward.up.0 for", "language")):
            words = rf"tensor_split gathers values of model\.{re.escape(gathers)}.*\(.*{file}\.py:\d+\)"
            assert any(re.search(words, message) for message in messages)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide the 2 ranks"),
        ({"tensor_parallel_size": 1}, "tensor_parallel_size=1: layers are split over 2 ranks or more"),
        ({"plan": {"*.up": "colum"}}, "plan='colum'"),
        ({"plan": {}}, "pass 'auto', or a mapping"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ({"verify_steps": 2}, "verify_steps=2: pass 1 to compare"),
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
    words = r"'\*\.attention\.quv': 'column'} matches no module .* model\.blocks\.\*\.attention\.qkv"
    trainer = make_trainer(Case(), make_strategy(name, plan=plan), 4 if name == "hybrid" else 2)
    with pytest.raises(ValueError, match=words):  # before a rank is started
        trainer.fit(Task(), text())


@pytest.mark.parametrize("name", ["tensor_split", "hybrid"])
def test_compiled_layers_are_refused(name: str) -> None:
    """The trial failed within torch.compile, by an error that named nothing of the user's."""
    trainer = make_trainer(Case(), make_strategy(name), 4 if name == "hybrid" else 2)
    for number, message in enumerate(["model.blocks.1 is compiled", "model is compiled", "Task is compiled"]):
        task = Task()
        (task.model.blocks[1], task.model, task)[number].compile(backend="eager")  # type: ignore[index, operator, union-attr]
        with pytest.raises(ValueError, match=message):
            trainer.fit(task, text())


class ReadsGradients(Task):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            size = parameter.grad.numel() ** 0.5
            parameter.grad.mul_(parameter.norm() / parameter.grad.norm() * size / 100)
        self.model.embedding.weight.grad[3] = 0.0  # type: ignore[index, union-attr]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.noted += [float(norm) for norm in grad_norm(self, 2).values()]
        self.noted.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.1)))


class StepsByHand(Task):
    def optimizer_step(self, epoch: int, index: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        self.noted.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.1)))
        if index != 1:
            optimizer.step()

    def on_train_batch_end(self, *args: Any) -> None:
        weight = self.model.embedding.weight  # type: ignore[union-attr]
        assert len(weight) == VOCABULARY
        self.noted += [float(parameter.detach().norm()) for parameter in self.parameters()]


@pytest.mark.parametrize("kind", [ReadsGradients, StepsByHand])
def test_hooks_read_whole_gradients(world2: World, kind: type[Task]) -> None:
    """They read a rank's part: norms of Lightning's grad_norm were too small, and ranks clipped by different ones."""
    reference = trained_weights(kind, None, 1, CASE, data=text)
    for result in world2.run(trained_weights, kind, "tensor_split", 2, CASE, data=text):
        assert_same_weights(result, reference)
        assert result["noted"] == pytest.approx(reference["noted"], rel=1e-9)


class Closures(TwoOptimizers):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step(closure=functools.partial(self.closure, optimizer, *batch))
        for parameter in self.second.parameters():
            parameter.data.clamp_(-0.3, 0.3)

    def closure(self, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(self.second(self.first(x).tanh()), y)
        self.manual_backward(loss)
        return loss


def test_closures_train_as_one_device_does(world2: World) -> None:
    """Refused while splits were compared by the loss of a step; the trial of a split must not step, clamp or count."""
    assert_trains_alike(world2, Closures, "tensor_split", Case(max_epochs=1))


def test_groups_side_by_side_average_what_is_stepped_by_hand(world4: World) -> None:
    options = {"tensor_parallel_size": 2, "find_unused_parameters": True}
    assert_trains_alike(world4, TwoOptimizers, "tensor_split", Case(max_epochs=1, strategy=options))


def shuffled() -> DataLoader[Any]:
    order = torch.Generator().manual_seed(int(os.environ.get("LOCAL_RANK", 0)))
    return DataLoader(dataset(16), batch_size=4, shuffle=True, generator=order)


def test_ranks_of_a_group_train_on_the_same_batch_whatever_their_loaders_draw(world2: World) -> None:
    assert_trains_alike(world2, Classifier, ("tensor_split", "hybrid"), CASE, data=shuffled)
