"""Settings as users write them, and what is said about wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_multigpu.communication.compression import Compressor, make_compressor
from lightning_multigpu.communication.compression.compressors import Bf16, Int8


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("bf16", Bf16()),
        ("int8", Int8()),
        ({"name": "int8", "chunk_size": 64}, Int8(chunk_size=64)),
        (Int8(64), Int8(chunk_size=64)),
    ],
)
def test_names_and_mappings(setting: Any, expected: Compressor) -> None:
    assert make_compressor(setting) == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("int4", r"compression='int4' is unknown: use one of 'bf16', 'int8'\. Did you mean 'int8'\?"),
        ("", r"compression='' is unknown: use one of"),
        (8, r"compression=8 is a int: use a name or a mapping"),
        ({"rank": 4}, r"lacks 'name'"),
        ({"name": "int8", "chunk": 4}, r"no option 'chunk': it has 'chunk_size'\. Did you mean 'chunk_size'\?"),
        ({"name": "bf16", "rank": 4}, r"no option 'rank': it has no options"),
        ({"name": "int8", "chunk_size": 0}, r"chunk_size=0: .*integer of 1 or more"),
        ({"name": "int8", "chunk_size": 1.5}, r"chunk_size=1\.5: "),
        ({"name": "int8", "chunk_size": True}, r"chunk_size=True: "),
    ],
)
def test_wrong_settings_are_named(setting: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_compressor(setting)
