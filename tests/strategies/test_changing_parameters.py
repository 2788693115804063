"""Layers that are unfrozen, frozen or added while training runs.

torch's DistributedDataParallel averages the gradients of parameters that were trainable when it was made. A backbone
that was unfrozen later trained on each rank for itself, and nothing said so.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn

from lightning_multigpu import PipelineStrategy, RingDDPStrategy, TensorSplitStrategy
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_trains_alike,
    fit_module,
    make_trainer,
    rows_with_a_whole_model,
    train_loader,
    trained_weights,
)
from tests.world import World, rank


class Frozen(Classifier):
    """Begins with its first layer frozen, and changes in one of its hooks which layers are trained."""

    def __init__(self, change: "Callable[[Frozen], None] | None" = None, hook: str = "on_train_epoch_start") -> None:
        super().__init__()
        self.backbone = self.first  # where BackboneFinetuning looks for it
        self.extra: nn.Linear | None = None
        self.change, self.hook = change, hook
        if change is not None:
            self.first.requires_grad_(False)

    def changes(self, hook: str) -> None:
        if self.change is not None and hook == self.hook:
            self.change(self)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.extra is None else x + self.extra(x))

    def on_train_epoch_start(self) -> None:
        self.changes("on_train_epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch_idx = batch_idx
        self.changes("on_train_batch_start")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.changes("training_step")
        return super().training_step(batch, batch_idx)

    def configure_callbacks(self) -> Any:
        frees = BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_lr=0.1, train_bn=False)
        return [frees] if self.change is None else []

    def configure_optimizers(self) -> Any:
        trained = self.parameters() if self.change else [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.2, momentum=0.9)


def unfreeze(module: Frozen) -> None:
    module.first.requires_grad_(module.current_epoch >= 1)


def swap(module: Frozen) -> None:
    module.first.requires_grad_(module.current_epoch % 2 == 1)
    module.second.requires_grad_(module.current_epoch % 2 == 0)


def unfreeze_while_accumulating(module: Frozen) -> None:
    if (module.current_epoch, module.batch_idx) == (1, 1):
        module.first.requires_grad_(True)


def freeze_while_accumulating(module: Frozen) -> None:
    module.second.requires_grad_((module.current_epoch, module.batch_idx) < (1, 1))
    module.first.requires_grad_(True)


def add_layer(module: Frozen, *, is_alike: bool = False) -> None:
    if module.current_epoch == 1:
        # Unless they are alike, each rank draws its own.
        torch.manual_seed(4 + rank() if torch.distributed.is_initialized() and not is_alike else 4)
        module.extra = nn.Linear(6, 6, dtype=torch.float64)
        module.trainer.optimizers[0].add_param_group({"params": module.extra.parameters()})


def unfreeze_and_add(module: Frozen) -> None:
    unfreeze(module)
    add_layer(module)


def take_another_optimizer(module: Frozen) -> None:
    if module.current_epoch == 1:
        module.trainer.optimizers = [torch.optim.Adam(module.parameters(), lr=0.05)]


def set_up_again(module: Frozen) -> None:
    if module.current_epoch == 1:
        module.trainer.strategy.setup_optimizers(module.trainer)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def parametrize(module: Frozen) -> None:
    if module.current_epoch == 1:
        nn.utils.parametrize.register_parametrization(module.second, "weight", Halved())


def move(module: Frozen) -> None:
    with torch.no_grad():
        module.second.weight.set_(module.second.weight.clone())  # type: ignore[call-overload]
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data.clone()


def tie(module: Frozen) -> None:
    if module.current_epoch == 1:
        module.second.bias.data = module.first.bias.data[:3]


@dataclass
class Story:
    change: Callable[[Frozen], None] | None = unfreeze
    hook: str = "on_train_epoch_start"
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    is_exact: bool = True


OUTER = {"average_every": 2, "outer_optimizer": "nesterov", "compression": "int8", "shared_memory": False}
ACCUMULATING = {"accumulate_grad_batches": 2}
STORIES = {
    "BackboneFinetuning": Story(None),
    "at the start of an epoch": Story(),
    "at the start of a batch": Story(hook="on_train_batch_start"),
    "in the training step": Story(hook="training_step"),
    "frozen and unfrozen in turns": Story(swap),
    "a new layer": Story(add_layer, trainer={"gradient_clip_val": 0.1}),
    "unfrozen with a new layer": Story(unfreeze_and_add),
    "a new layer, the same on all ranks": Story(partial(add_layer, is_alike=True)),
    "unfrozen while batches are accumulated": Story(
        unfreeze_while_accumulating, "on_train_batch_start", trainer=ACCUMULATING
    ),
    "frozen while batches are accumulated": Story(
        freeze_while_accumulating, "on_train_batch_start", trainer=ACCUMULATING
    ),
    "a parametrization": Story(parametrize, strategy={"find_unused_parameters": True}),
    "moved in memory": Story(move, "on_train_batch_start"),
    "another optimizer": Story(take_another_optimizer),
    "optimizers that are set up again": Story(set_up_again),
    "accumulating, over sockets": Story(strategy={"shared_memory": False}, trainer=ACCUMULATING),
    "compressed": Story(strategy={"compression": "int8", "shared_memory": False}, is_exact=False),
    "local SGD": Story(strategy={"average_every": 2}, is_exact=False),
    "local SGD, an outer optimizer": Story(strategy=OUTER, is_exact=False),
    "local SGD, an outer optimizer, a new layer": Story(add_layer, strategy=OUTER, is_exact=False),
}


def train(story: Story, strategy: str | None, ranks: int = 2) -> dict[str, Tensor]:
    case = Case(num_samples=24, trainer=story.trainer, strategy=story.strategy)
    make_module = partial(Frozen, story.change, story.hook)
    return trained_weights(make_module, strategy, ranks, case)["weights"]  # type: ignore[no-any-return]


def train_in_turns(names: Sequence[str], strategy: str) -> dict[str, dict[str, Tensor]]:
    return {name: train(STORIES[name], strategy) for name in names}


@cache
def on_one_device(name: str) -> dict[str, Tensor]:
    return train(STORIES[name], None, 1)


IN_TURNS = ("at the start of a batch", "frozen and unfrozen in turns")
ANOTHER, SET_UP_AGAIN = "another optimizer", "optimizers that are set up again"
AT_ANY_TIME = (
    *IN_TURNS,
    "in the training step",
    "unfrozen while batches are accumulated",
    "frozen while batches are accumulated",
    "moved in memory",
)
FOLLOWED = {
    "ring_ddp": (*STORIES,),
    "pipeline_1f1b": (*IN_TURNS, ANOTHER, SET_UP_AGAIN),
    "ddp_sharded": (*AT_ANY_TIME, "BackboneFinetuning", "a parametrization", "unfrozen with a new layer"),
    "cpu_ps": (*AT_ANY_TIME, "a new layer, the same on all ranks"),
    "sync_ps": (*AT_ANY_TIME, "a new layer, the same on all ranks"),
}


@pytest.mark.parametrize("strategy", FOLLOWED)
def test_what_changes_during_training_trains_as_on_one_device(strategy: str, world2: World) -> None:
    """After 3 epochs all tensors of the replicas differed by about 5e-3.

    Parameter servers failed at the first parameter that was frozen when training began. After ``gradient.data = ...``
    ranks averaged what was left in the buckets, and ``set_()`` dropped the hooks of a parameter.
    """
    first, second = world2.run(train_in_turns, FOLLOWED[strategy], strategy, timeout_s=180)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    expected = {name: on_one_device(name) for name in first if STORIES[name].is_exact}
    torch.testing.assert_close({name: first[name] for name in expected}, expected, rtol=1e-9, atol=1e-11)


def add_accumulate_hook(module: Frozen) -> None:
    if module.current_epoch == 1:
        module.second.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def freeze_in_step(module: Frozen) -> None:
    module.first.requires_grad_(True)
    module.second.requires_grad_(False)


# Each rank stepped another optimizer with its own gradients, until the end of the fit compared the weights.
REPLACED = r"optimizer 0 \((SGD|Adam)\) was set during a fit.*use strategy='ring_ddp'"
# Owners updated a copy for each of the two, so that one of the updates was lost.
SHARED = r"two parameters of shapes \(\d+,\) and \(\d+,\) share memory.*use strategy='ring_ddp'"
# A new layer trained to other weights, and a hook ran after each micro-batch, without a word.
LATE = r"extra.weight has come to the optimizer while training runs.*freeze it until it is used"
PER_MICRO_BATCH = r"register_post_accumulate_grad_hook: in a pipeline.*use on_before_optimizer_step"
UNUSED = r"does not depend on layers\.2\.weight, .*RingDDPStrategy\(find_unused_parameters=True\).*on_train_epoch_start"


@pytest.mark.parametrize(
    ("strategy", "story", "error", "words"),
    [
        ("ddp_sharded", STORIES[ANOTHER], ValueError, REPLACED),
        ("cpu_ps", STORIES[SET_UP_AGAIN], ValueError, REPLACED),
        ("sync_ps", STORIES[ANOTHER], ValueError, REPLACED),
        *((name, Story(tie), ValueError, SHARED) for name in ("ddp_sharded", "cpu_ps", "sync_ps")),
        ("hybrid", STORIES["a new layer, the same on all ranks"], ValueError, LATE),
        ("pipeline_1f1b", Story(add_accumulate_hook), ValueError, PER_MICRO_BATCH),
        ("ring_ddp", Story(freeze_in_step, "training_step"), RuntimeError, UNUSED),
    ],
)
def test_changes_that_are_not_followed_are_refused(
    strategy: str, story: Story, error: type[Exception], words: str, world2: World
) -> None:
    world2.run_raising(error, words, train, story, strategy)


class DifferentlyError(Frozen):
    def __init__(self) -> None:
        change = lambda module: [module.first, module.second][rank()].requires_grad_(True)  # noqa: E731
        super().__init__(change, "on_train_batch_start")
        self.requires_grad_(False)
        self.layers[0].weight.requires_grad_(True)


class UnfreezingError(Frozen):
    """Unfreezes a layer in the middle of a step, in the second epoch."""

    def __init__(self) -> None:
        super().__init__(unfreeze, "training_step")


class GrowingError(Frozen):
    """Lengthens a sequence with the epoch; the message was that shapes depend on values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.expand(1 + self.current_epoch, *x.shape)).mean(0)


class NoiseError(Frozen):
    """Adds random numbers to a weight that all ranks and stages have; they draw different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.shared(x))

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.shared.weight += 1e-9 * torch.randn(6, 6, generator=torch.Generator().manual_seed(rank()))


def fail(module: Frozen, strategy: Any) -> tuple[str, int]:
    trainer = make_trainer(Case(), strategy, 2)
    with pytest.raises((RuntimeError, ValueError, SystemExit)) as caught:
        trainer.fit(module, train_loader(Case(), trainer))
    return str(caught.value), trainer.global_step


FAILURES: dict[str, tuple[type[Frozen], Any, str, int]] = {
    "each rank unfreezes another layer": (
        DifferentlyError,
        RingDDPStrategy(find_unused_parameters=True),
        r"layers\.0\.bias: trained on rank 0; \(none\) on rank 1\n.*Unfreeze, freeze and add layers on all ranks",
        0,
    ),
    "a stage is unfrozen within the step": (
        UnfreezingError,
        PipelineStrategy(balance=[1, 7]),
        r"stage 0 sends .*requires_grad.*on_train_epoch_start",
        7,
    ),
    "a sequence grows with the epoch": (
        GrowingError,
        PipelineStrategy(balance=[4, 4]),
        r"stage 0 sends .*: shapes .* follow from those of the batch\. .* cut in on_after_batch_transfer",
        14,
    ),
    "a hook draws random numbers": (
        NoiseError,
        RingDDPStrategy(),
        r"same parameters any more: shared\.weight: checksum .* rank 0; checksum .* rank 1\n.*hook that draws random",
        1,
    ),
    "a hook draws random numbers for what ranks of a tensor group hold whole": (
        NoiseError,
        TensorSplitStrategy(check_replicas_every_n_steps=3),
        r"same parameters any more: shared\.weight: checksum",
        2,
    ),
    "a hook draws random numbers on each stage": (
        NoiseError,
        PipelineStrategy(balance=[4, 4], replicated=["shared"], check_replicas_every_n_steps=3),
        r"shared\.weight: checksum .* rank 0; checksum .* rank 1",
        2,
    ),
}


@pytest.mark.parametrize("story", FAILURES)
def test_what_cannot_train_alike_is_refused(story: str, world2: World) -> None:
    module, strategy, words, steps = FAILURES[story]
    results = world2.run(fail, module(), strategy)
    messages = "\n".join(message for message, _ in results)
    assert re.search(words, messages, re.DOTALL), messages
    assert [global_step for _, global_step in results] == [steps, steps]


class Outside(Classifier):
    def configure_optimizers(self) -> Any:
        self.hidden = [nn.Linear(6, 6).double()]
        return torch.optim.SGD([*self.parameters(), *self.hidden[0].parameters()], lr=0.1)


def test_a_layer_in_a_plain_list_is_refused() -> None:
    words = r"optimizer 0 \(SGD\) trains a parameter of shape \(6, 6\) .*Outside.*nn\.ModuleList"
    with pytest.raises(ValueError, match=words):
        fit_module(Outside(), "dp", 2)


class ClampsData(Classifier):
    """Assigns clamped weights between the step and its backward, as old WGANs do."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.4, 0.4)


def test_assigned_data(world2: World) -> None:
    """ddp_sharded lost such values, and layers that tensor_split has split used them in backward."""
    names = [*(row.name for row in rows_with_a_whole_model()), "tensor_split"]
    assert_trains_alike(world2, ClampsData, names)
