"""Cost of measuring: the meter's own time per optimizer step, against a step of an MLP.

    python -m benchmarks.meter_cost

Prints the machine, the versions and medians. The meter's cost depends on the number of buckets only; the model is an
MLP of 6.3 M parameters (six Linear(1024, 1024) with ReLU and Linear(1024, 10)), batch 64, one thread. Then what a note
of a collective costs, by which the guardian of the host sees what a rank waits for.
"""

from __future__ import annotations

import mmap
import statistics
import time

import torch
from torch import nn

from benchmarks.heading import heading
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.job.guardian.hang.flight_recorder import PAGE_BYTES, FlightRecorder

BUCKETS = 4
ROUNDS = 2000


def meter_seconds_per_step(*, noted: bool) -> list[float]:
    """One step: a bucket each begun and finished, one announcement, one wait, the end of the step."""
    meter = Meter()
    if noted:
        meter.notes = FlightRecorder(mmap.mmap(-1, PAGE_BYTES), 0)
    samples = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(BUCKETS):
            meter.begin("all_reduce", group="data", group_size=2, size_bytes=1 << 20).finish()
        meter.begin("all_gather", group="control", group_size=2, size_bytes=48).finish()
        meter.waited(start, meter.now())
        meter.end_step()
        samples.append(time.perf_counter() - start)
    return samples


def seconds_per_note() -> list[float]:
    """A collective that begins and ends."""
    flight_recorder = FlightRecorder(mmap.mmap(-1, PAGE_BYTES), 0)
    samples = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        note = flight_recorder.began("all_reduce", group="data", ranks="0-1")
        assert note is not None
        note.ended()
        samples.append(time.perf_counter() - start)
    return samples


def training_seconds_per_step() -> list[float]:
    """Forward, backward and SGD."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 1024)
    samples = []
    for _ in range(100):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        samples.append(time.perf_counter() - start)
    return samples


def main() -> None:
    torch.set_num_threads(1)
    print(heading())
    rows = {
        "meter": meter_seconds_per_step(noted=False),
        "meter, noted": meter_seconds_per_step(noted=True),
        "training step": training_seconds_per_step(),
        "one note": seconds_per_note(),
    }
    for name, samples in rows.items():
        low, middle, high = statistics.quantiles(samples, n=20)[0], statistics.median(samples), max(samples)
        print(f"{name:>14}: median {middle * 1e6:9.1f} us, 5 % {low * 1e6:9.1f} us, worst {high * 1e6:9.1f} us")
    share = statistics.median(rows["meter, noted"]) / statistics.median(rows["training step"])
    print(f"share of a step, noted: {share:.3%}")


if __name__ == "__main__":
    main()
