"""Throughput, utilization and memory of a profiled run over its whole length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lightning_multigpu.planning.numbers import number, size

if TYPE_CHECKING:
    from lightning_multigpu.report.profile.profile_document import ProfileDocument

SAMPLES, UTILIZATION, MEMORY, PROCESS = (
    "throughput/samples_per_sec",
    "device/utilization_percent",
    "device/memory_used_bytes",
    "device/process_rss_bytes",
)
KEYS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    SAMPLES: ("samples a second", number),
    UTILIZATION: ("utilization", lambda percent: f"{percent:.0f} %"),
    MEMORY: ("memory of the GPU or host, all programs", size),
    PROCESS: ("main memory of the rank's process", size),
}
"""Key of the monitor's figure -> what it is called, and its value as text."""


def rate(profile: ProfileDocument) -> float | None:
    """Samples a second: the median over the whole run, of all ranks together; None where it was not measured."""
    rates = [rank.whole_run[SAMPLES].median for rank in profile.ranks if SAMPLES in rank.whole_run]
    return sum(rates) if rates else None


def fastest(profiles: Mapping[str, ProfileDocument]) -> list[str]:
    """The verdict of a comparison, by the names of the runs; empty where fewer than two have the figure."""
    rates = {name: found for name, profile in profiles.items() if (found := rate(profile))}
    if len(rates) < 2:
        return []
    first, second, *_ = sorted(rates, key=lambda name: -rates[name])
    times = rates[first] / rates[second]
    return [f"{first} is fastest: {number(rates[first])} samples/s, {times:.2f} times those of {second}."]
