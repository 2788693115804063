"""Micro-batches: parts of a batch along its samples, their weights, and whether their losses add up.

With weights w and losses l of the micro-batches, the loss of a batch is sum(w l). That equals the loss of the whole
batch if the loss is a mean or a sum over what the weights count. No weights fit if the loss compares the samples of a
batch with each other.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_multigpu.engine.batch_size import leading_size, tensors_in
from lightning_multigpu.engine.data_parallel.agreement import LossReduction

_HASHED_BYTES = 1 << 20


def num_micro_batches_of(batch: Any, wanted: int) -> int:
    """``wanted``, at most the number of samples in the batch; 1 if no samples are found."""
    size = leading_size(batch)
    return max(1, min(wanted, size)) if size is not None else 1


_WHOLE = "num_micro_batches=1 (under dp devices=1)"


def split_batch(batch: Any, num_parts: int) -> list[Any]:
    """The batch in ``num_parts`` parts whose sizes differ by 1 at most, larger ones first; views, not copies.

    Tensors are cut along their first dimension, and lists of tensorless entries if they have one entry for each sample.
    Numbers, strings, None and tensors without dimensions go to every part.

    Args:
        batch: nested mappings, sequences and dataclasses of tensors.
        num_parts: at most the number of samples.

    Raises:
        ValueError: the first dimension of a tensor is not the number of samples, an object cannot be cut, or the batch
            is a list of samples.
    """
    if num_parts == 1:
        return [batch]
    size = leading_size(batch)
    assert size is not None
    refuse_list_of_samples(batch)
    bounds = [part.tolist() for part in torch.arange(size).tensor_split(num_parts)]
    return [_cut(batch, slice(part[0], part[-1] + 1), size, "batch") for part in bounds]


def refuse_list_of_samples(batch: Any) -> None:
    """Raises ValueError for a list of containers of one class whose leaves are not all tensors with as many samples."""
    if not isinstance(batch, list) or len({type(entry) for entry in batch}) != 1 or not _is_container(batch[0]):
        return
    sizes = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim else None for leaf in tree_leaves(batch)}
    if None in sizes or len(sizes) > 1:
        raise ValueError(
            f"the batch is a list of {len(batch)} samples ({type(batch[0]).__name__} each), whose tensors have no "
            f"dimension of samples to be cut into parts along: stack them in collate_fn, or use {_WHOLE}"
        )


def moved(batch: Any, source: int, target: int) -> Any:
    """The batch with dimension ``source`` of its tensors at ``target``; views. Tensors of fewer dimensions stay."""
    if source == target:
        return batch
    if isinstance(batch, Tensor):
        return batch.movedim(source, target) if batch.ndim > max(source, target) else batch
    return _rebuilt(batch, lambda entry, place: moved(entry, source, target)) if _is_container(batch) else batch


def samples_of(batch: Any, samples: list[int]) -> Any:
    """A batch with copies of these samples, in this order. Raises as :func:`split_batch`."""
    size = leading_size(batch)
    assert size is not None
    return _cut(batch, samples, size, "batch")


def first_part(batch: Any, wanted: int) -> Any:
    """A copy of the first of ``wanted`` parts; a batch with fewer samples has one part a sample.

    A view would keep the whole batch in memory.
    """
    return cloned(split_batch(batch, num_micro_batches_of(batch, wanted))[0])


def weights_of(parts: Sequence[Any], loss_reduction: LossReduction) -> list[float]:
    """The weight of each part's loss in the loss of the whole batch.

    For means over samples a part of n of N samples has the weight n/N; for sums, 1; for a function, its value for the
    part divided by the sum over all parts. If that sum is 0, all parts have equal weights.

    Raises:
        ValueError: the function returns a value that is negative or not finite.
    """
    if loss_reduction == "sum":
        return [1.0] * len(parts)
    if callable(loss_reduction):
        weights = [float(loss_reduction(part)) for part in parts]
        for weight in weights:
            if not (weight >= 0 and math.isfinite(weight)):
                raise ValueError(
                    f"loss_reduction returned {weight} for a micro-batch; it must return the micro-batch's weight, a "
                    "finite number of 0 or more"
                )
    else:
        weights = [float(leading_size(part) or 1) for part in parts]
    total = sum(weights)
    return [weight / total if total else 1 / len(parts) for weight in weights]


def combined_loss(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The loss of a batch, in the shape of a micro-batch's loss.

    A micro-batch of weight 0 is left out: its loss is a mean over nothing, which is NaN.
    """
    total = sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)
    assert isinstance(total, Tensor)
    return total


def disagreement(losses: Sequence[float], parts: Sequence[Any], loss_reduction: LossReduction, rtol: float) -> str:
    """A message if the losses of micro-batches do not add up to the loss of their batch; empty if they do.

    The difference is relative to the loss or to the sum of the parts' magnitudes, whichever is larger: parts may
    cancel. Parts of weight 0 are left out: theirs may be means over nothing.

    Args:
        losses: that of the batch, and those of its parts.
        rtol: the relative difference that rounding explains.
    """
    whole, *rest = losses

    def combined(reduction: LossReduction) -> tuple[float, float]:
        """The loss of the batch from those of its parts, and the relative difference."""
        terms = [loss * weight for loss, weight in zip(rest, weights_of(parts, reduction), strict=True) if weight]
        return sum(terms), abs(whole - sum(terms)) / (max(abs(whole), sum(map(abs, terms))) or 1.0)

    found, difference = combined(loss_reduction)
    if difference <= rtol:
        return ""
    fix = (
        "If it is a mean over something else than samples, pass loss_reduction=a function from a batch to its weight "
        "(the number of targets that are not ignored, for example). A loss that compares samples of a batch with each "
        "other cannot be cut: pass num_micro_batches=1"
    )
    known: tuple[LossReduction, ...] = ("sum", "mean")
    for other in known:
        fix = f"With loss_reduction={other!r} both agree; pass that" if combined(other)[1] <= rtol else fix
    given = getattr(loss_reduction, "__name__", "a function") if callable(loss_reduction) else repr(loss_reduction)
    return (
        f"the loss of a batch is {whole:.10g} as a whole, and {found:.10g} in {len(rest)} micro-batches under "
        f"loss_reduction={given} (relative difference {difference:.2g}, rounding explains {rtol:.0e}): training would "
        f"follow other gradients than one device's. {fix}"
    )


def signature_of(batch: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of the tensors of a batch, in order."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(batch))


def checksum_of(batch: Any) -> int:
    """A checksum of the batch's shapes, dtypes, and about 1 MiB of each tensor."""
    checksum = zlib.crc32(repr(signature_of(batch)).encode())
    for tensor in tensors_in(batch):
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.nbytes // _HASHED_BYTES)
        sample = flat[::step].contiguous().cpu().view(torch.uint8)
        checksum = zlib.crc32(sample.numpy().tobytes(), checksum)
    return checksum


def _cut(value: Any, samples: slice | list[int], size: int, where: str) -> Any:
    if isinstance(value, Tensor):
        if value.ndim == 0:
            return value
        if value.shape[0] != size:
            raise ValueError(
                f"{where} has the shape {tuple(value.shape)}, and the batch has {size} samples: its first dimension "
                f"must be {size} to be cut into parts; bring it into the module as a buffer, pass batch_dim to a "
                f"pipeline where another dimension counts the samples (1 for time-first batches), or use {_WHOLE}"
            )
        # .data has its own version counter: autograd counts writes, and a step may change its micro-batch in place.
        return value[samples].data
    if isinstance(value, list) and len(value) == size and next(tensors_in(value), None) is None:
        return value[samples] if isinstance(samples, slice) else [value[sample] for sample in samples]
    if _is_container(value):
        return _rebuilt(value, lambda entry, place: _cut(entry, samples, size, where + place))
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return value
    raise ValueError(
        f"{where} is a {type(value).__name__}, which cannot be cut into parts: use tensors in dictionaries, "
        f"lists, tuples or dataclasses, or {_WHOLE}"
    )


def cloned(value: Any) -> Any:
    """The batch with copies of its tensors; containers are new, other objects the same."""
    if isinstance(value, Tensor):
        return value.clone()
    return _rebuilt(value, lambda entry, place: cloned(entry)) if _is_container(value) else value


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) or (is_dataclass(value) and not isinstance(value, type))


def _rebuilt(value: Any, change: Callable[[Any, str], Any]) -> Any:
    """A container like ``value``; ``change`` is called with each entry and its place and returns the new entry.

    A dataclass is copied, so that its ``__init__`` and ``__post_init__`` do not run again.
    """
    if isinstance(value, Mapping):
        entries = {key: change(entry, f"[{key!r}]") for key, entry in value.items()}
        return entries if type(value) is dict else type(value)(entries)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        parts = [change(entry, f"[{index}]") for index, entry in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    new = copy.copy(value)
    for field in fields(value):
        object.__setattr__(new, field.name, change(getattr(value, field.name), f".{field.name}"))
    return new
