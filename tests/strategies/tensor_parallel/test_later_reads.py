"""Split layers train and log as one device, whatever code reads, changes or keeps, during a fit and after it."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from lightning_multigpu.engine.tensor_split.parts import SplitTensor
from tests.strategies.tasks import Case, Classifier, assert_same_weights, eval_loader, fit_module, trained_weights
from tests.world import World

CASE = Case(max_epochs=2, num_samples=24)
KINDS = ("other activations", "hidden values", "weights", "changed weights")


class Block(nn.Module):
    """A block that tensor_split splits, with a branch beside it that needs all hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)
        self.wide, self.narrow, self.alpha = nn.Linear(6, 16), nn.Linear(16, 6), 0.0
        self.between: Any = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.between(self.up(x)))
        return x + self.alpha * self.narrow(F.normalize(self.wide(x), dim=-1))


class Blocks(Classifier):
    """Changes in its second epoch what it reads of a block."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.reads = reads
        self.blocks = nn.Sequential(Block(), Block())
        self.hidden: list[Tensor] = []
        self.noted: list[float] = []
        for block in self.blocks:
            block.up.register_forward_hook(self.notes)
        self.listed_before_the_fit = [p for name, p in self.named_parameters() if "up" in name]

    def notes(self, _: nn.Module, inputs: Any, output: Tensor) -> None:
        self.hidden.append(output)
        if self.reads == "hidden values" and self.trainer.current_epoch:  # units that are dead
            self.noted.append(float((output > 0.5).double().mean((0,)).lt(0.2).sum()))

    @torch.no_grad()
    def on_train_epoch_start(self) -> None:
        for block in self.blocks if self.current_epoch else ():
            if self.reads == "other activations":
                block.alpha, block.between = 1.0, lambda x: F.softmax(x, -1)
            elif self.reads == "changed weights":
                nn.init.orthogonal_(block.up.weight)
                for parameter in block.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.reads == "weights":
            self.noted += [float(p.detach().norm()) for p in self.parameters()]

    def on_train_end(self) -> None:
        self.hidden.clear()  # their graphs keep process groups

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.hidden.clear()
        loss = F.cross_entropy(self.layers(self.blocks(batch[0])), batch[1])
        if self.current_epoch and self.reads == "hidden values":
            loss = loss + 0.1 * sum(values.abs().mean() for values in self.hidden)
        if self.current_epoch and self.reads == "weights":
            loss = loss + 0.3 * self.blocks[1].up.weight.norm()
            loss = loss + 0.1 * sum(p.square().sum(0).sqrt().sum() for p in self.listed_before_the_fit)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.reads == "hidden values":
            hidden = torch.tanh(self.blocks[0].up(batch[0]))
            self.noted += [float(hidden.square().mean()), float(hidden.argmax(-1).sum())]


@pytest.mark.parametrize(("strategy", "reads"), [*(("tensor_split", reads) for reads in KINDS), ("hybrid", "weights")])
def test_what_code_does_later(strategy: str, reads: str, world2: World) -> None:
    """The trial of the first batch did not see it, and layers trained or logged other numbers, in silence."""
    options: Any = {"case": CASE, "validation": eval_loader(8)}
    expected = trained_weights(lambda: Blocks(reads), None, 1, **options)
    for found in world2.run(trained_weights, lambda: Blocks(reads), strategy, 2, **options):
        assert_same_weights(found, expected)
        assert found["noted"] == pytest.approx(expected["noted"], rel=1e-9)


def train_twice() -> int:
    module = Classifier()
    fit_module(module, "ddp_sharded", 2, CASE)
    return fit_module(module, "tensor_split", 2, CASE).global_step


def test_a_module_that_another_strategy_has_trained_is_split(world2: World) -> None:
    """A graph of the first fit lived on in a cycle, and its nodes had the whole shapes of the parameters."""
    assert all(world2.run(train_twice))


class Keeps(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        values = {name: p.detach().clone() for name, p in self.named_parameters()}
        if not self.kept:
            self.kept = {"copy": copy.deepcopy(self.layers), "average": AveragedModel(self.layers), "ema": values}
            self.kept["masks"] = {name: value.abs() > 0.2 for name, value in values.items()}
            self.kept["weight"] = copy.deepcopy(self.first.weight)
            self.kept["written"] = pickle.loads(pickle.dumps(self.layers))
            written = io.BytesIO()
            torch.save([self.layers, self.layers.state_dict()], written)
            self.kept["saved"] = torch.load(io.BytesIO(written.getvalue()), weights_only=False)
        for name, value in self.kept["ema"].items():
            value.mul_(0.9).add_(values[name], alpha=0.1)
        self.kept["average"].update_parameters(self.layers)
        self.kept["copy"][0].weight.mul_(0.5)
        self.kept["outputs"] = self.kept["copy"](torch.ones(1, 6).double())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = (self.kept, {"view": [self.first.weight.data]})

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        value = {**{type(part).__name__: 1 for part in value.modules()}, **value.state_dict()}
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    assert not isinstance(value, SplitTensor)
    return value.detach().clone() if isinstance(value, Tensor) else value


def kept(strategy: str | None, ranks: int, path: str) -> Any:
    module = Keeps()
    saves = LambdaCallback(on_train_epoch_end=lambda trainer, _: trainer.save_checkpoint(path))
    fit_module(module, strategy, ranks, CASE, callbacks=[saves])
    return _plain([module.kept, torch.load(path, weights_only=False)["kept"]])


@pytest.mark.parametrize("strategy", ["tensor_split", "hybrid"])
def test_what_hooks_keep_is_whole_in_checkpoints_and_after_the_fit(
    strategy: str, world2: World, tmp_path: Path
) -> None:
    """The first checkpoint ended the job after 60 s; copies raised a TypeError; after the fit averages were lost."""
    expected = kept(None, 1, str(tmp_path / "one.ckpt"))
    for found in world2.run(kept, strategy, 2, str(tmp_path / "two.ckpt")):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
