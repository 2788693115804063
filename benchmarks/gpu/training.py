"""Checks of numbers: strategies train on a card as one process does there, and as they do on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from benchmarks.gpu.card import Card
from benchmarks.gpu.table import Check, NotPossibleError, Place
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.registry import StrategyRow
from tests.strategies.tasks import (
    NUM_CLASSES,
    Case,
    Classifier,
    dataset,
    distinct_rows,
    make_strategy,
    make_trainer,
    state,
    train_loader,
)
from tests.strategies.test_checkpoints import STEPS_AN_EPOCH, saver

GROUPS = Case(optimizer="groups", max_epochs=2, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.3})
PLAIN = Case(max_epochs=2)
ONE_EPOCH = Case(max_epochs=1)
_LARGE_BATCHES = Case(max_epochs=2, num_samples=128, global_batch_size=32)  # also in micro-batches
_SCALE = 2.0**10  # gradients of the task do not overflow at this scale
_MARKED = 17  # the sample whose loss overflows
_SLEEP_CYCLES = 2_000_000  # about a millisecond
_COMPILED, _COMPILES_S = "compiled layers", 120.0


@dataclass(frozen=True)
class Trained:
    """What a rank has at the end of a fit, in host memory."""

    weights: dict[str, Tensor]
    losses: list[float]
    scale: float | None
    transfers: dict[tuple[str, str], list[tuple[float, float]]]


def ranks_of(name: str) -> int:
    """The number of ranks that a strategy is checked on: four where two cannot show all of its axes."""
    return 4 if name == "hybrid" else 2


def train(
    card: Card,
    name: str | None,
    case: Case,
    *,
    make: Callable[..., Classifier] = Classifier,
    half: str | None = None,
    ckpt_path: str | None = None,
    **trainer_options: Any,
) -> Trained:
    """Trains on the card, as one rank of the strategy, or as the one process if ``name`` is None.

    Args:
        card: the devices.
        name: the registered name.
        case: what is trained.
        make: the class of the module.
        half: "16-mixed" or "bf16-mixed", in place of the precision of the case.
        ckpt_path: the checkpoint to resume from.
        trainer_options: arguments of the ``Trainer``.
    """
    ranks = 1 if name is None else ranks_of(name)
    strategy = "auto" if name is None else make_strategy(name, **case.strategy)
    options = card.place(strategy, ranks)
    plugin = None
    if half == "16-mixed":
        plugin = MixedPrecision("16-mixed", card.kind, torch.amp.GradScaler(card.kind, init_scale=_SCALE))
        options |= {"precision": None, "plugins": [plugin]}
    elif half is not None:
        options["precision"] = half
    module = make(case.optimizer)
    trainer = make_trainer(case, options.pop("strategy"), ranks, **options, **trainer_options)
    trainer.fit(module, train_loader(case, trainer), ckpt_path=ckpt_path)
    meter = getattr(trainer.strategy, "meter", None)
    scaler = None if plugin is None else plugin.scaler
    return Trained(
        weights={key: value.cpu() for key, value in state(module).items()},
        losses=[loss for loss, _ in module.seen],
        scale=None if scaler is None else scaler.get_scale(),
        transfers=_transfers(meter) if isinstance(meter, Meter) else {},
    )


def _transfers(meter: Meter) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Seconds in all and exposed seconds of each step, by operation and group."""
    meter.flush()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for step in meter.steps:
        for totals in step.operations:
            found.setdefault((totals.operation, totals.group), []).append((totals.total_s, totals.exposed_s))
    return found


def assert_equal(trained: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, rtol: float = 1e-9) -> None:
    assert list(trained) == list(expected), f"other names: {list(trained)} and {list(expected)}"
    for name, value in expected.items():
        torch.testing.assert_close(
            trained[name], value, rtol=rtol, atol=rtol * 1e-2, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_near(trained: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, rtol: float) -> None:
    for name, value in expected.items():
        distance = float(torch.linalg.vector_norm(trained[name].double() - value.double()))
        size = float(torch.linalg.vector_norm(value.double()))
        assert distance <= rtol * size, f"{name}: {distance / size:.1e} of its norm away, {rtol:g} allowed"


def _assert_alike(ranks: list[Trained]) -> None:
    for rank, trained in enumerate(ranks):
        for name, value in trained.weights.items():
            assert torch.equal(value, ranks[0].weights[name]), f"{name} differs between ranks 0 and {rank}"


def equal(place: Place, *, name: str, case: Case, check_times: bool = False) -> str:
    """Weights of one process on the same card, and times that are times."""
    expected = place.reference(train, place.card, None, replace(case, strategy={}))
    ranks = place.run(world_of(name), train, place.card, name, case)
    for trained in ranks:
        assert_equal(trained.weights, expected.weights)
    steps = [each for trained in ranks for each in trained.transfers.values()]
    assert all(0 <= exposed <= total for times in steps for total, exposed in times), "exposed time above the total"
    if check_times:
        assert any(total > 0 for times in steps for total, _ in times), "no transfer has a time"
    return ""


def _refused(word: str, place: Place, name: str, case: Case, **options: Any) -> str:
    """Checks that the strategy refuses what its page says that it refuses."""
    try:
        place.run(world_of(name), train, place.card, name, case, **options)
    except ValueError as error:
        if word in str(error):
            return "refused, as documented"
        raise
    raise AssertionError(f"{name} was to refuse this, with {word!r} in its error")


def recomputed(place: Place, *, name: str) -> str:
    """Layers that backward computes again."""
    case = replace(PLAIN, strategy={"activation_checkpointing": True})
    if name == "pipeline_zero_bubble":
        return _refused("activation_checkpointing", place, name, case)
    return equal(place, name=name, case=case)


def world_of(name: str) -> int:
    """The ranks of the world that the check runs in: ``dp`` is one process."""
    return 1 if name == "dp" else ranks_of(name)


def converges(place: Place, *, name: str) -> str:
    """What an asynchronous strategy promises: the loss falls."""
    # Stale gradients and SGD's momentum of 0.9 at this rate may diverge; AdamW does not.
    ranks = place.run(world_of(name), train, place.card, name, Case(optimizer="adamw", max_epochs=12))
    losses = ranks[0].losses
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < 0.8 * first, f"the loss went from {first:.3f} to {last:.3f}"
    return f"loss {first:.2f} to {last:.2f}"


class Guard(nn.Identity):
    """Stops gradients that are not finite: they stay in the layers behind it, and with the rank that has those."""

    def forward(self, x: Tensor) -> Tensor:
        out = x * 1.0
        if out.requires_grad:
            out.register_hook(lambda gradient: torch.nan_to_num(gradient, 0.0, 0.0, 0.0))
        return out


class Overflows(Classifier):
    """One sample's gradients overflow in float16, in the last layer alone: on one rank, whatever ranks share."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.layers[4] = Guard()
        self.layers[5] = nn.Linear(NUM_CLASSES, NUM_CLASSES)
        nn.init.eye_(self.layers[5].weight)
        nn.init.zeros_(self.layers[5].bias)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        marked = dataset(ONE_EPOCH.num_samples)[_MARKED][0][0].to(batch[0])
        return super().training_step(batch, batch_idx) * (1.0 + 1e30 * (batch[0][:, 0] == marked).any())


def overflow(place: Place, *, name: str) -> str:
    """A step that overflows on one rank is skipped by all, and the scale falls once."""
    options = {"make": Overflows, "half": "16-mixed"}
    expected = place.reference(train, place.card, None, ONE_EPOCH, **options)
    ranks = place.run(world_of(name), train, place.card, name, ONE_EPOCH, **options)
    _assert_alike(ranks)
    for rank, trained in enumerate(ranks):
        assert expected.scale == trained.scale == _SCALE / 2, (
            f"scale {trained.scale} on rank {rank}, {expected.scale} on one device, {_SCALE / 2} expected"
        )
        assert_near(trained.weights, expected.weights, rtol=1e-2)  # float16 has 11 bits, and sums in parts
    return ""


def bfloat16(place: Place, *, name: str) -> str:
    expected = place.reference(train, place.card, None, ONE_EPOCH, half="bf16-mixed")
    ranks = place.run(world_of(name), train, place.card, name, ONE_EPOCH, half="bf16-mixed")
    _assert_alike(ranks)
    for trained in ranks:
        assert_near(trained.weights, expected.weights, rtol=3e-2)  # 8 bits, and sums in parts
    return ""


class Compiled(Classifier):
    """Its layers with parameters are compiled one by one."""

    backend = "inductor"

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        torch.compiler.reset()  # after a few modules of a kind torch would compile no more, and say so in a warning
        if self.backend == "inductor":
            _compile_in_this_process()
        for layer in self.layers:
            if not isinstance(layer, nn.Identity):
                layer.compile(backend=self.backend)


def _compile_in_this_process() -> None:
    """Has inductor start no pool of processes beside each rank."""
    from torch._inductor import config  # its import takes seconds

    config.compile_threads = 1


class CompiledOnCPU(Compiled):
    backend = "aot_eager"  # inductor needs a C++ compiler there


def _obstacle_to_compiling(card: Card) -> str:
    """What torch says that keeps inductor from compiling for this card: Triton needs a C compiler and Python's headers.

    Whatever this package does is no part of it.
    """
    _compile_in_this_process()
    try:
        torch.compile(lambda x: torch.tanh(x) * 2)(torch.ones(8, device=card.device(), dtype=torch.float64))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"inductor compiles nothing here: {type(error).__name__}: {' '.join(lines[:3])[:300]}"
    return ""


def compiled(place: Place, *, name: str) -> str:
    make = Compiled if place.card.is_gpu else CompiledOnCPU
    if place.card.is_gpu and (obstacle := place.reference(_obstacle_to_compiling, place.card)):
        raise NotPossibleError(obstacle)
    expected = place.reference(train, place.card, None, PLAIN)
    if name in ("dp", "tensor_split", "hybrid"):
        return _refused("compile", place, name, PLAIN, make=make)
    for trained in place.run(world_of(name), train, place.card, name, PLAIN, make=make):
        assert_equal(trained.weights, expected.weights)
    return ""


class Normed(Classifier):
    """With a BatchNorm, whose statistics are those of each rank's samples."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.layers[3] = nn.BatchNorm1d(3)


def batch_norm(place: Place, *, name: str) -> str:
    """Weights and buffers of the same strategy on CPUs: on several ranks they are not those of one device."""
    on_cpus = place.run(world_of(name), train, Card("cpu", 1, "gloo"), name, _LARGE_BATCHES, make=Normed)
    on_card = place.run(world_of(name), train, place.card, name, _LARGE_BATCHES, make=Normed)
    for trained, expected in zip(on_card, on_cpus, strict=True):
        assert_equal(trained.weights, expected.weights, rtol=1e-8)
    return ""


def checkpoint(place: Place, *, name: str) -> str:
    """Saved on the card, resumed on a CPU; and saved on a CPU, resumed on the card."""
    case, step = Case(optimizer="groups", max_epochs=2, num_samples=29), STEPS_AN_EPOCH
    expected = place.reference(train, place.card, None, case)
    cpus, directory = Card("cpu", 1, "gloo"), place.directory
    save = partial(place.run, world_of(name), train)
    for source, target in ((place.card, cpus), (cpus, place.card)):
        folder = directory / source.kind / target.kind
        save(source, name, case, callbacks=[saver(folder, step, True)], enable_checkpointing=True)
        path = str(folder / f"step={step}.ckpt")
        for trained in place.run(world_of(name), train, target, name, case, ckpt_path=path):
            assert_equal(trained.weights, expected.weights)
        (alone,) = place.run(1, train, target, None, case, ckpt_path=path)
        assert_equal(alone.weights, expected.weights, rtol=1e-5)  # stock strategies read it into float32
    return ""


class Busy(Classifier):
    """Its device is late: kernels that wait stand before each result that something else reads.

    A copy or a collective that does not wait for the kernel before it reads the values of the step before.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _sleep(self.device)
        return super().training_step(batch, batch_idx)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        if out.requires_grad:
            out.register_hook(_late)
        return out

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        _sleep(self.device)  # behind the update of the step before


class BusyLayer(nn.Identity):
    """A layer whose output and gradient are late; a pipeline can cut before and after it."""

    def forward(self, x: Tensor) -> Tensor:
        _sleep(x.device)
        out = x * 1.0
        if out.requires_grad:
            out.register_hook(_late)
        return out


class BusyLayers(Classifier):
    """As :class:`Busy`, for strategies that run the layers one by one."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.layers[3] = BusyLayer()
        self.layers[5] = BusyLayer()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _sleep(self.device)
        return super().training_step(batch, batch_idx)


def _sleep(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(_SLEEP_CYCLES)


def _late(gradient: Tensor) -> Tensor:
    _sleep(gradient.device)
    return gradient * 1.0  # made behind the kernel that waits


def busy_streams(place: Place, *, name: str, case: Case) -> str:
    """50 steps on a device that is always behind its host."""
    make = BusyLayers if name in _LAYER_BY_LAYER else Busy
    expected = place.reference(train, place.card, None, replace(case, strategy={}))
    for trained in place.run(world_of(name), train, place.card, name, case, make=make):
        assert_equal(trained.weights, expected.weights)
    return ""


_LAYER_BY_LAYER = (
    "model_parallel", "gpipe", "pipeline_1f1b", "pipeline_interleaved", "pipeline_zero_bubble", "hybrid",
)  # fmt: skip
_FIFTY_STEPS = Case(num_samples=56, max_epochs=7, global_batch_size=8)  # 7 steps an epoch

_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "ring_ddp": {
        "a hook of torch": {"ddp_comm_hook": allreduce_hook},
        "compression int8": {"compression": "int8", "shared_memory": False},
        "no shared memory": {"shared_memory": False},
    },
    "ddp_sharded": {"each gradient alone": {"bucket_cap_mb": 0.0}},
}
_INEXACT = ("compression int8",)


def options_of(place: Place, *, name: str, options: dict[str, Any], exact: bool) -> str:
    """An option that has code of its own for GPUs."""
    case = replace(PLAIN, strategy=options)
    expected = place.reference(train, place.card, None, PLAIN)
    ranks = place.run(world_of(name), train, place.card, name, case)
    _assert_alike(ranks)
    for trained in ranks:
        if exact:
            assert_equal(trained.weights, expected.weights)
        else:
            assert_near(trained.weights, expected.weights, rtol=0.1)
    return ""


def local_steps(place: Place) -> str:
    """Averages of weights and of optimizer states, which differ from one device's, are those on CPUs."""
    for options in ({}, {"outer_optimizer": "nesterov"}):
        case = replace(PLAIN, strategy={"average_every": 3, **options})
        on_cpus = place.run(2, train, Card("cpu", 1, "gloo"), "ring_ddp", case)
        for trained, expected in zip(place.run(2, train, place.card, "ring_ddp", case), on_cpus, strict=True):
            assert_equal(trained.weights, expected.weights, rtol=1e-8)
    return ""


def checks() -> list[Check]:
    """Those of every registered name, and those of the options with code for GPUs."""
    found: list[Check] = []
    for row in distinct_rows():
        found += _checks_of(row)
    for name, options in _OPTIONS.items():
        for column, chosen in options.items():
            function = partial(options_of, name=name, options=chosen, exact=column not in _INEXACT)
            found.append(Check(row=name, column=column, function=function, ranks=2))
    found.append(Check(row="ring_ddp", column="local steps as on CPUs", function=local_steps, ranks=2))
    return found


def _checks_of(row: StrategyRow) -> list[Check]:
    name, ranks = row.name, world_of(row.name)
    if not row.synchronous:
        return [Check(row=name, column="trains", function=partial(converges, name=name), ranks=ranks)]
    columns: dict[str, Callable[[Place], str]] = {
        "as one process": partial(equal, name=name, case=PLAIN, check_times=True),
        "accumulation, clipping, groups": partial(equal, name=name, case=GROUPS),
        "16-mixed, overflow on one rank": partial(overflow, name=name),
        "bf16-mixed": partial(bfloat16, name=name),
        _COMPILED: partial(compiled, name=name),
        "BatchNorm buffers": partial(batch_norm, name=name),
        "checkpoint to a CPU and back": partial(checkpoint, name=name),
        "activation checkpointing": partial(recomputed, name=name),
        "50 steps on busy streams": partial(busy_streams, name=name, case=_FIFTY_STEPS),
    }
    found = [Check(row=name, column=column, function=function, ranks=ranks) for column, function in columns.items()]
    # Each rank imports inductor, and the first one of the machine compiles what Triton starts kernels with.
    return [replace(check, deadline_s=_COMPILES_S) if check.column == _COMPILED else check for check in found]
