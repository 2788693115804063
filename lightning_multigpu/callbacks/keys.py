"""Names of the figures that the callbacks log and report, and how the ranks' values become the run's value.

The docstring of each callback has the unit and the meaning of its keys.
"""

from __future__ import annotations

from typing import Literal

from lightning_multigpu.report.statistics import Aggregation

Group = Literal["throughput", "communication", "device"]

KEYS: dict[str, Aggregation] = {
    "throughput/samples_per_sec": "sum",
    "throughput/batches_per_sec": "sum",
    "throughput/tokens_per_sec": "sum",
    "throughput/flops_per_sec": "sum",
    "throughput/mfu": "mean",
    "throughput/step_ms": "mean",
    "communication/all_reduce_ms": "mean",
    "communication/total_ms": "mean",
    "communication/exposed_ms": "mean",
    "communication/sent_bytes": "mean",
    "communication/memory_bytes": "mean",
    "communication/algbw_gb_per_sec": "mean",
    "communication/busbw_gb_per_sec": "mean",
    "parameter_server/push_ms": "mean",
    "parameter_server/pull_ms": "mean",
    "parameter_server/staleness_median": "max",
    "parameter_server/staleness_p95": "max",
    "parameter_server/staleness_max": "max",
    "device/utilization_percent": "mean",
    "device/memory_used_bytes": "max",
    "device/power_watts": "sum",
    "device/temperature_celsius": "max",
    "device/cpu_percent": "mean",
    "device/process_rss_bytes": "max",
}
"""Key -> how the values of the ranks that have one are aggregated."""


def keys_of(group: Group) -> list[str]:
    """The keys of one callback, in the table's order."""
    prefixes = ("communication/", "parameter_server/") if group == "communication" else (f"{group}/",)
    return [key for key in KEYS if key.startswith(prefixes)]
