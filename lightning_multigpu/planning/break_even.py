"""The bandwidth below which a compression pays.

Of each byte of a tensor, an all-reduce over N hosts sends f = 2(N-1)/N from every host. A compression that makes bytes
r times fewer sends f/r, and costs c seconds of computing. At a bandwidth B it takes f/(rB) + c seconds a byte in place
of f/B, which is less where::

    B  <  f (1 - 1/r) / c
"""

from __future__ import annotations

import math

_SMALLEST_SHARE = 1 / 8  # of the time without compression; below it is the noise of both times


def break_even_bytes_per_s(cost_s_per_byte: float, ratio: float, *, world_size: int = 2) -> float:
    """The bandwidth in bytes/s, of what a host sends, below which a compressed all-reduce takes less time.

    Args:
        cost_s_per_byte: seconds that compressing costs for each byte of the tensor.
        ratio: bytes without compression over bytes with it.
        world_size: hosts that reduce among themselves.

    Returns:
        0 where nothing is saved, infinity where compressing costs nothing.

    Raises:
        ValueError: the cost is below 0, the ratio not above 0, or ``world_size`` below 2.
    """
    if not cost_s_per_byte >= 0:
        raise ValueError(f"cost_s_per_byte={cost_s_per_byte}: compressing takes time; pass 0 or more")
    if not ratio > 0:
        raise ValueError(f"ratio={ratio}: it is bytes without compression over bytes with it; pass more than 0")
    if world_size < 2:
        raise ValueError(f"world_size={world_size}: nothing is sent; pass 2 or more")
    saved = 2 * (world_size - 1) / world_size * (1 - 1 / ratio)
    if saved <= 0:
        return 0.0
    return saved / cost_s_per_byte if cost_s_per_byte else math.inf


def measured_cost_s_per_byte(plain_s: float, compressed_s: float, ratio: float, num_bytes: int) -> float:
    """The cost of compressing each byte of a tensor, from two all-reduces of the tensor over the same link.

    All of the time without compression counts as sending, so that the cost is rather too high, and a break-even from it
    rather too low.

    Args:
        plain_s: seconds without compression.
        compressed_s: seconds with it.
        ratio: bytes without compression over bytes with it.
        num_bytes: of the tensor.

    Returns:
        0 where it cannot be told: on a slow link it is little against the time of sending, which varies more.
    """
    cost_s = compressed_s - plain_s / ratio
    return cost_s / num_bytes if cost_s >= _SMALLEST_SHARE * plain_s else 0.0
