"""A rank's marks become its timeline, and what autograd keeps is counted while it is kept."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.pipeline.measuring.recorder import KEPT_STEPS, Recorder
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.training_memory import SavedActivations
from lightning_multigpu.planning.pipelines.timeline import Interval


class Ticking:
    """A clock on which a second passes between two readings."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def recorder() -> Recorder:
    made = Recorder(Meter(clock=Ticking()), torch.device("cpu"))
    made.notes_steps = True
    return made


def test_marks_become_intervals() -> None:
    made = recorder()
    with made.step(2, together=True):
        made.enter("receive", 1, 0)
        made.enter("forward", 1, 0, received=True)
        made.enter("idle", 1, 0)
        made.enter("send", 1, 0)
        made.enter("receive", 1, 1)
        made.enter("forward", 1, 1, received=True)
    [found] = made.steps()
    assert (found.number, found.num_micro_batches) == (1, 2)
    start = found.timeline[0].start_s
    ends = [("receive", 0, 1), ("forward", 0, 2), ("send", 0, 4), ("receive", 1, 5), ("forward", 1, 6)]
    assert found.timeline == tuple(Interval(kind, 1, m, start + end - 1, start + end) for kind, m, end in ends)


def test_what_was_asked_for_in_advance_is_waited_for_at_last() -> None:
    made = recorder()
    with made.step(1, together=True):
        made.enter("receive", 2, 0)
        made.enter("forward", 0, 0)
        made.enter("idle", 0, 0)
        made.enter("backward", 2, 0, received=True)
    [found] = made.steps()
    assert [(i.kind, i.stage) for i in found.timeline] == [
        ("receive", 2), ("forward", 0), ("receive", 2), ("backward", 2)
    ]  # fmt: skip


def test_only_steps_that_are_asked_for_run_together_and_succeed_count() -> None:
    made = recorder()

    def step(*, together: bool = True, fail: bool = False) -> None:
        with made.step(2, together=together):
            made.enter("forward", 0, 1 // (not fail))

    made.notes_steps = False
    step()
    made.notes_steps = True
    step(together=False)
    with pytest.raises(ZeroDivisionError):
        step(fail=True)
    made.enter("forward", 0, 0)  # outside of a step
    assert made.steps() == ()
    for _ in range(KEPT_STEPS + 3):
        step()
    newest = [(number, 1) for number in range(7, 7 + KEPT_STEPS)]
    assert [(each.number, len(each.timeline)) for each in made.steps()] == newest


def peak(kept: SavedActivations, run: Any) -> int:
    with kept.counted():
        run()
    assert kept.size_bytes == 0, "what was kept is free again"
    return kept.peak_bytes


def test_the_peak_is_over_all_that_is_kept_at_a_time() -> None:
    x = torch.ones(10, requires_grad=True)

    def some_at_once(count: int) -> None:
        for _ in range(2):
            for result in [x.exp().sum() for _ in range(count)]:
                result.backward()
            x.exp().sum().backward()

    for count in (1, 5):
        assert peak(SavedActivations([]), partial(some_at_once, count)) == count * 40


def test_pieces_of_memory_count_once_and_parameters_do_not() -> None:
    weight = nn.Parameter(torch.ones(10, 10))
    x = torch.ones(4, 10, requires_grad=True)

    def run() -> None:
        y = x @ weight  # keeps x and the weight
        (y.exp() * x[:2].repeat(2, 1)).sum().backward()  # keeps exp(y), which two functions want, and the repeated x

    assert peak(SavedActivations([weight]), run) == 3 * 160
    assert peak(SavedActivations([]), run) == 3 * 160 + 400


def test_counting_changes_no_gradient_and_keeps_nothing() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Softmax(-1))
    x = torch.randn(3, 6)
    layer(x).square().sum().backward()
    expected = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    with SavedActivations([]).counted():
        hidden = layer[:3](x)
        checkpoint(layer[3], hidden, use_reentrant=False).square().sum().backward()
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
    gone = weakref.ref(hidden)
    del hidden
    assert gone() is None


def test_tensors_without_memory_of_their_own_are_let_through() -> None:
    table = torch.eye(3).to_sparse().requires_grad_()
    placeholder = Placeholder(torch.ones(3, 3), "parameter x").requires_grad_()
    with SavedActivations([placeholder]).counted():
        torch.sparse.mm(table, torch.ones(3, 2, requires_grad=True)).sum().backward()
        placeholder.exp()
    assert table.grad is not None
