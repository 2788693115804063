"""compression="auto": what is measured is what is chosen, by all ranks alike, and training is as with that choice.

Two hosts of two ranks are joined by a link on no clock: what is sent and coded takes as long as the test says.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.communication.compression import CompressedAllReduce, GradientPiece
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.ring import RingAllReduce
from lightning_multigpu.engine.data_parallel import compression_choice
from lightning_multigpu.engine.data_parallel.compression_choice import reducer_of_choice
from lightning_multigpu.engine.data_parallel.gradient_transport import pieces_of
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer
from lightning_multigpu.job.joining import table_of
from lightning_multigpu.strategies.averaged_gradients import CHECKPOINT_KEY
from tests.strategies.data_parallel.test_gradient_transport import TWO_HOSTS, as_hosts
from tests.strategies.tasks import Case, Classifier, make_strategy, make_trainer, state, train_loader
from tests.world import World, init_group

FAST, SLOW = 1e12, 1e5  # bytes/s
COSTS = {"bf16": 1e-9, "int8": 2e-9}  # of coding, s per byte
BF16_ONLY = {"bf16": 1e-9, "int8": 1e-3}
CHOICES: dict[str, dict[str, Any]] = {
    "none": {"bandwidth": FAST, "costs": COSTS},
    "bf16": {"bandwidth": SLOW, "costs": BF16_ONLY},
    "int8": {"bandwidth": SLOW, "costs": COSTS},
}


@contextmanager
def link(bandwidth: float, costs: Mapping[str, float]) -> Iterator[None]:
    """As far as this rank can tell, sending takes ``1 / bandwidth`` seconds a byte, and coding what it costs."""
    clock_s = 0.0
    ring, begin, timed = RingAllReduce.__call__, CompressedAllReduce.begin, compression_choice.timed

    def slow_ring(self: RingAllReduce, tensor: Tensor, **options: Any) -> Tensor:
        nonlocal clock_s
        clock_s += self.sent_bytes(tensor) / bandwidth
        return ring(self, tensor, **options)

    def slow_begin(self: CompressedAllReduce, tensor: Tensor, pieces: Sequence[GradientPiece], **options: Any) -> Any:
        nonlocal clock_s
        size_bytes = tensor.numel() * tensor.element_size()
        clock_s += self.sent_bytes(tensor, pieces) / bandwidth + size_bytes * costs[self.compressor.name]
        return begin(self, tensor, pieces, **options)

    def on_that_clock(work: Callable[[], object], device: torch.device) -> float:
        before_s = clock_s
        work()
        return clock_s - before_s + 1e-15

    RingAllReduce.__call__ = slow_ring  # type: ignore[method-assign]
    CompressedAllReduce.begin = slow_begin  # type: ignore[method-assign]
    compression_choice.timed = on_that_clock
    try:
        yield
    finally:
        RingAllReduce.__call__ = ring  # type: ignore[method-assign]
        CompressedAllReduce.begin = begin  # type: ignore[method-assign]
        compression_choice.timed = timed


class AtStart(Callback):
    """What training begins with: what was chosen, the random state, and what a checkpoint would hold."""

    def __init__(self) -> None:
        self.random: tuple[Any, ...] = ()
        self.state: dict[str, Any] = {}
        self.chosen = ""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.random = (torch.get_rng_state().tolist(), random.getstate())
        strategy: Any = trainer.strategy
        self.chosen = name_of(strategy)
        if strategy.averaging.compressed is not None:
            shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
            self.state = strategy.averaging.compressed.state_dict(shapes)


@as_hosts()
def train(
    bandwidth: float,
    costs: Mapping[str, float],
    *,
    slow_ranks: Sequence[int] = (),
    precision: Any = "32-true",
    directory: str | None = None,
    resume: str | None = None,
    max_steps: int = 10,
    **options: Any,
) -> dict[str, Any]:
    strategy = make_strategy("ring_ddp", **{"compression": "auto", **options})
    case = Case(precision=precision, num_samples=400, trainer={"max_steps": max_steps, "max_epochs": -1, **TWO_HOSTS})
    module, start = Classifier(), AtStart()
    callbacks: list[Callback] = [start]
    if directory is not None:
        callbacks.append(ModelCheckpoint(directory, save_last=True, every_n_train_steps=10))
    saves = {"enable_checkpointing": directory is not None}
    trainer = make_trainer(case, strategy, 4, callbacks=callbacks, **saves, **TWO_HOSTS)
    torch.manual_seed(3)
    random.seed(3)
    this_rank = 2 * int(os.environ["NODE_RANK"]) + int(os.environ["LOCAL_RANK"])
    with link(SLOW if this_rank in slow_ranks else bandwidth, costs):
        trainer.fit(module, train_loader(case, 4), ckpt_path=resume)
    strategy.meter.flush()
    last = strategy.meter.steps[-1].of("all_reduce", "data")
    return {
        "chosen": start.chosen,
        "weights": state(module),
        "random": start.random,
        "state": start.state,
        "first_step": strategy.meter.steps[0].of("all_reduce", "data")[0].size_bytes,
        "network_bytes": sum(totals.sent_bytes - totals.memory_bytes for totals in last),
        "options": strategy.options["compression"],
    }


def name_of(strategy: Any) -> str:
    compressed = strategy.averaging.reducer.all_reduce.compressed
    assert (compressed is None) == (strategy.averaging.compressed is None)
    return "none" if compressed is None else compressed.compressor.name


def announcements(world: World) -> list[list[str]]:
    """The lines that each rank has printed about the choice."""
    return [
        [line for line in world.output(r).splitlines() if line.startswith("compression='auto'")]
        for r in range(world.num_ranks)
    ]


def assert_alike(results: Sequence[dict[str, Any]]) -> None:
    for result in results:
        assert result["chosen"] == results[0]["chosen"]
        for name, value in results[0]["weights"].items():
            assert torch.equal(value, result["weights"][name]), name


@pytest.mark.parametrize("expected", CHOICES)
def test_the_choice_is_made_once_and_trains_like_the_one_that_is_asked_for(world4: World, expected: str) -> None:
    results = world4.run(train, **CHOICES[expected])
    lines = announcements(world4)
    assert [len(found) for found in lines] == [1, 0, 0, 0]
    assert lines[0][0].startswith(f"compression='auto': {expected}. A step's 652 B of gradients take: none ")
    assert "on the slowest rank" in lines[0][0]
    assert_alike(results)
    assert results[0]["chosen"] == expected
    asked = world4.run(train, **CHOICES[expected], compression=None if expected == "none" else expected)
    for result, other in zip(results, asked, strict=True):
        assert result["options"] == "auto"
        assert result["state"].get("step", 0) == 0, "what was measured leaves no errors behind"
        assert result["network_bytes"] == other["network_bytes"]
        assert result["first_step"] == other["first_step"], "what was measured is no part of the first step"
        assert result["random"] == other["random"]
        for name, value in other["weights"].items():
            assert torch.equal(value, result["weights"][name]), name


@pytest.mark.parametrize("slow_ranks", [[3], [0], [1, 2]])
def test_ranks_that_measure_different_times_choose_alike(world4: World, slow_ranks: list[int]) -> None:
    """The link of some ranks is slow: all wait for them, so that all send less."""
    results = world4.run(train, FAST, COSTS, slow_ranks=slow_ranks)
    assert_alike(results)
    assert results[0]["chosen"] == "int8"


@pytest.mark.parametrize(("precision", "expected"), [("64-true", "none"), ("bf16-true", "int8"), ("16-true", "int8")])
def test_other_types_of_gradients(world4: World, precision: str, expected: str) -> None:
    results = world4.run(train, SLOW, COSTS, precision=precision)
    assert_alike(results)
    assert results[0]["chosen"] == expected
    [line], *_ = announcements(world4)
    if precision == "64-true":
        assert line == "compression='auto': none. Gradients in float64 are compressed on demand only."
    else:
        assert "bf16" not in line


def test_together_with_a_measured_bucket_size(world4: World) -> None:
    results = world4.run(train, SLOW, COSTS, bucket_cap_mb="auto")
    assert_alike(results)
    assert results[0]["chosen"] == "int8"


@as_hosts()
def on_one_host() -> str:
    strategy = make_strategy("ring_ddp", compression="auto")
    start = AtStart()
    trainer = make_trainer(Case(max_epochs=1, precision="32-true"), strategy, 2, callbacks=[start])
    trainer.fit(Classifier(), train_loader(Case(), 2))
    return start.chosen


def test_on_one_host_nothing_is_measured_and_nothing_said(world2: World) -> None:
    """A warning would be an error here."""
    assert world2.run(on_one_host) == ["none", "none"]
    assert announcements(world2) == [[], []]


@pytest.mark.parametrize("before", ["int8", "bf16", "none"])
def test_a_run_resumes_under_another_choice(world4: World, tmp_path: Path, before: str) -> None:
    """Error feedback goes on where the choice has it and the checkpoint too; else it begins at zero, or is left."""
    world4.run(train, **CHOICES[before], directory=str(tmp_path))
    source = tmp_path / "last.ckpt"
    saved = torch.load(source, weights_only=True).get(CHECKPOINT_KEY, {}).get("compression", {})
    assert any(error.any() for error in saved.get("errors", {}).values()) == (before == "int8")
    for after in CHOICES:
        results = world4.run(train, **CHOICES[after], resume=str(source), max_steps=12)
        assert_alike(results)
        assert results[0]["chosen"] == after
        for result in results:
            loaded = result["state"].get("errors", {})
            assert ("errors" in result["state"]) == (after == "int8")
            if before == after == "int8":
                for name, error in saved["errors"].items():
                    torch.testing.assert_close(loaded.get(name, torch.zeros_like(error)), error, rtol=1e-6, atol=1e-9)
            else:
                assert not any(error.any() for error in loaded.values())


class _WithoutHosts(GradientReducer):
    """Stands for one over NCCL: it has no all-reduce in the hosts' memory."""

    def __init__(self, group: dist.ProcessGroup, meter: Meter) -> None:
        super().__init__(group, meter)
        self.ring, self.all_reduce = self.all_reduce, None

    def average(self, tensor: Tensor) -> None:
        assert self.ring is not None
        self.ring(tensor, average=True)


def beside_nccl(expected: str) -> tuple[str, int]:
    init_group()
    group, meter = dist.new_group(backend="gloo"), Meter()
    closed: list[int] = []
    all_reduce = HierarchicalAllReduce(None, RingAllReduce(group))
    all_reduce.close = lambda: closed.append(1)  # type: ignore[method-assign]
    plain = _WithoutHosts(group, meter)
    cpu = torch.device("cpu")
    ranks = MeteredGroup(group, meter, name="data", device=cpu)
    with link(**CHOICES[expected]):
        reducer = reducer_of_choice(
            pieces_of(Classifier()), plain, all_reduce, bucket_bytes=1e6, ranks=ranks, device=cpu, info=print
        )
    assert (reducer is plain) == (expected == "none")
    found = "none" if reducer is plain else reducer.all_reduce.compressed.compressor.name  # type: ignore[union-attr]
    return found, len(closed)


@pytest.mark.parametrize("expected", CHOICES)
def test_where_gradients_would_not_pass_the_hosts_memory(world2: World, expected: str) -> None:
    """As on GPUs, where the way that a compression would take is made for the choice, and goes with it."""
    assert world2.run(beside_nccl, expected) == [(expected, int(expected == "none"))] * 2


def test_ranks_compare_what_was_asked_for() -> None:
    strategy = RingDDPStrategy(compression="auto")
    assert strategy.options["compression"] == "auto"
    assert RingDDPStrategy(compression="bf16").options["compression"] == "Bf16()"
    assert RingDDPStrategy().options["compression"] is None
    strategy = make_strategy("ring_ddp", compression="auto", parallel_devices=[torch.device("cpu")])
    trainer = make_trainer(Case(), strategy, 1, accelerator="cpu", devices=1)
    run, options = trainer.strategy.run_context, trainer.strategy.options  # type: ignore[attr-defined]
    table = table_of(run, strategy="RingDDPStrategy", options=options, precision="32-true")
    assert table["option compression"] == "'auto'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "auto", "average_every": 2}, "compression='auto'.*leave one of the two out"),
        ({"compression": "auto", "ddp_comm_hook": print}, "both choose how gradients travel"),
        ({"compression": {"name": "auto"}}, "has no options; write compression='auto'"),
        ({"compression": {"name": "auto", "rank": 4}}, "has no options; write compression='auto'"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RingDDPStrategy(**options)
