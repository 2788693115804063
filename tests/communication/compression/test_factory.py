"""Settings as users write them, and what is said about wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_multigpu.communication.compression import COMPRESSORS, Compressor, make_compressor
from lightning_multigpu.communication.compression.compressors import Bf16, Fp16, Int8
from lightning_multigpu.communication.compression.powersgd import PowerSGD


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("fp16", Fp16()),
        ("bf16", Bf16()),
        ("int8", Int8()),
        ({"name": "int8", "chunk_size": 64}, Int8(chunk_size=64)),
        ({"name": "powersgd", "rank": 2, "start_step": 0}, PowerSGD(rank=2, start_step=0)),
        (Int8(64), Int8(chunk_size=64)),
    ],
)
def test_names_and_mappings(setting: Any, expected: Compressor) -> None:
    assert make_compressor(setting) == expected


def test_every_compressor_has_its_name_and_says_its_options() -> None:
    assert set(COMPRESSORS) == {"fp16", "bf16", "int8", "powersgd"}
    for name in COMPRESSORS:
        assert make_compressor(name).name == name
    assert repr(make_compressor("powersgd")) == "PowerSGD(rank=4, start_step=10)"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("int4", r"compression='int4' is unknown: use one of 'fp16', .*'powersgd'\. Did you mean 'int8'\?"),
        ("", r"compression='' is unknown: use one of"),
        (8, r"compression=8 is a int: use a name or a mapping"),
        ({"rank": 4}, r"lacks 'name'"),
        ({"name": "powersgd", "ranks": 4}, r"no option 'ranks': it has 'rank', 'start_step'\. Did you mean 'rank'\?"),
        ({"name": "bf16", "rank": 4}, r"no option 'rank': it has no options"),
        ({"name": "int8", "chunk_size": 0}, r"chunk_size=0: .*integer of 1 or more"),
        ({"name": "int8", "chunk_size": 1.5}, r"chunk_size=1\.5: "),
        ({"name": "int8", "chunk_size": True}, r"chunk_size=True: "),
        ({"name": "powersgd", "rank": 0}, r"rank=0: .*integer of 1 or more"),
        ({"name": "powersgd", "start_step": -1}, r"start_step=-1: .*integer of 0 or more"),
    ],
)
def test_wrong_settings_are_named(setting: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_compressor(setting)
