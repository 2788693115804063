"""The average over the ranks of gradients that are there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.tensors import alike, apply_flat

_FLAT_BYTES = 32 << 20  # a flat copy of all parameters would double the memory of the model


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], group: MeteredGroup) -> None:
    """Makes each ``.grad`` the average over the ranks; a rank without one has zeros. A collective.

    It stays None where no rank has one; a sparse one becomes dense.
    """
    listed = list(parameters)
    has = torch.tensor([parameter.grad is not None for parameter in listed], dtype=torch.int32)
    dense = []
    for parameter, is_there in zip(listed, group.all_reduce(has, "max").tolist(), strict=True):
        if is_there:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
            dense.append(parameter.grad)
    for members in alike(dense, full_bytes=_FLAT_BYTES):
        apply_flat(lambda flat: flat.copy_(group.all_reduce(flat, "mean")), members)
