"""Losses that couple the samples of a batch are refused before they train other gradients than one device's.

Cut into micro-batches, or dealt out to ranks, such a batch loses the couplings between its parts. Their losses
may agree all the same: to the last bit of float32, at the initial weights, in evaluation mode, or in the first epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_multigpu import PipelineStrategy, RingDDPStrategy
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.strategies.steps.share_proof import ShareProof
from tests.strategies.tasks import Case, dataset, make_strategy, make_trainer, train_loader
from tests.world import World

WIDTH, CLASSES = 6, 3
REFUSED = "training_step couples the samples of a batch: the gradients of .* samples do not add up"


class Mixtral(L.LightningModule):
    """Hugging Face computes the router's balancing loss in float32, within the tolerance of losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = MixtralForCausalLM(
            MixtralConfig(
                hidden_size=8,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                num_local_experts=4,
                vocab_size=24,
                max_position_embeddings=8,
                output_router_logits=True,
                experts_implementation="eager",
                bos_token_id=0,
                eos_token_id=1,
            )
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = (batch[0].abs() * 100).long() % 24
        return self.model(tokens, labels=tokens).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Task(L.LightningModule):
    """Layers, and a loss that a test replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.steps = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ZeroGate(Task):
    """Four experts, of which one has all samples until the gate, which starts at zero, has been trained."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        nn.init.zeros_(self.gate.weight)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.layers(x)
        shares = self.gate(x).softmax(-1)
        used = nn.functional.one_hot(shares.argmax(-1), 4).to(shares.dtype).mean(0)
        return nn.functional.cross_entropy(logits, y) + 0.1 * 4 * (used * shares.mean(0)).sum()


class MixedUp(Task):
    """Mixes samples, with numbers of NumPy as the original code of mixup does, in training alone."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.training:
            return super().loss(x, y)
        share, order = np.random.beta(1.0, 1.0), torch.randperm(len(x))
        logits = self.layers(share * x + (1 - share) * x[order])
        return sum(
            part * nn.functional.cross_entropy(logits, target) for part, target in ((share, y), (1 - share, y[order]))
        )  # type: ignore[return-value]


class Later(Task):
    """Another term joins within the first epoch, where nothing but the new term has the steps proved again."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.layers(x)
        loss = nn.functional.cross_entropy(logits, y)
        return loss if self.global_step < 3 else loss + 0.1 * logits.var(0).sum()


class FadesIn(Task):
    """A term whose weight is 0 in the first epoch: no operation is new when it counts."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.layers(x)
        return nn.functional.cross_entropy(logits, y) + 0.1 * self.current_epoch * logits.var(0).sum()


class Contrastive(Task):
    """Agrees within half precision's tolerance of losses, which is wide, and not in its gradients."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.layers(x)
        return 100 + nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))


class Noisy(Task):
    """Draws its own noise for each sample, in evaluation too, and has a layer that drops."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.RNN(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.drop(x.unsqueeze(1))[0].squeeze(1)
        return super().loss(x + 0.1 * torch.randn_like(x), y)


class Normal(Task):
    """Spectral norm goes on from the vector of the last forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = spectral_norm(self.layers[2])


class Built(Task):
    def __init__(self) -> None:
        super().__init__()
        del self.layers

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))


DATA = Case(max_epochs=2, num_samples=40, trainer={"use_distributed_sampler": False})


def train(module: Callable[[], Any], options: dict[str, Any], trainer_options: dict[str, Any]) -> int:
    """The number of steps, which a message about a refused one has, too."""
    ranks = trainer_options.get("devices", 2)
    trainer = make_trainer(DATA, PipelineStrategy(**{"num_micro_batches": 2, **options}), ranks, **trainer_options)
    try:
        trainer.fit(module(), train_loader(DATA, 1))
    except (ValueError, PipelineError) as error:
        raise type(error)(f"{error} | after {trainer.global_step} steps") from error
    return trainer.global_step


@pytest.mark.parametrize(
    ("module", "options", "trainer_options", "steps"),
    [
        (Mixtral, {}, {}, 0),
        (Mixtral, {"num_micro_batches": 3}, {"precision": "32-true"}, 0),
        (ZeroGate, {"schedule": "zero_bubble"}, {"accumulate_grad_batches": 2}, 0),
        (MixedUp, {}, {}, 0),
        (Later, {"schedule": "interleaved"}, {}, 3),
        (FadesIn, {}, {}, 5),
        (Contrastive, {}, {"precision": "bf16-mixed"}, 0),
    ],
    ids=["router", "float32", "gate-of-zeros", "mixup", "later", "fades-in", "half-precision"],
)
def test_couplings_that_the_loss_hides_are_refused(
    module: Any, options: dict[str, Any], trainer_options: dict[str, Any], steps: int, world2: World
) -> None:
    words = (
        REFUSED if module not in (Later, FadesIn) else "the loss of a batch is .* as a whole, and .* in 2 micro-batches"
    )
    kind: type[Exception] = ValueError
    if module is Mixtral:  # the last stage does not have what routers of other stages have computed
        kind, words = PipelineError, "in a dry run of the first step those of .*gate.weight"
    world2.run_raising(kind, rf"{words}.* \| after {steps} steps", train, module, options, trainer_options)


def test_one_of_two_pipelines_is_enough_to_refuse(world4: World) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        world4.run(train, ZeroGate, {"data_parallel_size": 2}, {"devices": 4})


LINES = ("Whether the losses", "Whether the gradients", "The module keeps values", "is not proved")


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (MixedUp, {"verify_steps": 0}, None),
        (MixedUp, {"num_micro_batches": 1}, None),
        (Noisy, {}, "Whether the losses"),
        (Normal, {"num_micro_batches": 3}, "The module keeps values"),
        (Built, {}, None),
    ],
    ids=["accepted", "whole", "noise", "spectral-norm", "batch-norm"],
)
def test_other_losses_train(module: Any, options: dict[str, Any], words: str | None, world2: World) -> None:
    assert world2.run(train, module, options, {}) == [10, 10]
    said = [line for line in LINES for _ in range(world2.output(0).count(line))]
    assert said == ([] if words is None else [words])


class Quiet(Task):
    """Logs, counts its batches, and has layers that work in one way in training and in another in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.BatchNorm1d(CLASSES))
        self.layers.append(nn.Dropout(0.5))
        self.calls = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        x.mul_(0.5)
        loss = super().loss(x, y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class ByHand(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(self.loss(*batch))
        optimizer.step()  # type: ignore[union-attr]


def train_shares(module: Callable[[], Any], strategy: str = "ring_ddp", **options: Any) -> dict[str, Any]:
    """On two ranks, each with its share of a batch."""
    task = module()
    torch.manual_seed(4)
    trainer = make_trainer(Case(max_epochs=1), make_strategy(strategy, **options), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(task, DataLoader(dataset(40), batch_size=8))
    trainer.strategy.meter.flush()
    return {
        "state": {name: value.tolist() for name, value in task.state_dict().items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "calls": getattr(task, "calls", 0),
        "sent": [(t.operation, t.size_bytes) for step in trainer.strategy.meter.steps for t in step.operations],
        "warned": [str(each.message) for each in caught if "verify_steps" in str(each.message)],
    }


SHARING = ["ring_ddp", "ddp_sharded", "cpu_ps", "sync_ps"]
"""Names of strategies whose ranks share each batch, one for each way of gradients."""


@pytest.mark.parametrize(
    ("module", "strategy"),
    [(MixedUp, "ring_ddp"), *((ZeroGate, name) for name in SHARING)],
    ids=["mixup-ring_ddp", *(f"gate-of-zeros-{name}" for name in SHARING)],
)
def test_ranks_that_share_a_coupled_batch_are_refused_if_that_is_asked_for(
    module: Any, strategy: str, world2: World
) -> None:
    world2.run_raising(ValueError, f"{REFUSED}.*all_gather", train_shares, module, strategy, verify_steps=1)


@pytest.mark.parametrize("strategy", SHARING)
def test_the_check_of_shares_leaves_no_trace(strategy: str, world2: World) -> None:
    expected = world2.run(train_shares, Quiet, strategy)
    options = {"find_unused_parameters": True} if strategy == "ring_ddp" else {}
    assert world2.run(train_shares, Quiet, strategy, verify_steps=2, **options) == expected
    assert expected[0]["calls"] == 3


def test_so_many_batches_of_each_fit_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(ShareProof, "_find", lambda self, batch: compared.append(batch))
    proof = ShareProof(SimpleNamespace(_module=SimpleNamespace(automatic_optimization=True)), 2)  # type: ignore[arg-type]
    for batches in ("abc", "de"):
        proof.begin_fit()
        for batch in batches:
            proof.begin_step(batch)
    assert "".join(compared) == "abde"


def test_where_shares_cannot_be_checked_a_warning_says_so(world2: World) -> None:
    warned, _ = world2.run(train_shares, ByHand, verify_steps=1)
    assert warned["warned"] == [
        "verify_steps=1 has no effect in manual optimization, where only the step knows its losses"
    ]


def test_a_graph_that_is_counted_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match=r"verify_steps=1 and static_graph=True: .* leave one of the two out"):
        RingDDPStrategy(verify_steps=1, static_graph=True)
