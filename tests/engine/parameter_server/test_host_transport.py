"""An update in shards on the host is the update of the optimizer itself."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from lightning_multigpu.engine.data_parallel.averaging import average_gradients
from lightning_multigpu.engine.parameter_server.host_transport import EarlyCopies, HostTransport
from lightning_multigpu.placement.owned_step import OwnedStep, Update
from lightning_multigpu.placement.table import as_dense
from tests.engine.parameter_server.updates import (
    DecayingSGD,
    Trained,
    assert_as_on_one_device,
    assert_equal,
    assert_unusual,
    every_optimizer,
    groups_of,
    hooks_of_all_optimizers,
    of_rank,
    on_one_device,
    steps_of,
    unusual_steps,
    weights,
)
from tests.world import World, init_group, rank

HostStep = OwnedStep[HostTransport]


@contextlib.contextmanager
def serving_ranks() -> Iterator[Callable[[Optimizer], HostStep]]:
    init_group()
    group = dist.new_group(backend="gloo")
    ranks = SharedMemoryAllReduce(group)
    moved: list[Tensor] = []

    def reserve(numel: int, dtype: torch.dtype) -> Tensor:
        moved.append(torch.zeros(numel, dtype=dtype))
        ranks.move(moved[-1], len(moved))
        return moved[-1]

    def gather(value: Any) -> list[Any]:
        found = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, value, group=group)
        return found

    try:
        data = MeteredGroup(group, Meter(), name="data", device=torch.device("cpu"))

        def serve(optimizer: Optimizer) -> HostStep:
            step = OwnedStep(optimizer, HostTransport(optimizer, ranks, Meter(), reserve=reserve, gather=gather))
            step.average = partial(average_gradients, group=data)
            return step

        yield serve
    finally:
        ranks.close()
        dist.destroy_process_group(group)


def every_optimizer_on_the_host() -> Trained:
    def held_by(server: HostStep) -> int:
        states = server.transport.part.states.values()
        return sum(value.numel() for each in states for value in each.values() if isinstance(value, Tensor))

    with serving_ranks() as serve:
        return every_optimizer(serve, rank(), held_by)


def test_every_optimizer_of_torch_updates_as_on_one_device(world2: World) -> None:
    results = world2.run(every_optimizer_on_the_host)
    assert_as_on_one_device(*results)
    total = sum(p.numel() for p in weights())
    # Two moments of each element, and a number of steps for each of the tensors that a rank has a part of.
    assert all(total <= result["AdamW"][2] <= total + 4 for result in results)


def unusual() -> tuple[dict[str, Any], list[Tensor]]:
    optimizer = DecayingSGD(groups_of(parameters := weights()), lr=0.1, momentum=0.9)
    with serving_ranks() as serve, hooks_of_all_optimizers() as calls:
        decaying = steps_of(optimizer, parameters, of_rank(rank()), serve)
        return unusual_steps(serve, rank(), calls), decaying


def test_unusual_steps(world2: World) -> None:
    expected, _ = on_one_device(lambda groups: DecayingSGD(groups, lr=0.1, momentum=0.9))
    for found, decaying in world2.run(unusual):
        assert_unusual(found)
        assert_equal(decaying, expected)


def changed_alone(num_changed: int) -> None:
    with serving_ranks() as serve:
        parameters = weights()
        with contextlib.closing(serve(optim.SGD(parameters, lr=0.1))) as step:
            step.place_new()
            step.transport.step(Update(num_changed=num_changed))


def test_states_that_ranks_have_not_changed_alike(world4: World) -> None:
    """Ranks whose own number was the mean went on, and waited for the others."""
    world4.run_raising(
        ValueError,
        "in optimizer.state of SGD, and all ranks together 4: make",
        lambda: changed_alone((0, 1, 2, 1)[rank()]),
    )


def test_sparse_gradients_of_an_optimizer_that_updates_rows_are_refused() -> None:
    gradient = torch.eye(3).to_sparse()
    assert torch.equal(as_dense(gradient, optim.SGD(weights(), lr=0.1)), torch.eye(3))
    with pytest.raises(ValueError, match="SparseAdam has sparse gradients, which owners update as dense ones"):
        as_dense(gradient, optim.SparseAdam(weights()))


def test_gradients_are_copied_while_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = mock.Mock()  # its streams have done their work at once
    monkeypatch.setattr(torch.cuda, "Stream", cuda.Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: cuda.kept_for_the_stream())

    def calls() -> list[str]:
        return [name for name, *_ in cuda.mock_calls]

    parameter, place = nn.Parameter(torch.ones(3)), torch.zeros(3)
    copies, wanted = EarlyCopies(), False
    copies.follow(parameter, place, lambda: wanted)

    parameter.sum().backward()  # gradients are still accumulated
    assert not copies.has(parameter)
    assert not calls()
    wanted = True
    parameter.sum().backward()
    assert place.tolist() == [2.0] * 3
    assert calls() == ["Stream", "Stream().wait_stream", "kept_for_the_stream"]
    assert copies.has(parameter)
    assert not copies.has(parameter), "the next step needs a copy of its own"

    parameter.sum().backward()
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)  # by a hook: the copy is stale
    assert not copies.has(parameter)
    copies.wait()
    assert calls()[-1] == "Stream().synchronize"
    copies.close()
    parameter.sum().backward()
    assert not copies.has(parameter)
