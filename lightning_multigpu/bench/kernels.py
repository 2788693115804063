"""Kernels on one device, alone and beside those of other ranks: products, memory, coding."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_multigpu.bench.jobs.rank_process import Seat, Turns
from lightning_multigpu.communication.compression import make_compressor
from lightning_multigpu.communication.metering.clocks import clock_of
from lightning_multigpu.job.shared_gpus import rank_devices

CODINGS = ("bf16", "int8")
"""Compressions that are timed."""
MATMUL_SIZES = (256, 1024)
"""Rows and columns of the matrices; accelerators also multiply larger ones."""
_LARGEST_ON_GPU = 8192
_STREAM_BYTES = 64 << 20
STREAM_BYTES = 2 * _STREAM_BYTES
"""Read and written by the stream kernel."""
CODED_BYTES = 16 << 20
_SECONDS = 0.08


def serve(device_type: str, seat: Seat, turns: Turns) -> None:
    """Times the kernels on the first ranks of each host, as many as the turn says; the others answer with {}."""
    device = rank_devices(device_type, seat.placement.devices, max(1, torch.cuda.device_count()))[seat.local_rank]
    boot = Path("/proc/sys/kernel/random/boot_id")
    for crowd in turns:
        found = _kernels(device) if seat.local_rank < crowd else {}
        turns.answer({"boot": boot.read_text().strip() if boot.exists() else "", "seconds": found})


def _kernels(device: torch.device) -> dict[str, float]:
    found = {}
    for size in (*MATMUL_SIZES, _LARGEST_ON_GPU) if device.type == "cuda" else MATMUL_SIZES:
        a, b = (torch.randn(size, size, device=device) for _ in range(2))
        found[f"matmul {size}"] = _timed(device, partial(torch.mm, a, b, out=torch.empty_like(a)))
    x, y = (torch.ones(_STREAM_BYTES // 4, device=device) for _ in range(2))
    found["stream"] = _timed(device, lambda: torch.add(x, 1.0, out=y))
    values = torch.randn(CODED_BYTES // 4)  # gradients are compressed in the host's memory
    for name in CODINGS:
        compressor: Any = make_compressor(name)
        wire = torch.empty(compressor.encoded_bytes(values.numel()), dtype=torch.uint8)

        def code(compressor: Any = compressor, wire: torch.Tensor = wire) -> None:
            compressor.encode(values, wire)
            compressor.decode(wire, values)

        found[f"coding {name}"] = _timed(torch.device("cpu"), code)
        found[f"ratio {name}"] = values.nbytes / wire.nbytes
    return found


def _timed(device: torch.device, call: Callable[[], object]) -> float:
    """Seconds of the fastest call after the first."""
    clock = clock_of(device)
    call()
    best, until_s = float("inf"), time.monotonic() + _SECONDS
    while time.monotonic() < until_s or best == float("inf"):
        start = clock.mark()
        call()
        end = clock.mark()
        clock.wait(end)
        best = min(best, clock.seconds(start, end))
    return best


def flops(size: int) -> float:
    """Multiplications and additions of a product of square matrices."""
    return 2.0 * size**3
