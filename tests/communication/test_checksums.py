"""Checksums see what plain sums do not: the order of elements, and signs."""

import pytest
import torch

from lightning_multigpu.communication.checksums import checksums, device_checksum


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_checksums_see_the_order_of_elements_and_signs(dtype: torch.dtype) -> None:
    """They were sums: weights that a hook on worker 0 had permuted were not sent, and the step took the old ones.

    Of an even number of highest bits that change, a sum of words does not tell.
    """
    orders = ([1.0, -1.0, 2.0], [-1.0, 1.0, 2.0], [2.0, -1.0, 1.0]), ([1.0, 2, 2, 1], [2.0, 1, 1, 2])
    whole = torch.zeros(2**21 + 3, dtype=dtype)
    whole[: 2**20] = 1
    weight = (10 * torch.randn(4 * 509, 512, generator=torch.Generator().manual_seed(0))).to(dtype)
    every_other = torch.tensor([1, -1], dtype=dtype).repeat(256)
    for tensors in (
        *[[torch.tensor(order, dtype=dtype) for order in alike] for alike in orders],
        [whole, torch.cat([whole[2**20 : 2**21], whole[: 2**20], whole[2**21 :]])],
        [weight, -weight, weight * every_other, -weight * every_other, weight.roll(1, 0), weight.flip(0)],
    ):
        assert len({*checksums(tensors)}) == len(tensors)
        assert len({device_checksum(tensor).item() for tensor in tensors}) == len(tensors)
