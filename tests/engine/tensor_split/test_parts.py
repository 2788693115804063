"""Parts of tensors compute what the whole ones compute, and gather where they have to."""

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

from lightning_multigpu.engine.tensor_split.cross_entropy import split_cross_entropy
from lightning_multigpu.engine.tensor_split.layers import ColumnSplitLinear
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit
from lightning_multigpu.engine.tensor_split.parts import PartLayout, SplitTensor, functions_get_whole, whole
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from tests.engine.tensor_split.shared import assert_equal, counts, gradient_of, tensor_group
from tests.world import World

CLASSES, ROWS = 11, 15
OPERAND = "the gradient of an operand"


def _cross_entropy(num_classes: int, masked: int, reduction: str, label_smoothing: float) -> None:
    with tensor_group() as (group, meter):
        torch.manual_seed(2)
        # Large logits: without the largest of all ranks their exponentials are inf.
        logits = torch.randn(ROWS, num_classes) * 800
        logits[:, num_classes - masked :] = -torch.inf
        target = torch.randint(num_classes - masked, (ROWS,))
        target[3] = -100
        placed = PartLayout(ParameterSplit.even(num_classes, group.size), group, "head")
        whole = logits.clone().requires_grad_()
        own = placed.at(1).own(logits).requires_grad_()
        weights = torch.arange(1.0, ROWS + 1)
        options = {"reduction": reduction, "label_smoothing": label_smoothing}
        expected = F.cross_entropy(whole, target, **options)  # type: ignore[arg-type]
        actual = split_cross_entropy(own, target, placed, **options)  # type: ignore[arg-type]
        for loss in (expected, actual):
            (loss * weights if reduction == "none" else loss * 3).sum().backward()
        assert counts(meter) == {("all_gather", "tensor head cross_entropy"): 1}
        assert_equal(actual, expected)
        assert_equal(gradient_of(own), placed.at(1).own(gradient_of(whole)))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(world2: World, reduction: str, label_smoothing: float) -> None:
    world2.run(_cross_entropy, CLASSES, 0, reduction, label_smoothing)


def test_a_rank_without_classes(world4: World) -> None:
    world4.run(_cross_entropy, 3, 0, "mean", 0.1)


def test_a_rank_whose_classes_are_masked(world2: World) -> None:
    """Logits of -inf, for a vocabulary that is padded: their rank told nan, and the loss was nan."""
    world2.run(_cross_entropy, CLASSES, 7, "mean", 0.0)


def test_a_target_that_is_no_class_is_refused() -> None:
    placed = PartLayout(ParameterSplit.even(CLASSES, 2), mock.Mock(rank=0, size=2), "head")
    with pytest.raises(IndexError, match=f"there are {CLASSES} classes"):
        split_cross_entropy(torch.zeros(2, 6), torch.tensor([0, CLASSES]), placed)


TARGET = torch.randint(CLASSES, (2, 5), generator=torch.Generator().manual_seed(1))
TARGET[0, 1] = -100
FLAT = TARGET.flatten()


def _placed(group: TensorGroup, num_dims: int) -> PartLayout:
    return PartLayout(ParameterSplit(num_dims - 1, ParameterSplit.even(CLASSES, group.size).ranges), group, "head")


def _changed(z: Tensor, change: Callable[[], object]) -> Tensor:
    change()
    return F.cross_entropy(z.flatten(0, 1), FLAT)


FORMS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "view": (lambda z: F.cross_entropy(z.view(-1, CLASSES), TARGET.view(-1)), []),
    "size": (lambda z: F.cross_entropy(z.view(-1, z.size(-1)), TARGET.view(-1)), []),
    "sum": (lambda z: F.cross_entropy(z.reshape(z.shape[0] * z.shape[1], -1), TARGET.view(-1), reduction="sum"), []),
    "shifted": (lambda z: F.cross_entropy(z[:, :-1].contiguous().view(-1, CLASSES), TARGET[:, 1:].flatten()), []),
    "cast": (lambda z: F.cross_entropy(z[:, :-1].float().double().reshape(-1, CLASSES), TARGET[:, 1:].flatten()), []),
    "module": (lambda z: nn.CrossEntropyLoss(label_smoothing=0.1)(z.flatten(0, 1) / 2.0, FLAT), []),
    "transposed": (lambda z: F.cross_entropy(z.transpose(1, 2), TARGET), ["cross_entropy"]),
    "weights": (lambda z: F.cross_entropy(z.flatten(0, 1), FLAT, torch.arange(1.0, CLASSES + 1)), ["cross_entropy"]),
    "times a tensor": (lambda z: (z * torch.arange(CLASSES)).sum() + z.softmax(-1).pow(2).sum(), ["sum", "softmax"]),
    "some classes": (lambda z: z[..., 3].sum() + z[0, 1, 2:5].sum(), ["__getitem__", "__getitem__"]),
    "log-softmax": (lambda z: F.nll_loss(F.log_softmax(z.view(-1, CLASSES), 1), TARGET.view(-1)), ["log_softmax"]),
    "scaled in place": (lambda z: _changed(z, lambda: z.mul_(3).div_(2)), []),
    "divided in place": (lambda z: _changed(z, lambda: z.__itruediv__(2)), []),
    "a class": (lambda z: _changed(z, lambda: z.__setitem__((..., 0), -5.0)), ["__setitem__"]),
    "a class of a part": (lambda z: _changed(z, lambda: z[:, 1:].__setitem__((..., 7), -5.0)), ["__setitem__"]),
    "each class": (lambda z: _changed(z, lambda: z.__imul__(torch.arange(CLASSES))), []),
    "masked": (lambda z: _changed(z, lambda: z.masked_fill_(torch.arange(CLASSES) % 3 == 0, -5)), []),
    "relu": (lambda z: _changed(z, lambda: nn.ReLU(inplace=True)(z)), []),
    "elu": (lambda z: _changed(z, lambda: nn.ELU(inplace=True)(z)), []),
    "through a transposed view": (lambda z: _changed(z, lambda: z[:, 1:].transpose(1, 2)[0].mul_(2)), []),
    "mixed classes": (lambda z: _changed(z, lambda: z.copy_(z.softmax(-1) * 3)), ["softmax", OPERAND]),
    "out": (lambda z: _changed(z, lambda: torch.mul(z.detach(), 3, out=z.detach())), ["mul", "mul"]),
    "without a gradient": (lambda z: _changed(z, torch.no_grad()(lambda: z.clamp_(max=0.5))), []),
    "a view that is used alone": (lambda z: z[..., 3].mul_(2).sum(), ["__getitem__"]),
    "list": (lambda z: torch.cat([z, z]).logsumexp(-1).sum(), ["logsumexp"]),
    "over other dimensions": (lambda z: (z.mean(0).abs() + z.pow(2).sum(dim=(0, 1))).sqrt().sum(), ["sum"]),
    "hidden units that are dead": (lambda z: (z > 0).double().mean((0, 1)).lt(0.5).sum() + z.sum(), ["sum", "sum"]),
    "normed": (lambda z: (F.normalize(z, dim=1) * F.normalize(z, dim=-1)).sum(), ["normalize", OPERAND, "sum"]),
    "by position": (lambda z: (z + torch.arange(5.0)[:, None]).square().sum(), ["sum"]),
    "its gradient": (lambda z: torch.autograd.grad(z.square().sum(), z)[0].sum() + z.sum(), ["sum", "sum", "sum"]),
    "noise": (lambda z: (torch.manual_seed(0), z * torch.randn_like(z))[1].sum(), ["randn_like", "sum"]),
    "strides": (lambda z: z.sum() * z.stride(0), ["sum", "stride"]),
}


def losses_of_split_logits() -> None:
    """Checks the forms that a loss may have, and what logits are gathered for in each."""
    with tensor_group() as (group, _):
        split = ParameterSplit.even(CLASSES, group.size)
        along_last = ParameterSplit(-1, split.ranges)
        values = torch.randn(2, 5, CLASSES, generator=torch.Generator().manual_seed(3))
        for name, (compute, gathered_for) in FORMS.items():
            whole = values.clone().requires_grad_()
            own = along_last.part(values, group.rank).requires_grad_()
            gathered: list[str] = []
            group.on_gather = lambda layer, operation, g=gathered: g.append(operation)  # type: ignore[misc]
            logits, whole_logits = SplitTensor.of(own * 1, _placed(group, own.dim())), whole * 1
            assert (logits.shape, logits.dim(), len(logits), logits.dtype) == (whole.shape, 3, 2, whole.dtype)
            expected, actual = compute(whole_logits), compute(logits)
            assert type(actual) is Tensor
            expected.backward()  # type: ignore[no-untyped-call]
            actual.backward()  # type: ignore[no-untyped-call]
            assert_close = torch.testing.assert_close
            rtol = 1e-6 if name == "cast" else 1e-10
            assert_close(actual, expected, rtol=rtol, atol=rtol / 100)
            assert_close(own.grad, along_last.part(whole.grad, group.rank), rtol=rtol, atol=rtol / 100)  # type: ignore[arg-type]
            assert gathered == gathered_for, name
            if "view" not in name:
                assert_close(torch.clone(logits), whole_logits.detach(), rtol=1e-12, atol=1e-12)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    r"select in place.* of select is a view": lambda z: (z.select(-1, 0).fill_(-1), z.sum()),
    r"__getitem__ in place": lambda z: (z[..., 0].unsqueeze(0).fill_(-1), F.cross_entropy(z.flatten(0, 1), TARGET)),
    r"mul_ in place.* of unbind is a view": lambda z: (row := z.unbind(-1)[0], z.mul_(2), row),
    r"__setitem__ in place.* of diagonal is a view": lambda z: (d := z.diagonal(0, 1, 2), z.__setitem__(0, 1), d),
    r"register_hook on the output of head": lambda z: z.register_hook(print),
    r"retain_grad on the output of head": lambda z: z.retain_grad(),
    r"data_ptr on the output of head": lambda z: z.data_ptr(),
}


def _changes_that_would_be_lost(is_evaluation: bool) -> None:
    with tensor_group() as (group, _), torch.inference_mode(is_evaluation):
        split = ParameterSplit.even(CLASSES, group.size)
        for message, compute in REFUSED.items():
            own = torch.randn(2, 5, split.size(group.rank), requires_grad=True) * 1
            with pytest.raises(RuntimeError, match=message):
                compute(SplitTensor.of(own, _placed(group, 3)))


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_changes_that_would_be_lost_are_refused(world2: World, is_evaluation: bool) -> None:
    """Gathered copies were changed, and the logits were not."""
    world2.run(_changes_that_would_be_lost, is_evaluation)


HEADS = {2: 4, 4: 3}  # by the number of ranks; of 4 ranks one has none

VIEWS: dict[str, Callable[[Tensor, int], Any]] = {
    "heads": lambda x, h: x.view(2, 5, h, -1).transpose(1, 2),
    "sections": lambda x, h: [each.unflatten(-1, (h, -1)) for each in torch.cat([x, x], 0).chunk(2)],
    "merged": lambda x, h: x.reshape(2, 5, h, 6).permute(0, 2, 1, 3)[:, :, 1:].transpose(1, 2).flatten(2),
    "repeated": lambda x, h: x.view(2, 5, h, 1, 6).expand(2, 5, h, 3, 6).reshape(2, 5, 3 * h, 6),
    "halves of heads": lambda x, h: torch.cat([each * 2 for each in x.view(2, 5, h, 6).chunk(2, -1)], -1),
    "stacked": lambda x, h: torch.stack([x, -x], 1).unbind(1)[0].unsqueeze(0).squeeze(0),
    "products": lambda x, h: (y := x.view(2, 5, h, 6).transpose(1, 2)) @ y.transpose(-2, -1),
    "attention": lambda x, h: F.scaled_dot_product_attention(*[x.view(2, 5, h, 6).transpose(1, 2)] * 3),
    "per head": lambda x, h: x.view(2, 5, h, 6).softmax(-1).pow(2).mean(-1, keepdim=True),
    "normed heads": lambda x, h: F.layer_norm(x.view(2, 5, h, 6), (6,), torch.arange(6.0)),
}


def _all_views() -> None:
    with tensor_group() as (group, _):
        heads = HEADS[group.size]
        values = torch.randn(2, 5, heads * 6, generator=torch.Generator().manual_seed(3))
        split = ParameterSplit.even(heads * 6, group.size, dim=2, unit=6)
        gathered: list[str] = []
        group.on_gather = lambda layer, operation: gathered.append(operation)
        for name, compute in VIEWS.items():
            whole, own = values.clone().requires_grad_(), split.part(values, group.rank).requires_grad_()
            given = whole, SplitTensor.of(own * 1, PartLayout(split, group, "up"))
            expected, actual = ([*y] if isinstance(y := compute(x, heads), list) else [y] for x in given)
            assert not gathered, name
            assert all(isinstance(each, SplitTensor) for each in actual), name
            for one, other in zip(expected, actual, strict=True):
                weights = torch.arange(one.numel(), dtype=one.dtype).view_as(one)
                (one * weights).sum().backward(retain_graph=True)
                (torch.clone(other) * weights).sum().backward(retain_graph=True)
                assert_equal(torch.clone(other), one)
            assert_equal(gradient_of(own), split.part(gradient_of(whole), group.rank))
            gathered.clear()


@pytest.mark.parametrize("num_ranks", HEADS)
def test_views_of_parts(num_ranks: int, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(f"world{num_ranks}").run(_all_views)


class Softmax(torch.autograd.Function):
    """A user's own; its backward gets plain gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        result = (x * scale).softmax(-1)
        ctx.save_for_backward(result)
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (result,) = ctx.saved_tensors
        return ctx.scale * result * (gradient - (result * gradient).sum(-1, keepdim=True)), None


def functions_of_users_get_whole_tensors() -> None:
    """Their backward met gradients of parts beside tensors that show the whole: it failed."""
    with tensor_group() as (group, _):
        values = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(3))
        placed = _placed(group, 2)
        whole, own = values.clone().requires_grad_(), placed.split.part(values, group.rank).requires_grad_()
        before = vars(torch.autograd.Function)["apply"]
        with functions_get_whole():
            for x in (whole, SplitTensor.of(own * 1, placed)):
                (Softmax.apply(x, 2.0) * torch.arange(float(CLASSES))).sum().backward()  # type: ignore[no-untyped-call]
        assert vars(torch.autograd.Function)["apply"] is before
        assert_equal(gradient_of(own), placed.split.part(gradient_of(whole), group.rank))


def transforms_of_parts_are_refused() -> None:
    """A transform took a part for the whole tensor: norms of half of the rows, in silence; layers raised raw texts."""
    with tensor_group() as (group, _), functions_get_whole():
        layer, x = ColumnSplitLinear.of(nn.Linear(4, CLASSES), group, name="up"), torch.randn(3, 4)
        hidden, weight = layer(x), layer.weight
        transforms: dict[str, Callable[[], Any]] = {
            "vmap of a layer": lambda: vmap(layer)(x),
            "jvp of a layer": lambda: jvp(layer, (x,), (x,)),
            "gradients of samples": lambda: vmap(
                grad(lambda values, row: functional_call(layer, values, (row,)).sum()), in_dims=(None, 0)
            )({"weight": weight}, x),
            "a part": lambda: vmap(torch.sin)(hidden),
            "a weight": lambda: vmap(torch.norm)(weight),
            "a weight's gradient": lambda: grad(lambda values: values.square().sum())(weight),
            "a weight beside": lambda: vmap(lambda row: weight @ row)(x),
            "a part in jvp": lambda: jvp(torch.sin, (hidden,), (hidden,)),
        }
        words = r"a transform of torch\.func .* in (up|a layer), which is split"
        with group.showing(parts=False), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which forward mode uses
            for name, transform in transforms.items():
                with pytest.raises(RuntimeError, match=words):
                    pytest.fail(f"{name} gave {transform()}")
            with forward_ad.dual_level(), pytest.raises(RuntimeError, match="or a forward-mode derivative cannot"):
                layer(forward_ad.make_dual(x, x))
            assert_equal(vmap(torch.sum)(whole(hidden)), whole(hidden).sum(1))


def whole_operands() -> None:
    """A whole weight beside a part gets the gradients of all ranks, one along the part those of each."""
    with tensor_group() as (group, _):
        values = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(3))
        placed = _placed(group, 2)
        results = []
        for x in (values, SplitTensor.of(placed.split.part(values, group.rank), placed)):
            scale, bias = torch.ones(4, 1, requires_grad=True), torch.ones(CLASSES, requires_grad=True)
            (x * scale + bias).tanh().square().sum().backward()
            results.append([scale.grad, bias.grad])
        for one, other in zip(*results, strict=True):
            assert_equal(other, one)


@pytest.mark.parametrize(
    "check",
    [losses_of_split_logits, functions_of_users_get_whole_tensors, transforms_of_parts_are_refused, whole_operands],
)
def test_on_ranks(world2: World, check: Callable[[], None]) -> None:
    world2.run(check)
