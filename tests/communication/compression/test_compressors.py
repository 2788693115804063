"""What each compressor writes, without any process: sizes, what is lost, what is not finite."""

import pytest
import torch
from torch import Tensor

from lightning_multigpu.communication.compression.compressors import Bf16, Compressor, Int8

COMPRESSORS = [Bf16(), Int8(), Int8(chunk_size=1), Int8(chunk_size=7)]
compressors = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)


def numbers(numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()


def encoded(compressor: Compressor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What is written, and what is lost; the wire's former content shows what is left unwritten."""
    lost = values.clone()
    wire = torch.full((compressor.encoded_bytes(values.numel()),), 0xA5, dtype=torch.uint8)
    compressor.encode(lost, wire)
    return wire, lost


def decoded(compressor: Compressor, wire: Tensor, numel: int) -> Tensor:
    values = torch.full((numel,), 7.0)
    compressor.decode(wire, values)
    return values


@compressors
@pytest.mark.parametrize("numel", [1, 2, 1000, 1024, 1025, 40_000])
def test_what_was_sent_and_what_was_lost_is_what_there_was(compressor: Compressor, numel: int) -> None:
    values = numbers(numel)
    wire, lost = encoded(compressor, values)
    sent = decoded(compressor, wire, numel)
    torch.testing.assert_close(sent + lost, values, rtol=1e-6, atol=1e-7)
    assert lost.norm() < values.norm()
    added = values.clone()
    compressor.add_decoded(wire, added)
    torch.testing.assert_close(added, values + sent, rtol=1e-6, atol=1e-7)
    assert compressor.is_finite(wire, numel)
    assert torch.equal(encoded(compressor, values)[0], wire), "runs do not repeat"


@compressors
def test_zeros_stay_zeros(compressor: Compressor) -> None:
    wire, lost = encoded(compressor, torch.zeros(3000))
    assert not lost.any()
    assert not decoded(compressor, wire, 3000).any()


@compressors
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_arrives_so(compressor: Compressor, bad: float) -> None:
    for position in (0, 20_000, 39_999):
        values = numbers(40_000)
        values[position] = bad
        wire, _ = encoded(compressor, values)
        assert not compressor.is_finite(wire, 40_000)
        assert not decoded(compressor, wire, 40_000)[position].isfinite()
        total = torch.zeros(40_000)
        compressor.add_decoded(wire, total)
        assert not total[position].isfinite()


@pytest.mark.parametrize("compressor", [Int8(), Int8(chunk_size=7)], ids=repr)
def test_int8_is_half_a_step_off_at_most(compressor: Int8) -> None:
    values = numbers(10_000)
    _, lost = encoded(compressor, values)
    for chunk, error in zip(values.split(compressor.chunk_size), lost.split(compressor.chunk_size), strict=True):
        assert error.abs().max() <= chunk.abs().max() / 127 * 0.5001


@pytest.mark.parametrize("largest", [1e-45, 1e-38, 1e38])
def test_int8_of_tiny_and_huge_numbers(largest: float) -> None:
    values = torch.tensor([largest, -largest / 2, 0.0])
    wire, lost = encoded(Int8(), values)
    assert Int8().is_finite(wire, 3)
    assert lost.isfinite().all()
    assert lost.abs().max() <= max(largest / 127, 1e-37)


def test_int8_of_a_chunk_of_negative_numbers() -> None:
    wire, _ = encoded(Int8(), torch.tensor([-127.0, -1.0]))
    assert decoded(Int8(), wire, 2).tolist() == [-127.0, -1.0]


def test_bf16_keeps_the_range_of_float32() -> None:
    values = torch.tensor([1e38, 1e-38, 70_000.0])
    torch.testing.assert_close(decoded(Bf16(), encoded(Bf16(), values)[0], 3), values, rtol=0.004, atol=0)
