"""What hooks make of split weights is saved, copied and used as on one device, during a fit and after it."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_multigpu.engine.tensor_split.parts import SplitTensor
from tests.strategies.tasks import Case, Classifier, fit_module
from tests.world import World

CASE = Case(max_epochs=2, num_samples=16)


class Keeps(Classifier):
    """Copies its layers, averages and writes them, in hooks that all ranks run."""

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
