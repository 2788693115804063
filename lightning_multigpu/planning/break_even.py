"""The bandwidth below which compression saves time.

For each byte of a tensor, an all-reduce over N hosts sends f = 2(N-1)/N bytes from every host. A compression by the
ratio r sends f/r, and costs c seconds of computing. At a bandwidth B it takes f/(rB) + c seconds for each byte instead
of f/B, which is less if::

    B  <  f (1 - 1/r) / c
"""

from __future__ import annotations

import math

from lightning_multigpu.planning.scaling.links import Link, ring_all_reduce_s

_SMALLEST_SHARE = 1 / 8  # of the time without compression; a smaller cost is within the noise


def break_even_bytes_per_s(cost_s_per_byte: float, ratio: float, *, world_size: int = 2) -> float:
    """The sending bandwidth of a host, in bytes/s, below which a compressed all-reduce takes less time.

    Args:
        cost_s_per_byte: seconds of compressing for each byte of the tensor.
        ratio: bytes without compression over bytes with it.
        world_size: number of hosts.

    Returns:
        0 if compression saves no bytes, infinity if it costs no time.

    Raises:
        ValueError: the cost is below 0, the ratio not above 0, or ``world_size`` below 2.
    """
    if not cost_s_per_byte >= 0:
        raise ValueError(f"cost_s_per_byte={cost_s_per_byte}: compressing takes time; pass 0 or more")
    if not ratio > 0:
        raise ValueError(f"ratio={ratio}: it is bytes without compression over bytes with it; pass more than 0")
    if world_size < 2:
        raise ValueError(f"world_size={world_size}: nothing is sent; pass 2 or more")
    saved = ring_all_reduce_s(world_size, 1.0, Link(0.0, 1.0)) * (1 - 1 / ratio)
    if saved <= 0:
        return 0.0
    return saved / cost_s_per_byte if cost_s_per_byte else math.inf


def measured_cost_s_per_byte(plain_s: float, compressed_s: float, ratio: float, num_bytes: int) -> float:
    """The cost of compressing each byte of a tensor, from two all-reduces of the tensor over the same link.

    All of the time without compression counts as sending. So the cost is rather too high, and the break-even bandwidth
    rather too low.

    Args:
        plain_s: seconds without compression.
        compressed_s: seconds with it.
        ratio: bytes without compression over bytes with it.
        num_bytes: the tensor's size.

    Returns:
        0 if unknown: on a slow link the cost is smaller than the noise of the time of sending.
    """
    cost_s = compressed_s - plain_s / ratio
    return cost_s / num_bytes if cost_s >= _SMALLEST_SHARE * plain_s else 0.0
