"""Logits that are split over the vocabulary, and their cross-entropy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_multigpu.engine.tensor_split.cross_entropy import split_cross_entropy
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit
from lightning_multigpu.engine.tensor_split.split_logits import LogitsLayout, SplitLogits
from tests.engine.tensor_split.shared import assert_equal, counts, tensor_group
from tests.world import World

CLASSES, ROWS = 11, 15


def _cross_entropy(num_classes: int, masked: int, reduction: str, label_smoothing: float) -> dict[tuple[str, str], int]:
    with tensor_group() as (group, meter):
        torch.manual_seed(2)
        # Large logits: without the largest of all ranks their exponentials are inf.
        logits = torch.randn(ROWS, num_classes) * 800
        logits[:, num_classes - masked :] = -torch.inf
        target = torch.randint(num_classes - masked, (ROWS,))
        target[3] = -100
        split = ParameterSplit.even(num_classes, group.size)
        whole = logits.clone().requires_grad_()
        own = ParameterSplit(1, split.ranges).part(logits, group.rank).requires_grad_()
        weights = torch.arange(1.0, ROWS + 1)
        options = {"reduction": reduction, "label_smoothing": label_smoothing}
        expected = F.cross_entropy(whole, target, **options)  # type: ignore[arg-type]
        actual = split_cross_entropy(own, target, group, split, **options)  # type: ignore[arg-type]
        for loss in (expected, actual):
            (loss * weights if reduction == "none" else loss * 3).sum().backward()
        collectives = counts(meter)
        assert_equal(actual, expected)
        assert whole.grad is not None
        assert own.grad is not None
        assert_equal(own.grad, ParameterSplit(1, split.ranges).part(whole.grad, group.rank))
        return collectives


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(world2: World, reduction: str, label_smoothing: float) -> None:
    for collectives in world2.run(_cross_entropy, CLASSES, 0, reduction, label_smoothing):
        assert collectives == {("all_gather", "tensor cross_entropy"): 1}


def test_a_rank_without_classes(world4: World) -> None:
    world4.run(_cross_entropy, 3, 0, "mean", 0.1)


def test_a_rank_whose_classes_are_masked(world2: World) -> None:
    """Logits of -inf, for a vocabulary that is padded: their rank told nan, and the loss was nan."""
    world2.run(_cross_entropy, CLASSES, 7, "mean", 0.0)


def _refused() -> None:
    with tensor_group() as (group, _):
        split = ParameterSplit.even(CLASSES, group.size)
        logits = torch.zeros(2, split.size(group.rank))
        for target, options, error, message in (
            (torch.tensor([0, CLASSES]), {}, IndexError, f"there are {CLASSES} classes"),
            (torch.zeros(3, dtype=torch.long), {}, ValueError, r"give \(rows, classes\), \(rows\)"),
            (torch.tensor([0, 1]), {"reduction": "max"}, ValueError, "reduction='max'"),
        ):
            with pytest.raises(error, match=message):
                split_cross_entropy(logits, target, group, split, **options)  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused(world2: World) -> None:
    world2.run(_refused)


TARGET = torch.randint(CLASSES, (2, 5), generator=torch.Generator().manual_seed(1))
TARGET[0, 1] = -100


def _changed(z: Tensor, change: Callable[[], object]) -> Tensor:
    change()
    return F.cross_entropy(z.flatten(0, 1), TARGET.flatten())


FORMS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "view": (lambda z: F.cross_entropy(z.view(-1, CLASSES), TARGET.view(-1)), []),
    "size": (lambda z: F.cross_entropy(z.view(-1, z.size(-1)), TARGET.view(-1)), []),
    "sum": (lambda z: F.cross_entropy(z.reshape(z.shape[0] * z.shape[1], -1), TARGET.view(-1), reduction="sum"), []),
    "flatten": (lambda z: F.cross_entropy(z.flatten(0, 1), TARGET.flatten()), []),
    "shifted": (
        lambda z: F.cross_entropy(z[..., :-1, :].contiguous().view(-1, CLASSES), TARGET[..., 1:].reshape(-1)),
        [],
    ),
    "cast": (lambda z: F.cross_entropy(z[:, :-1].float().double().reshape(-1, CLASSES), TARGET[:, 1:].flatten()), []),
    "module": (lambda z: nn.CrossEntropyLoss(label_smoothing=0.1)(z.flatten(0, 1) / 2.0, TARGET.flatten()), []),
    "none": (lambda z: F.cross_entropy(z.flatten(0, 1), TARGET.flatten(), reduction="none").mean(), []),
    "transposed": (lambda z: F.cross_entropy(z.transpose(1, 2), TARGET), ["transpose"]),
    "weights": (
        lambda z: F.cross_entropy(z.flatten(0, 1), TARGET.flatten(), weight=torch.arange(1.0, CLASSES + 1)),
        ["cross_entropy"],
    ),
    "times a tensor": (lambda z: (z * torch.arange(CLASSES)).sum() + z.softmax(-1).pow(2).sum(), ["mul", "softmax"]),
    "some classes": (lambda z: z[..., 3].sum() + z[0, 1, 2:5].sum(), ["__getitem__", "__getitem__"]),
    "log-softmax": (lambda z: F.nll_loss(F.log_softmax(z.view(-1, CLASSES), 1), TARGET.view(-1)), ["log_softmax"]),
    "scaled in place": (lambda z: _changed(z, lambda: z.mul_(3).div_(2)), []),
    "divided in place": (lambda z: _changed(z, lambda: z.__itruediv__(2)), []),
    "a class": (lambda z: _changed(z, lambda: z.__setitem__((..., 0), -5.0)), ["__setitem__"]),
    "a class of a part": (lambda z: _changed(z, lambda: z[:, 1:].__setitem__((..., 7), -5.0)), ["__setitem__"]),
    "each class": (lambda z: _changed(z, lambda: z.__imul__(torch.arange(CLASSES))), ["mul_"]),
    "masked": (lambda z: _changed(z, lambda: z.masked_fill_(torch.arange(CLASSES) % 3 == 0, -5)), ["masked_fill_"]),
    "relu": (lambda z: _changed(z, lambda: nn.ReLU(inplace=True)(z)), ["relu"]),
    "mixed classes": (lambda z: _changed(z, lambda: z.copy_(z.softmax(-1) * 3)), ["softmax", "copy_"]),
    "out": (lambda z: _changed(z, lambda: torch.mul(z.detach(), 3, out=z.detach())), ["mul", "mul"]),
    "without a gradient": (lambda z: _changed(z, torch.no_grad()(lambda: z.clamp_(max=0.5))), ["clamp_"]),
    "a view that is used alone": (lambda z: z[..., 3].mul_(2).sum(), ["__getitem__"]),
    "list": (lambda z: torch.cat([z, z]).logsumexp(-1).sum(), ["cat", "cat"]),
}


def _all_forms(forms: list[str]) -> dict[str, list[str]]:
    """Checks the forms that a loss may have, and returns what logits were gathered for in each."""
    seen: dict[str, list[str]] = {}
    with tensor_group() as (group, _):
        split = ParameterSplit.even(CLASSES, group.size)
        along_last = ParameterSplit(-1, split.ranges)
        values = torch.randn(2, 5, CLASSES, generator=torch.Generator().manual_seed(3))
        for name in forms:
            compute, _ = FORMS[name]
            whole = values.clone().requires_grad_()
            own = along_last.part(values, group.rank).requires_grad_()
            gathered: list[str] = []
            layout = LogitsLayout(group, split, "head", lambda layer, operation, g=gathered: g.append(operation))  # type: ignore[misc]
            logits, whole_logits = SplitLogits.of(own * 1, layout), whole * 1
            assert (logits.shape, logits.dim(), len(logits), logits.dtype) == (whole.shape, 3, 2, whole.dtype)
            expected, actual = compute(whole_logits), compute(logits)
            assert type(actual) is Tensor
            expected.backward()  # type: ignore[no-untyped-call]
            actual.backward()  # type: ignore[no-untyped-call]
            assert_close = torch.testing.assert_close
            rtol = 1e-6 if name == "cast" else 1e-10
            assert_close(actual, expected, rtol=rtol, atol=rtol / 100)
            assert_close(own.grad, along_last.part(whole.grad, group.rank), rtol=rtol, atol=rtol / 100)  # type: ignore[arg-type]
            seen[name] = list(gathered)
            if "view" not in name:
                assert_close(torch.clone(logits), whole_logits.detach(), rtol=1e-12, atol=1e-12)
    return seen


def test_losses_of_split_logits(world2: World) -> None:
    for seen in world2.run(_all_forms, list(FORMS)):
        assert seen == {name: gathered for name, (_, gathered) in FORMS.items()}


REFUSED: dict[str, Callable[[Tensor], object]] = {
    r"select in place.* what select has given": lambda z: (z.select(-1, 0).fill_(-1), z.sum()),
    r"transpose in place.* what transpose has given": lambda z: (z[:, 1:].transpose(1, 2)[0].mul_(2), z.float()),
    r"__getitem__ in place": lambda z: (z[..., 0].unsqueeze(0).fill_(-1), F.cross_entropy(z.flatten(0, 1), TARGET)),
    r"mul_ in place.* what unbind has given": lambda z: (row := z.unbind(-1)[0], z.mul_(2), row),
    r"__setitem__ in place.* what t has given": lambda z: (row := z[0].t(), z.__setitem__((..., 0), 1), row),
    r"register_hook on the logits of head": lambda z: z.register_hook(print),
    r"retain_grad on the logits of head": lambda z: z.retain_grad(),
}


def _changes_that_would_be_lost(is_evaluation: bool) -> None:
    with tensor_group() as (group, _), torch.inference_mode(is_evaluation):
        split = ParameterSplit.even(CLASSES, group.size)
        for message, compute in REFUSED.items():
            own = torch.randn(2, 5, split.size(group.rank), requires_grad=True) * 1
            with pytest.raises(RuntimeError, match=message):
                compute(SplitLogits.of(own, LogitsLayout(group, split, "head")))


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_changes_that_would_be_lost_are_refused(world2: World, is_evaluation: bool) -> None:
    """Gathered copies were changed, and the logits were not."""
    world2.run(_changes_that_would_be_lost, is_evaluation)
