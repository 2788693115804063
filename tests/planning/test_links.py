"""Links and collectives, against cases worked by hand."""

from __future__ import annotations

import pytest

from lightning_multigpu.planning.scaling.links import (
    Link,
    all_reduce_s,
    fitted,
    ring_all_reduce_s,
    servers_s,
)

LINK = Link(1e-3, 1e-6)  # 1 ms, and 1 us a byte
SLOW = Link(2e-3, 1e-5)


def test_a_line_is_found_again() -> None:
    points = [(size, LINK.seconds(size)) for size in (10, 1_000, 100_000)]
    found = fitted(points)
    assert found.latency_s == pytest.approx(1e-3)
    assert found.s_per_byte == pytest.approx(1e-6)
    assert found.residual == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("bend_bytes", [100, 1_000])
def test_a_bend_is_found_where_bytes_become_dearer(bend_bytes: int) -> None:
    bent = Link(1e-3, 1e-6, bend_bytes, 3e-6)
    found = fitted([(size, bent.seconds(size)) for size in (10, 100, 1_000, 10_000)])
    assert found.bend_bytes == bend_bytes
    assert found.bytes_per_s == pytest.approx(1 / 3e-6)
    assert found.residual == pytest.approx(0, abs=1e-9)
    assert bent.seconds(2_000) == pytest.approx(1e-3 + 1e-6 * bend_bytes + 3e-6 * (2_000 - bend_bytes))


def test_neither_latency_nor_slope_is_negative() -> None:
    assert fitted([(10, 1e-6), (1_000, 2e-3)]).latency_s == 0
    assert fitted([(10, 2e-3), (1_000, 1e-3)]).s_per_byte == 0


def test_one_size_is_no_line() -> None:
    with pytest.raises(ValueError, match="1 measured sizes: a latency and a bandwidth need 2 or more"):
        fitted([(10, 1.0)])


def test_a_ring_of_four_has_six_steps_of_a_quarter() -> None:
    assert ring_all_reduce_s(4, 4_000, LINK) == pytest.approx(6 * (1e-3 + 1e-3))


def test_hosts_reduce_inside_and_then_between() -> None:
    inside, between = 2 * (1e-3 + 2e-3), 2 * (2e-3 + 2e-2)
    assert all_reduce_s(2, 2, 4_000, LINK, SLOW) == pytest.approx(inside + between)
    assert all_reduce_s(1, 1, 4_000, LINK, SLOW) == 0


def test_the_busiest_link_of_servers_decides() -> None:
    # One server on the first of two hosts: the other host's two ranks send all of theirs to it.
    assert servers_s(2, 2, 1_000, 1, LINK, SLOW) == pytest.approx(2 * (2e-3 + 1_000 * 1e-5))
    # A server on each host: half of the other's two ranks' gradients come to a host, and half of its own two's weights.
    assert servers_s(2, 2, 1_000, 2, LINK, SLOW) == pytest.approx((2 + 2) * (2e-3 + 500 * 1e-5))
    assert servers_s(1, 2, 1_000, 2, LINK, SLOW) == pytest.approx(2 * (1e-3 + 500 * 1e-6))
