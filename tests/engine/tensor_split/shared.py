"""What the tests of this folder share: a tensor group on the ranks, and comparisons with one device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from tests.world import init_group


@contextmanager
def tensor_group(*, shared_memory: bool = True) -> Iterator[tuple[TensorGroup, Meter]]:
    """All ranks as a tensor group, and its meter; within the block numbers are float64."""
    init_group()
    meter = Meter()
    group = TensorGroup(dist.group.WORLD, meter=meter, shared_memory=shared_memory)
    torch.set_default_dtype(torch.float64)
    try:
        yield group, meter
    finally:
        torch.set_default_dtype(torch.float32)
        group.close()


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def assert_parts(split: nn.Module, whole: nn.Module, group: TensorGroup) -> None:
    """This rank has its parts of the whole module's parameters and gradients; gathered, the parts are the whole."""
    of_whole = dict(whole.named_parameters())
    for name, parameter in split.named_parameters():
        cut, expected = split_of(parameter), of_whole[name]
        for own, of_all in ((parameter, expected), (gradient_of(parameter), gradient_of(expected))):
            assert_equal(own, of_all if cut is None else cut.part(of_all, group.rank))
        if cut is not None:
            assert_equal(cut.gather(parameter.detach(), group, name), expected.detach())


def counts(meter: Meter) -> dict[tuple[str, str], int]:
    """The collectives since the last call, by operation and layer."""
    meter.end_step()
    meter.flush()
    return {(totals.operation, totals.group): totals.count for totals in meter.steps[-1].operations}
