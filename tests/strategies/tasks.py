"""What the contract tests train: small, exact, and sensitive to every mistake in the reduction of gradients."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_multigpu.registry import STRATEGIES, StrategyRow
from lightning_multigpu.strategies.base import MultiGPUStrategy
from tests.world import World

NUM_FEATURES, NUM_CLASSES = 6, 3

# It does not share SIGTERM among ranks, and its Trainer takes no weights_only and no time as val_check_interval.
IS_LIGHTNING_2_5 = L.__version__.startswith("2.5.")


def distinct_rows() -> list[StrategyRow]:
    """The registered strategies, without those that differ from an earlier one only in how processes are started."""
    seen: set[tuple[Any, ...]] = set()
    rows = []
    for row in STRATEGIES:
        kind = (row.strategy, *sorted((k, str(v)) for k, v in row.options.items() if k != "start_method"))
        if kind not in seen:
            seen.add(kind)
            rows.append(row)
    return rows


def synchronous_rows() -> list[StrategyRow]:
    return [row for row in distinct_rows() if row.synchronous]


def rows_of_each_class() -> list[StrategyRow]:
    """The first row of each class: for what does not depend on the options that a name fixes."""
    found: dict[Any, StrategyRow] = {}
    for row in distinct_rows():
        found.setdefault(row.strategy, row)
    return list(found.values())


def rows_with_a_whole_model() -> list[StrategyRow]:
    """A synchronous row of each class whose ranks hold all layers, and batches of their own.

    That of FairScale is the first: a default value in FairScale keeps the world that is there at its import.
    """
    rows = [
        row
        for row in rows_of_each_class()
        if row.synchronous
        and row.strategy.starts_ranks
        and (row.strategy.pipeline_parallel_size, row.strategy.tensor_parallel_size) == (1, 1)
    ]
    return sorted(rows, key=lambda row: row.name != "ddp_sharded")


def make_strategy(name: str, **options: Any) -> Any:
    """The strategy of a registered name for ranks that already run."""
    row = next(row for row in STRATEGIES if row.name == name)
    ranks = {"start_method": "popen"} if issubclass(row.strategy, MultiGPUStrategy) else {}
    return row.strategy(**{**row.options, **ranks, **options})


def moving_average(decay: float = 0.9) -> L.Callback:
    """A moving average of weights; Lightning 2.5 has none, but an average at the end of training."""
    if hasattr(callbacks, "EMAWeightAveraging"):
        return callbacks.EMAWeightAveraging(decay=decay)
    return callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)


@dataclass(frozen=True)
class Case:
    """One way to train; everything but the strategy is the same on one device."""

    optimizer: str = "sgd"
    precision: str = "64-true"
    max_epochs: int = 3
    num_samples: int = 56
    global_batch_size: int = 8
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    validate: bool = False
    rtol: float = 1e-9


class Classifier(L.LightningModule):
    """An ordinary module. It keeps what it saw: the loss and the number of samples of each training batch.

    A batch that comes in micro-batches is one batch; a rank that computes no loss has seen none. Where one process
    drives several devices, a batch is seen when its step has ended: devices see parts of it at the same time.
    """

    def __init__(self, optimizer: str = "sgd", *, unused: bool = False, sparse: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        # Eight layers, so that they can be split into as many stages; most of those then have no parameters.
        self.layers = nn.Sequential(
            nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES), *(nn.Identity() for _ in range(5))
        )
        self.unused = nn.Linear(4, 4) if unused else None
        self.table = nn.Embedding(7, NUM_FEATURES, sparse=True) if sparse else None
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        self.optimizer_name = optimizer
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.seen: list[tuple[float, int]] = []
        self._last_batch: tuple[int, int] | None = None
        self.seen_targets: list[list[int]] = []
        self.learning_rates: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.table is not None:
            x = x + self.table((x[:, 0].abs() * 3).long() % 7).to(x.dtype)
        return self.layers(x)  # type: ignore[no-any-return]

    @property
    def first(self) -> nn.Linear:
        return self.layers[0]  # type: ignore[return-value]

    @property
    def second(self) -> nn.Linear:
        return self.layers[2]  # type: ignore[return-value]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        if not self._has_replicas:
            self._see((self.current_epoch, batch_idx), float(loss.detach()), len(y))
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    @property
    def _has_replicas(self) -> bool:
        return getattr(self.trainer.strategy, "devices_per_rank", 1) > 1

    def _see(self, batch: tuple[int, int], loss: float, size: int) -> None:
        if batch == self._last_batch:
            before, seen = self.seen.pop()
            loss, size = (before * seen + loss * size) / (seen + size), seen + size
        self._last_batch = batch
        self.seen.append((loss, size))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._has_replicas:
            loss = float(outputs["loss"]) * self.trainer.accumulate_grad_batches  # which Lightning has divided by
            self._see((self.current_epoch, batch_idx), loss, len(batch[1]))
        self.learning_rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("val_accuracy", self.accuracy, on_epoch=True)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("val_samples", float(len(y)), reduce_fx="sum", sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.seen_targets.append(batch[0][:, 0].tolist())
        self.accuracy(logits, y)
        self.log("test_accuracy", self.accuracy, on_epoch=True)
        self.log("test_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0][:, 0]

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        if self.optimizer_name == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.02)
        assert self.optimizer_name == "groups"
        optimizer = torch.optim.SGD(
            [
                {"params": self.first.parameters(), "lr": 0.05},
                {"params": self.second.parameters(), "lr": 0.3, "weight_decay": 0.01},
            ],
            lr=0.1,
            momentum=0.5,
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def dataset(num_samples: int, *, seed: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, NUM_FEATURES, generator=generator)
    x[:, 0] += torch.arange(num_samples) / num_samples  # a sample can be told by its first feature
    y = (x @ torch.randn(NUM_FEATURES, NUM_CLASSES, generator=generator)).argmax(dim=1)
    return TensorDataset(x, y)


def data_ranks(trainer: L.Trainer) -> int:
    """How many ranks the trainer deals a global batch out to."""
    return int(getattr(trainer.strategy, "data_parallel_size", trainer.world_size))


def train_loader(case: Case, ranks: int | L.Trainer, **options: Any) -> DataLoader[Any]:
    """What a user writes. One device gets the order that Lightning's injected sampler has on several."""
    ranks = ranks if isinstance(ranks, int) else data_ranks(ranks)
    data = dataset(case.num_samples)
    if ranks == 1:
        order = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=0)
        return DataLoader(data, batch_size=case.global_batch_size, sampler=order, **options)
    return DataLoader(data, batch_size=case.global_batch_size // ranks, shuffle=True, **options)


def eval_loader(num_samples: int = 21, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(dataset(num_samples, seed=6), batch_size=batch_size)


def make_trainer(case: Case, strategy: Any, ranks: int, **overrides: Any) -> L.Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": ranks,
        "strategy": strategy,
        "precision": case.precision,
        "max_epochs": case.max_epochs,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        **case.trainer,
        **overrides,
    }
    return L.Trainer(**options)


def fit_module(
    module: L.LightningModule,
    strategy: Any,
    ranks: int,
    case: Case = Case(),
    data: Any = None,
    validation: Any = None,
    **overrides: Any,
) -> L.Trainer:
    """Trains a module in this process, as one rank of ``ranks``; on one device without a strategy.

    A registered name gets the options of the case. The data may be a function that makes it on the rank, and is the
    training loader of the case by default. ``overrides`` are arguments of the Trainer, and ``ckpt_path``.
    """
    path = overrides.pop("ckpt_path", None)
    if not isinstance(strategy, Strategy):
        strategy = "auto" if strategy is None else make_strategy(strategy, **case.strategy)
    trainer = make_trainer(case, strategy, ranks, **overrides)
    if data is None:
        data = train_loader(case, trainer)
    trainer.fit(module, data() if callable(data) else data, validation, ckpt_path=path)
    return trainer


def state(module: L.LightningModule) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items() if "accuracy" not in name}


def fit(case: Case, strategy_name: str | None, ranks: int) -> dict[str, Any]:
    """Trains in this process, as one rank of ``ranks`` or as the one device, and returns what can be compared."""
    strategy = "auto" if strategy_name is None else make_strategy(strategy_name, **case.strategy)
    module = Classifier(case.optimizer, **case.module)
    trainer = make_trainer(case, strategy, ranks)
    # One device gets the whole global evaluation batch too; the values must not depend on that.
    validation = eval_loader(batch_size=8 // data_ranks(trainer)) if case.validate else None
    trainer.fit(module, train_loader(case, trainer), validation)
    return {
        "weights": state(module),
        "seen": module.seen,
        "learning_rates": module.learning_rates,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "global_step": trainer.global_step,
    }


def global_losses(per_rank: list[dict[str, Any]]) -> list[float]:
    """The loss over each global batch, from what each rank that computes losses saw of it."""
    steps: list[Any] = list(zip(*(result["seen"] for result in per_rank if result["seen"]), strict=True))
    return [sum(loss * n for loss, n in step) / sum(n for _, n in step) for step in steps]


def assert_same_weights(
    result: dict[str, Any], reference: dict[str, Any], *, rtol: float = 1e-9, atol: float | None = None
) -> None:
    """Those of one device, under the same names in the same order; by default after steps in float64."""
    assert list(result["weights"]) == list(reference["weights"])
    atol = rtol / 100 if atol is None else atol
    torch.testing.assert_close(result["weights"], reference["weights"], rtol=rtol, atol=atol)


def trained_weights(
    make_module: Callable[[], L.LightningModule], strategy: Any, ranks: int, case: Case = Case(), **options: Any
) -> dict[str, Any]:
    """What a new module has after :func:`fit_module`, whose options stay as they were, callbacks too."""
    module = make_module()
    fit_module(module, strategy, ranks, case, **copy.deepcopy(options))
    return {"weights": state(module), "noted": getattr(module, "noted", None)}


def trained_in_turns(names: Sequence[str], make_module: Any, *args: Any, **options: Any) -> list[dict[str, Any]]:
    """What :func:`trained_weights` returns for each strategy; the ranks join once for all of them."""
    return [trained_weights(make_module, name, *args, **options) for name in names]


def assert_trains_alike(
    world: World,
    make_module: Callable[[], L.LightningModule],
    names: str | Sequence[str],
    case: Case = Case(),
    *,
    rtol: float = 1e-9,
    atol: float | None = None,
    **options: Any,
) -> None:
    """Under each of the strategies all ranks of the world train the module to the weights of one device."""
    expected = trained_weights(make_module, None, 1, case, **options)
    names = [names] if isinstance(names, str) else names
    for of_rank in world.run(trained_in_turns, names, make_module, world.num_ranks, case, **options):
        for found in of_rank:
            assert_same_weights(found, expected, rtol=rtol, atol=atol)
