"""Sizes as people write them, and the spread of measurements."""

from __future__ import annotations

import pytest

from lightning_multigpu.bench.sizes import geometric_sizes, size_bytes, size_text
from lightning_multigpu.bench.spread import Spread


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512", 512),
        ("512b", 512),
        ("64k", 65536),
        ("64 KiB", 65536),
        ("64kB", 64000),
        ("1MiB", 1 << 20),
        ("1.5m", 3 << 19),
        ("2GB", 2 * 10**9),
        ("1g", 1 << 30),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1k", "64q", "k", "1.5", "1..5k", "inf"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="such as 64k or 1MiB"):
        size_bytes(text)


def test_size_text() -> None:
    assert [size_text(size) for size in (0, 1000, 1024, 1536, 3 << 20, 1 << 30)] == [
        "0 B",
        "1000 B",
        "1 KiB",
        "1536 B",
        "3 MiB",
        "1 GiB",
    ]


def test_geometric_sizes() -> None:
    assert geometric_sizes(1024, 65536, 4) == [1024, 4096, 16384, 65536]
    assert geometric_sizes(1024, 65535, 4) == [1024, 4096, 16384]
    assert geometric_sizes(7, 7, 2) == [7]
    with pytest.raises(ValueError, match="--max-size=1 is below --min-size=2"):
        geometric_sizes(2, 1, 2)


def test_spread() -> None:
    spread = Spread.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert spread.as_json() == {"median": 3.0, "p25": 2.0, "p75": 4.0, "min": 1.0, "max": 5.0, "count": 5}
    assert spread.scaled(10).as_json() == {"median": 30, "p25": 20, "p75": 40, "min": 10, "max": 50, "count": 5}
