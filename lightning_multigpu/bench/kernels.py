"""Kernels on one device, alone and beside those of other ranks: products, memory, optimizer steps, copies, coding."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_multigpu.bench.jobs.rank_process import Seat, Turns
from lightning_multigpu.communication.compression import make_compressor
from lightning_multigpu.communication.metering.clocks import clock_of
from lightning_multigpu.job.shared_gpus import rank_devices

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CODINGS = ("bf16", "int8")
"""Compressions that are timed."""
MATMUL_SIZES = (256, 1024)
"""Rows and columns of the matrices; accelerators also multiply larger ones."""
_LARGEST_ON_GPU = 8192
COPY_BYTES = 64 << 20
STREAM_BYTES = 2 * COPY_BYTES
"""Read and written by the stream kernel."""
OPTIMIZER_BYTES = 16 << 20
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
    sizes = (*MATMUL_SIZES, _LARGEST_ON_GPU) if device.type == "cuda" else MATMUL_SIZES
    for name, dtype in _DTYPES.items():
        if name == "bfloat16" and device.type == "cpu":
            continue
        for size in sizes:
            a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
            out = torch.empty_like(a)
            found[f"matmul {name} {size}"] = _timed(device, lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
    x, y = (torch.ones(COPY_BYTES // 4, device=device) for _ in range(2))
    found["stream"] = _timed(device, lambda: torch.add(x, 1.0, out=y))
    for optimizer in ("SGD", "AdamW"):
        parameter = torch.nn.Parameter(torch.ones(OPTIMIZER_BYTES // 4, device=device))
        parameter.grad = torch.ones_like(parameter)
        step = getattr(torch.optim, optimizer)([parameter], lr=1e-9).step
        found[f"optimizer {optimizer}"] = _timed(device, step)
    values = torch.randn(OPTIMIZER_BYTES // 4)  # gradients are compressed in the host's memory
    for name in CODINGS:
        compressor: Any = make_compressor(name)
        wire = torch.empty(compressor.encoded_bytes(values.numel()), dtype=torch.uint8)

        def code(compressor: Any = compressor, wire: torch.Tensor = wire) -> None:
            compressor.encode(values, wire)
            compressor.decode(wire, values)

        found[f"coding {name}"] = _timed(torch.device("cpu"), code)
        found[f"ratio {name}"] = values.nbytes / wire.nbytes
    if device.type == "cuda":
        host = torch.empty(COPY_BYTES // 4, pin_memory=True)
        found["copy"] = _timed(device, lambda: host.copy_(x))
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
