"""What user code reads of split parameters and gradients, and what it does to them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F
from torch.optim import optimizer as optimizers
from torch.optim import sgd

from lightning_multigpu.engine.tensor_split import tensor_group as tensor_group_module
from lightning_multigpu.engine.tensor_split.layers import ColumnSplitLinear
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit, split_of
from lightning_multigpu.engine.tensor_split.parts import PartLayout, cut, state_of, whole
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from tests.engine.tensor_split.shared import counts, gradient_of, tensor_group
from tests.world import World

SHAPE = 16, 8  # a part of two ranks is square


def _assign(p: Parameter) -> None:
    p.grad = torch.ones(SHAPE) * torch.arange(16.0)[:, None]


def _assign_values(p: Any) -> None:
    gradient, average = p.grad, p.detach().clone()
    gradient.data = gradient.square()
    gradient.data = torch.ones(SHAPE) * torch.arange(16.0)[:, None]
    gradient.add_(average)
    p.grad.mul_(3)


READS: dict[str, Callable[[Any], Any]] = {
    "each element": lambda p: (p.grad * 2 - p).abs().clamp(max=0.5),
    "each element, with a tensor of the whole shape": lambda p: p.grad * torch.arange(128.0).view(SHAPE),
    "each element, with a row": lambda p: p.grad + torch.arange(8.0),
    "a number times each element": lambda p: torch.mul(torch.tensor(2.0), p.grad).norm(),
    "norms": lambda p: p / p.grad.norm() + p.grad.std(),
    "in the order of entries": lambda p: p.grad.cumsum(0),
    "sorted": lambda p: p.grad.sort(0).values,
    "over a dimension": lambda p: F.softmax(p.grad, 0),
    "rolled": lambda p: p.grad.roll(3, 0),
    "transposed": lambda p: p.grad.T[0],
    "a product": lambda p: p.grad.T @ p.grad,
    "sizes": lambda p: torch.tensor([*p.shape, p.numel(), len(p.grad), p.grad.nbytes, p.grad.size(0)]),
    "centred in place": lambda p: p.grad.sub_(p.grad.mean(dim=0, keepdim=True)),
    "centred by rows": lambda p: p.grad.sub_(p.grad.mean(dim=1, keepdim=True)),
    "multiplied in place by a mask": lambda p: p.grad.mul_(torch.arange(128.0).view(SHAPE) % 3),
    "noise": lambda p: p.grad.add_(torch.randn_like(p.grad)),
    "noise in place": lambda p: p.grad.normal_(),
    "entries": lambda p: p.grad.__setitem__(slice(2, 5), 7.0),
    "a whole gradient assigned": _assign,
    "an own gradient assigned": lambda p: setattr(p, "grad", p.grad.square()),
    "values assigned": _assign_values,
    "values assigned to a parameter": lambda p: setattr(p, "data", p * 2),
    "lists": lambda p: torch._foreach_mul_([p.grad, torch.ones(3)], torch.tensor(0.5))[0].norm(),
    "lists of numbers": lambda p: torch._foreach_add_([p.grad, torch.ones(3)], [0.5, 1.0]),
    "lists of results": lambda p: torch._foreach_mul([p.grad, torch.ones(3)], 0.5)[0].norm(),
    "an own average": lambda p: torch.ones(SHAPE).lerp_(p.detach(), 0.1),
    "clipped": lambda p: torch.nn.utils.clip_grad_norm_([p], 0.3),
}


def _parameter(group: Any = None) -> Parameter:
    parameter = Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)))
    gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    if group is not None:
        split = ParameterSplit.even(SHAPE[0], group.size)
        cut(parameter, PartLayout(split, group, "up"))
        gradient = split.part(gradient, group.rank)
    parameter.grad = gradient
    return parameter


def _read(read: Callable[[Any], Any], group: TensorGroup | None) -> list[Tensor]:
    parameter = _parameter(group)
    torch.manual_seed(3)
    with nullcontext() if group is None else group.showing(parts=False), torch.no_grad():
        result = read(parameter)
        value = torch.tensor(result.tolist() if isinstance(result, Tensor) else [])
        return [value, whole(parameter.detach()), whole(gradient_of(parameter))]


def they_are_as_on_one_device() -> None:
    """What has the shape of a part was taken for an operation on each element: sums, orders and noise were wrong."""
    with tensor_group() as (group, _):
        for name, read in READS.items():
            for found, expected in zip(_read(read, group), _read(read, None), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]


def after_the_run_a_read_of_what_other_ranks_have_is_refused() -> None:
    with tensor_group() as (group, _):
        parameter = _parameter(group)
    group.abort()  # as another thread may
    with group.showing(parts=False):
        for read in (parameter.tolist, parameter.std, parameter.sort):
            with pytest.raises(RuntimeError, match=r"needs the values of up .* the run has ended: read them before"):
                read()


def test_an_optimizer_updates_them_together_as_on_one_device() -> None:
    """On GPUs, the default: it updated them one by one, since torch did not know their class."""
    parameter = _parameter(mock.Mock(rank=0, size=2, shows_parts=True))
    parameter.grad = torch.ones(8, 8)
    expected, optimizer = parameter.detach().clone() - 0.5, torch.optim.SGD([parameter], lr=0.5)
    with (
        mock.patch.object(optimizers, "_get_foreach_kernels_supported_devices", return_value=["cpu"]),
        mock.patch.object(sgd, "_single_tensor_sgd", side_effect=AssertionError),
    ):
        optimizer.step()
    assert torch.equal(parameter.detach(), expected)


def test_a_users_attribute_is_no_mark_of_a_cut() -> None:
    parameter = _parameter()
    parameter.placed = True  # type: ignore[attr-defined]
    assert split_of(parameter) is None


def what_a_part_tells_needs_no_other_rank() -> None:
    """Code on rank 0 alone that looks at a type would wait for the others."""
    with tensor_group() as (group, meter):
        parameter = Parameter(torch.ones(SHAPE))
        cut(parameter, PartLayout(ParameterSplit.even(SHAPE[0], group.size), group, "up"))
        meter.end_step()
        with group.showing(parts=False):
            read = (parameter.grad, parameter.dtype, parameter.dim(), parameter.requires_grad, parameter.shape)
            assert read == (None, torch.float64, 2, True, SHAPE)
        assert not counts(meter)


def test_a_state_is_a_dict_in_which_all_code_finds_parts() -> None:
    """Its own storage was empty: a copy, a union and what C code reads were ``{}``."""
    parameter = _parameter(mock.Mock(rank=0, size=2, shows_parts=False))
    own = {"average": torch.ones(8, 8), "step": torch.tensor(1.0)}
    found = state_of(parameter, own)
    found["sum"] = torch.ones(SHAPE)
    del found["step"]
    for each in (found.copy(), found | {}, {**found}, dict(found)):
        assert {name: tuple(value.shape) for name, value in each.items()} == {"average": SHAPE, "sum": SHAPE}
    assert dict.__len__(found) == len(found) == len(own) == 2
    assert own["sum"].shape == (8, 8)


def _changes_a_view() -> None:
    with tensor_group() as (group, _):
        parameter = _parameter(group)
        with group.showing(parts=False), torch.no_grad():
            parameter[3].zero_()
            parameter.sum()


def test_a_view_that_is_changed_is_refused(world2: World) -> None:
    world2.run_raising(RuntimeError, "the result of __getitem__ is a view of a gathered copy", _changes_a_view)


def a_read_by_one_rank_alone_is_refused() -> None:
    words = r"norm of values of up \(.*test_split_parameters\.py:\d+\).* the other ranks have not come to it within 0"
    with tensor_group(), mock.patch.object(tensor_group_module, "_READ_TIMEOUT_S", 0.2):
        group = TensorGroup(dist.group.WORLD, readers=dist.new_group(backend="gloo"))
        layer = ColumnSplitLinear.of(nn.Linear(SHAPE[1], SHAPE[0]), group, name="up")
        group.shows_parts = False
        if group.rank == 0:
            with pytest.raises(RuntimeError, match=words):
                layer.weight.norm()
        dist.barrier()
        group.close()


@pytest.mark.parametrize(
    "check",
    [
        after_the_run_a_read_of_what_other_ranks_have_is_refused,
        they_are_as_on_one_device,
        what_a_part_tells_needs_no_other_rank,
        a_read_by_one_rank_alone_is_refused,
    ],
)
def test_on_ranks(world2: World, check: Callable[[], None]) -> None:
    world2.run(check)
