"""Links: the time of a transfer as a function of its bytes, and of collectives as steps over links.

With N ranks that have S bytes each, and a link of latency a and bandwidth B:

==================  =================================================  ====================================
operation           seconds                                            source
==================  =================================================  ====================================
ring all-reduce     2 (N-1) a + 2 (N-1)/N S/B                          Patarasuk and Yuan 2009
over n hosts        inside: as above with the ranks of a host;         Jia et al. 2018, arXiv:1807.11205,
                    between: as above with n, by the host's link       section 3.3
to owners and back  half of an all-reduce each                         Rajbhandari et al. 2020, ZeRO,
                                                                       arXiv:1910.02054, section 7
parameter servers   (s (n-1) + K - s) d (a + S/K / B) for n hosts of   Jiang et al. 2020, BytePS (OSDI),
                    d ranks, of which the fullest has s of K servers   section 4.1
==================  =================================================  ====================================

The assumptions: both directions of a link work at the same time, hosts are joined without a bottleneck between them,
and nothing else uses the links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

Point = tuple[int, float]
"""Bytes, and the measured seconds."""


@dataclass(frozen=True)
class Link:
    """The time of a transfer: ``latency_s`` and a time for each byte, which changes at the bend.

    Attributes:
        latency_s: seconds that even the smallest transfer takes.
        s_per_byte: seconds of each byte up to the bend.
        bend_bytes: where caches or segments end; 0 without a bend.
        far_s_per_byte: seconds of each byte beyond it.
        residual: the median of |measured - fitted| / measured over the points of the fit.
    """

    latency_s: float
    s_per_byte: float
    bend_bytes: int = 0
    far_s_per_byte: float = 0.0
    residual: float = 0.0

    def seconds(self, size_bytes: float) -> float:
        if not self.bend_bytes or size_bytes <= self.bend_bytes:
            return self.latency_s + size_bytes * self.s_per_byte
        beyond = (size_bytes - self.bend_bytes) * self.far_s_per_byte
        return self.latency_s + self.bend_bytes * self.s_per_byte + beyond

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth for large transfers."""
        slope = self.far_s_per_byte if self.bend_bytes else self.s_per_byte
        return 1 / slope if slope else float("inf")

    def latency_times(self, factor: float) -> Link:
        return replace(self, latency_s=self.latency_s * factor)


INSTANT = Link(0.0, 0.0)


def fitted(points: Sequence[Point]) -> Link:
    """The link with the smallest relative errors: a straight line, or two that meet at one of the sizes.

    Raises:
        ValueError: there are fewer than two points.
    """
    points = sorted(points)
    if len(points) < 2:
        raise ValueError(f"{len(points)} measured sizes: a latency and a bandwidth need 2 or more")
    found = [_line(points)]
    for index in range(1, len(points) - 1):
        near = _line(points[: index + 1])
        bend, _ = points[index]
        at_bend = near.seconds(bend)
        beyond = points[index + 1 :]
        weights = [((size - bend) / seconds, (seconds - at_bend) / seconds) for size, seconds in beyond]
        far = max(0.0, sum(x * y for x, y in weights) / sum(x * x for x, _ in weights))
        found.append(Link(near.latency_s, near.s_per_byte, bend, far))
    best = min(found, key=lambda link: sum(_error(link, point) ** 2 for point in points))
    errors = sorted(abs(_error(best, point)) for point in points)
    return Link(best.latency_s, best.s_per_byte, best.bend_bytes, best.far_s_per_byte, errors[len(errors) // 2])


def _line(points: Sequence[Point]) -> Link:
    """Least squares of the relative errors, with a latency and a slope of 0 or more."""
    rows = [(1 / seconds, size / seconds) for size, seconds in points]
    aa, ab, bb = (sum(x[i] * x[j] for x in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(x[i] for x in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    latency = (a * bb - b * ab) / determinant if determinant else 0.0
    slope = (b * aa - a * ab) / determinant if determinant else b / bb
    if latency < 0:
        return Link(0.0, b / bb)
    return Link(latency, slope) if slope >= 0 else Link(a / aa, 0.0)


def _error(link: Link, point: Point) -> float:
    size, seconds = point
    return link.seconds(size) / seconds - 1


def ring_all_reduce_s(num_ranks: int, size_bytes: float, link: Link) -> float:
    """A ring all-reduce: N - 1 steps of reduce-scatter and N - 1 of all-gather, of S / N bytes each."""
    return 2 * (num_ranks - 1) * link.seconds(size_bytes / num_ranks)


def all_reduce_s(nodes: int, devices: int, size_bytes: float, inside: Link, between: Link) -> float:
    """An all-reduce inside each host, and between the hosts, whose link all ranks of a host share."""
    seconds = ring_all_reduce_s(devices, size_bytes, inside) if devices > 1 else 0.0
    return seconds + (ring_all_reduce_s(nodes, size_bytes, between) if nodes > 1 else 0.0)


def servers_s(nodes: int, devices: int, size_bytes: float, servers: int, inside: Link, between: Link) -> float:
    """Gradients of all ranks to K servers on the ranks' hosts, while the weights of the bucket before come back.

    The busiest link decides, which is that of the host with most servers. Into it come the parts of the other hosts'
    ranks, and the weights of the other servers for its own ranks; as much leaves it. Ranks of a server's host use the
    host's memory.
    """
    share = size_bytes / servers
    if nodes == 1:
        return devices * inside.seconds(share)
    most = -(-servers // nodes)
    return devices * (most * (nodes - 1) + servers - most) * between.seconds(share)
