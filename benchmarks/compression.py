"""Costs of compression: encoding and decoding on one thread.

    python -m benchmarks.compression [--rounds 7] [--settings bf16 int8]

Medians of processor time. What it gains between hosts, ``bench collectives`` and ``bench strategies`` tell.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.heading import heading
from lightning_multigpu.communication.compression import make_compressor
from lightning_multigpu.communication.compression.compressors import Compressor
from lightning_multigpu.communication.compression.owner_summed import DEFAULT_SEGMENT_ELEMENTS

SETTINGS = ("bf16", "int8")
SIZES_MB = (1, 4, 25)


def median_ms(function: Callable[[], Any], rounds: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """After two calls that do not count."""
    samples = []
    for index in range(rounds + 2):
        start = clock()
        function()
        if index >= 2:
            samples.append(1e3 * (clock() - start))
    return statistics.median(samples)


def coding_times(compressor: Compressor, numel: int, rounds: int) -> tuple[float, float]:
    """Processor time in ms to encode and to decode ``numel`` elements, error feedback included."""
    encode, decode = coders(compressor, numel)
    return median_ms(encode, rounds, time.thread_time), median_ms(decode, rounds, time.thread_time)


def coders(
    compressor: Compressor, numel: int, device: torch.device | None = None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What encodes ``numel`` elements on a device, error feedback included, and what decodes them."""
    values, errors = torch.randn(numel, device=device), torch.zeros(numel, device=device)
    starts = range(0, numel, DEFAULT_SEGMENT_ELEMENTS)
    runs = [slice(a, min(a + DEFAULT_SEGMENT_ELEMENTS, numel)) for a in starts]
    sizes = [compressor.encoded_bytes(run.stop - run.start) for run in runs]
    wires = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    def encode() -> None:
        for run, wire in zip(runs, wires, strict=True):
            compressor.encode(torch.add(values[run], errors[run], out=errors[run]), wire)

    def decode() -> None:
        for run, wire in zip(runs, wires, strict=True):
            compressor.decode(wire, values[run])

    return encode, decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--settings", nargs="+", default=SETTINGS, choices=SETTINGS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{heading()}; one thread a rank")
    print("\nencode / decode, ms of processor time")
    print(f"{'':12}" + "".join(f"{size:>12} MB" for size in SIZES_MB))
    for name in given.settings:
        numels = [size * 1_000_000 // 4096 * 1024 for size in SIZES_MB]
        times = [coding_times(make_compressor(name), numel, given.rounds) for numel in numels]
        print(f"{name:12}" + "".join(f"{encode:7.2f} /{decode:6.2f}" for encode, decode in times))


if __name__ == "__main__":
    main()
