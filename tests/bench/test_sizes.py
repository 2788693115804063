"""Sizes as people write them."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from lightning_multigpu.bench.sizes import size_bytes, size_text

WRITTEN = {"512": 512, "512b": 512, "64k": 65536, "64 KiB": 65536, "64kB": 64000, "1.5m": 3 << 19, "1g": 1 << 30}
SHOWN = {0: "0 B", 1000: "1000 B", 1024: "1 KiB", 1536: "1536 B", 3 << 20: "3 MiB", 1 << 30: "1 GiB"}


def test_sizes_are_read_and_shown() -> None:
    assert {text: size_bytes(text) for text in WRITTEN} == WRITTEN
    assert {size: size_text(size) for size in SHOWN} == SHOWN


@pytest.mark.parametrize("text", ["", "0", "-1k", "64q", "k", "1.5", "1..5k", "inf"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="such as 64k or 1MiB"):
        size_bytes(text)
