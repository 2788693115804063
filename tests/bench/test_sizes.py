"""Sizes as people write them."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from lightning_multigpu.bench.sizes import size_bytes, size_text


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
    with pytest.raises(ArgumentTypeError, match="such as 64k or 1MiB"):
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
