"""Stages run by a schedule compute together what one process computes, whoever posts their messages."""

import inspect
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.stage import _PipelineStageBase

from lightning_multigpu._torch_compat import new_group_in_order
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.pipeline.measuring.recorder import Recorder
from lightning_multigpu.engine.pipeline.splitting.chain import find_chain
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.stages import runner
from lightning_multigpu.engine.pipeline.stages.runner import PipelineRunner
from lightning_multigpu.engine.pipeline.stages.stage_messages import HostMessages, PipelineGroup
from tests.world import World, init_group

CPU = torch.device("cpu")
SAMPLES, WIDTH, LAYERS = 19, 4, 8
PATIENCE_S = 20.0


class Layer(nn.Module):
    """Takes and gives two tensors, of which the second may come from a parameter alone."""

    def __init__(self, *, loose: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.loose = nn.Parameter(torch.ones(WIDTH)) if loose else None

    def forward(self, x: Tensor, further: Tensor | None = None) -> Any:
        y = torch.tanh(self.linear(x)) + (0 if further is None else further)
        return y, (y * 2 if self.loose is None else self.loose * 3)


class Model(nn.Module):
    def __init__(self, *, loose: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(Layer(loose=loose) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def loss(self, batch: Tensor) -> Tensor:
        x, further = self.embedding(batch), None
        for layer in self.layers:
            x, further = layer(x, further)
        return self.head(x).square().mean()


class Trial:
    """One rank of a pipeline; rank 0 has the last stage."""

    def __init__(self, model: Model, schedule: str, *, in_batches: bool) -> None:
        init_group()
        num_ranks = dist.get_world_size()
        self.model = model.double()
        self.batch = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        group = PipelineGroup(new_group_in_order(list(range(num_ranks))[::-1]), Meter(), CPU, in_batches=in_batches)
        num_stages = num_ranks * (2 if schedule in ("interleaved", "zero_bubble") else 1)
        size = LAYERS // num_stages
        chain = find_chain(model, "layers", num_stages)
        bounds = [(s * size, (s + 1) * size) for s in range(num_stages)]
        self.position = num_ranks - 1 - dist.get_rank()
        ownership = Ownership(model, chain, bounds, self.position, num_ranks, group)
        self.runner = PipelineRunner(ownership, schedule=schedule, recorder=Recorder(Meter(), CPU))
        self.steps = 0

    def train(self, num_micro_batches: int, before: Callable[[int], None] = lambda micro_batch: None) -> list[Tensor]:
        """A step; ``before`` is called before the model's own step, on every stage."""
        parts = self.batch.tensor_split(num_micro_batches)

        def step(micro_batch: int) -> Tensor:
            before(micro_batch)
            return self.model.loss(parts[micro_batch])

        self.steps += 1
        scales = [len(part) / SAMPLES for part in parts]
        return self.runner.train(step, [part.shape for part in parts], scales, (self.steps,))

    def difference(self) -> float:
        """The largest relative difference of a gradient, summed over ranks, from those of the whole model."""
        whole = Model(loose=self.model.layers[0].loose is not None).double()
        whole.loss(self.batch).backward()
        worst = 0.0
        for mine, expected in zip(self.model.parameters(), whole.parameters(), strict=True):
            total = torch.zeros_like(mine) if mine.grad is None else mine.grad.clone()
            dist.all_reduce(total)
            wanted = torch.zeros_like(total) if expected.grad is None or not mine.requires_grad else expected.grad
            worst = max(worst, float((total / self.steps - wanted).abs().max() / (1e-30 + wanted.abs().max())))
        return worst


def trained(schedule: str, in_batches: bool, counts: list[int], *, loose: bool = False, frozen: bool = False) -> float:
    model = Model(loose=loose)
    if frozen:
        for part in (model.embedding, *model.layers[: LAYERS // 2]):
            part.requires_grad_(False)
    trial = Trial(model, schedule, in_batches=in_batches)
    with warnings.catch_warnings():
        if loose:  # zero bubble says that it computes the gradients of such a stage together
            warnings.filterwarnings("ignore", message=".*one of its outputs depends on none of its inputs")
        for _ in range(2):  # the first step of a size runs its micro-batches one by one, which makes the gradients
            trial.model.zero_grad()
            trial.steps = 0
            for count in counts:
                trial.train(count)
    return trial.difference()


POSTED = pytest.mark.parametrize("in_batches", [False, True], ids=["by the stages", "by torch"])
# Of several sizes within a step, too few for the schedule, and no multiple of what it needs.
COUNTS = [4, 8, 1, 5, 2]
SCHEDULES = pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])


@POSTED
@SCHEDULES
def test_gradients_are_those_of_the_whole_model(world2: World, world4: World, schedule: str, in_batches: bool) -> None:
    """Messages that the stages post on four ranks are in the contract of strategies."""
    for world in (world2, world4) if in_batches else (world2,):
        assert max(world.run(trained, schedule, in_batches, COUNTS)) < 1e-12


@POSTED
@SCHEDULES
def test_stages_without_a_path_to_their_input(world2: World, schedule: str, in_batches: bool) -> None:
    """Nobody waits for a gradient of frozen stages; and a parameter leads to an output past the input."""
    for options in ({"frozen": True}, {"loose": True}):
        assert max(world2.run(trained, schedule, in_batches, [4], **options)) < 1e-12


def running_ahead(directory: Path) -> float:
    """The last stage begins when the first one has handed on everything."""
    trial = Trial(Model(), "gpipe", in_batches=False)
    trial.train(4)

    def before(micro_batch: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while trial.position == 1 and micro_batch == 0 and not (directory / "all").exists():
            assert time.monotonic() < deadline, "the first stage waits for the last one"
            time.sleep(0.001)

    layer = trial.model.layers[2]  # the stage leaves the step behind the next one
    done: list[int] = []

    def behind(*_: Any) -> None:
        done.append(1)
        if len(done) == 4:
            (directory / "all").touch()

    handle = layer.register_forward_hook(behind)
    trial.train(4, before)
    handle.remove()
    return trial.difference()


def test_a_stage_goes_on_before_its_output_has_been_received(world2: World, tmp_path: Path) -> None:
    assert max(world2.run(running_ahead, tmp_path)) < 1e-12


def most_under_way() -> tuple[int, int]:
    """Messages of one kind whose tensors a stage holds at a time, and what is left of them behind the step."""
    trial = Trial(Model(), "1f1b", in_batches=False)
    trial.train(16)
    messages = trial.runner.stages[0]._messages
    assert isinstance(messages, HostMessages)
    counts: list[int] = []
    send = messages.send

    def watched(*args: Any) -> Any:
        result = send(*args)
        counts.append(len(messages._under_way))
        return result

    messages.send = watched  # type: ignore[method-assign]
    trial.train(16)
    return max(counts), len(messages._under_way)


def test_1f1b_holds_no_more_messages_than_it_is_ahead(world2: World) -> None:
    for held, left in world2.run(most_under_way):
        assert held <= 3
        assert left == 0


def test_what_is_overridden_of_torchs_stage_is_still_called_so() -> None:
    overridden = {name for name, entry in vars(runner._StageForTorch).items() if inspect.isfunction(entry)}
    assert overridden <= set(dir(_PipelineStageBase))
