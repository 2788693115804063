"""Steps that keep something for later steps train as on one device, or are refused: stages must not read old values."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_multigpu.engine.errors import PipelineError
from tests.strategies.pipeline.fitted import assert_fits_alike, fitted
from tests.strategies.tasks import Case, assert_same_weights
from tests.world import World


class Plain(L.LightningModule):
    """Keeps nothing; its subclasses keep something in one way each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
        self.n = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.layers(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)

    @property
    def noted(self) -> list[float]:
        return [float(self.n), vars(self).get("best", 0.0), *vars(self).get("seen", [])]


CASE = Case(max_epochs=1, num_samples=24)


class CountsBatches(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch[0] * (1 + 0.5 * self.n), batch[1])
        self.n += 1
        return loss


class AveragesInABuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch[0] * self.average, batch[1])
        self.average.mul_(0.5).add_(0.5 * loss.detach())  # type: ignore[operator]
        return loss


class KeepsHiddenStates(Plain):
    """Truncated backpropagation through time: hidden states of 20 cells, kept from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.RNNCell(6, 6) for _ in range(20))
        self.head = nn.Linear(6, 3)
        self.hidden = [torch.zeros(8, 6, dtype=torch.float64)] * 20

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for number, layer in enumerate(self.layers):
            x = layer(x, self.hidden[number])
            self.hidden[number] = x.detach()
        return cross_entropy(self.head(x), y)


class RecurrentLayer(nn.RNNCell):
    """Keeps its hidden state for itself."""

    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = super().forward(x, torch.zeros_like(x) if self.hidden is None else self.hidden)
        self.hidden = x.detach()
        return x


class Recurrent(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(RecurrentLayer(6, 6) for _ in range(4)), nn.Linear(6, 3))


class Expert(nn.Linear):
    own_loss: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.own_loss = y.square().mean()
        return y


class Experts(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Expert(6, 6) for _ in range(4)), nn.Linear(6, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        return loss + sum(layer.own_loss for layer in self.layers[:4])


class CountsFirst(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.n += 1
        return self.loss(batch[0] * (1 + 0.1 * self.n), batch[1])


class KeepsInHooks(Plain):
    """Does what the message says, and uses what was logged of the batch before."""

    average = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.n += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale = float(self.trainer.callback_metrics.get("loss", 1.0))
        loss = self.loss(batch[0] * (self.average + 0.5 * self.n + scale), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average = 0.5 * self.average + 0.5 * float(outputs["loss"])


class Collects(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.best = 10.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.seen.append(float(loss.detach()))
        self.best = min(self.best, self.seen[-1])
        self.n += 1
        return loss


class Averaging(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x + self.mean)


class AssignsBuffers(Plain):
    """A layer, the step and a hook give buffers new tensors, and a hook one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Averaging() for _ in range(4)), nn.Linear(6, 3))
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("losses", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.layers(batch[0])
        self.center = 0.9 * self.center + 0.1 * logits.detach().mean(0)
        return cross_entropy(logits - self.center, batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses = torch.cat([self.losses, outputs["loss"].detach()[None]])
        self.layers[0].mean = 0.5 * self.layers[0].mean
        assert "losses" in self.trainer.strategy.lightning_module_state_dict(), "what a checkpoint gathers"


class GrowsInALayer(AssignsBuffers):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.layers[0].mean = torch.zeros(4, 6)


def test_what_is_kept_once_a_batch_trains_as_on_one_device(world2: World) -> None:
    """As the messages advise: hooks run once a batch, and a layer alone reads what it keeps.

    With buffers that an assignment had replaced a checkpoint ended in a KeyError, and ranks kept their former values.
    """
    words = r"buffer layers.0.mean had the shape \(6,\) when the model was split, and has \(4, 6\) now"
    world2.run_raising(ValueError, words, fitted, GrowsInALayer, case=CASE, num_micro_batches=1)
    for kind, parts in (
        (KeepsInHooks, 4),
        (Collects, 1),
        (Collects, 4),
        (Recurrent, 1),
        (CountsFirst, 1),
        (AssignsBuffers, 1),
    ):
        reference = fitted(kind, 1, case=CASE)
        for result in world2.run(fitted, kind, case=CASE, num_micro_batches=parts):
            assert_same_weights(result, reference)
            if (kind, parts) != (Collects, 4):  # which collects four values a batch
                assert result["noted"] == pytest.approx(reference["noted"], rel=1e-9)


ONE, TWO = {"num_micro_batches": 1}, {"num_micro_batches": 2}


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (CountsBatches, ONE, "step 2 .* changes self.n, .*on_train_batch_end.outputs"),
        (AveragesInABuffer, ONE, "step 2 .* changes self.average, "),
        (KeepsHiddenStates, ONE, "step [12] .* changes self.hidden, "),
        (Recurrent, TWO, r"changes self.layers.0.hidden, .*num_micro_batches=2.*Pass num_micro_batches=1"),
        (Recurrent, {**ONE, "activation_checkpointing": True}, "leave them out of activation_checkpointing"),
        (CountsFirst, TWO, r"changes self.n by itself.*on_train_batch_start"),
        (CountsFirst, {**ONE, "schedule": "interleaved"}, "changes self.n, .*several stages .use schedule='1f1b'"),
        (Experts, ONE, r"changes self.layers.0.own_loss.* pass it on"),
    ],
)
def test_what_steps_keep_was_trained_on_in_silence(
    kind: type[Plain], options: dict[str, Any], words: str, world2: World
) -> None:
    """What the last stage keeps was old on the first one, which does not run the statements behind the layers.

    Hidden states went from one micro-batch to the next, and losses that layers keep stayed on their stages.
    """
    error = ValueError if options is TWO else PipelineError
    world2.run_raising(error, words, fitted, kind, case=CASE, **options)


class SetUp(nn.Module):
    """A layer that sets its shift up from its first batch, in one way each."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner = way, nn.Linear(6, 6)
        self.shift: Any = None
        if way == "buffer":
            del self.shift
            self.register_buffer("shift", torch.zeros(6), persistent=False)
        elif way != "attribute":
            self.shift = nn.Parameter(torch.zeros(6))
        self.register_buffer("done", torch.tensor(False), persistent=way != "buffer")

    def forward(self, x: Tensor) -> Tensor:
        is_first = not self.shift.any() if self.way == "value" else self.shift is None or not self.done
        with torch.no_grad():
            if is_first and self.way == "attribute":
                self.shift = -x.mean(0)
            elif is_first and self.way == "value":
                self.shift.data = -x.mean(0)
            elif is_first:
                self.shift.copy_(-x.mean(0))
            self.done.fill_(True)  # type: ignore[operator]
        return torch.tanh(self.inner(x + self.shift))


class SetsUp(Plain):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(SetUp(way) for _ in range(4)), nn.Linear(6, 3))


class Follows(Plain):
    """Keeps an average of a layer's weight, which begins as its equal, in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(self.layers[3].weight.detach().clone(), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.layers(batch[0])
        with torch.no_grad():
            self.mean.lerp_(self.layers[3].weight, 0.5)
        return cross_entropy(logits, batch[1]) + (logits @ self.mean).square().mean()


class Limited(nn.Linear):
    """Makes the same change again in every step, as ``max_norm`` does."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


class LayersWithLimits(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Limited(6, 6) for _ in range(4)), nn.Linear(6, 3))


class LimitsWeights(LayersWithLimits):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("way", ["parameter", "value", "buffer", "attribute"])
def test_layers_that_set_themselves_up_took_the_first_micro_batch(way: str, world2: World) -> None:
    """Trials left the values that they had set up, so that no check could see it, and parameters kept them."""
    make, words = (
        partial(SetsUp, way),
        "the step changes .*layers.0.shift.*num_micro_batches=2.*set the layer up before the fit",
    )
    world2.run_raising(ValueError, words, fitted, make, case=CASE, num_micro_batches=2)
    assert_fits_alike(world2, make, case=CASE, num_micro_batches=1, balance="time")


def test_what_steps_change_by_themselves_has_to_be_the_same_for_parts_of_a_batch(world2: World) -> None:
    """An average of weights moved once a micro-batch; a limit under ``no_grad`` ended with autograd's raw text."""
    words = "the step changes self.mean by itself.*on_train_batch_start"
    world2.run_raising(ValueError, words, fitted, Follows, case=CASE, num_micro_batches=2)
    words = "is changed in place by the step, as where it limits .*and 3 micro-batches .*num_micro_batches=1"
    world2.run_raising(PipelineError, words, fitted, LimitsWeights, case=CASE, num_micro_batches=4)
    for kind, parts in ((LayersWithLimits, 4), (LimitsWeights, 1)):
        assert_fits_alike(world2, kind, case=CASE, num_micro_batches=parts)
