"""The one table of the keys under which the callbacks log and report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from lightning_multigpu.report.statistics import Aggregation

Group = Literal["throughput", "communication", "device"]
_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One figure.

    Args:
        name: what it is logged and reported as.
        unit: what it is counted in.
        meaning: the figure in one line.
        per_rank: how the value of one rank comes about.
        aggregation: how the ranks' values become the run's value, over the ranks that have one.
    """

    name: str
    unit: str
    meaning: str
    per_rank: str
    aggregation: Aggregation


_OF_BATCHES = "of the batches of this optimizer step, over its wall time; only on ranks with a batch of their own"
_SAMPLED = "sampled in the background"

KEYS: tuple[Key, ...] = (
    Key(
        name="throughput/samples_per_sec",
        unit="samples/s",
        meaning="samples trained on per second",
        per_rank=f"samples {_OF_BATCHES}",
        aggregation="sum",
    ),
    Key(
        name="throughput/batches_per_sec",
        unit="batches/s",
        meaning="batches trained on per second, a rank's batch counting as one",
        per_rank=f"number {_OF_BATCHES}",
        aggregation="sum",
    ),
    Key(
        name="throughput/tokens_per_sec",
        unit="tokens/s",
        meaning="tokens trained on per second, where the number of tokens is known",
        per_rank=f"tokens {_OF_BATCHES}",
        aggregation="sum",
    ),
    Key(
        name="throughput/flops_per_sec",
        unit="FLOP/s",
        meaning="floating-point operations of the model per second, where their number is known",
        per_rank=f"operations that the whole model needs for the samples {_OF_BATCHES}",
        aggregation="sum",
    ),
    Key(
        name="throughput/mfu",
        unit="share of 1",
        meaning="model FLOPs utilization: of the devices' peak, where both are known",
        per_rank="flops_per_sec over the peak of all devices that work on this rank's batch",
        aggregation="mean",
    ),
    Key(
        name="throughput/step_ms",
        unit="ms",
        meaning="wall time per optimizer step, loading of its batches included",
        per_rank="from the end of the previous optimizer step to the end of this one, without the time from the start "
        "of a validation, or the end of an epoch, to the start of the next training batch",
        aggregation="mean",
    ),
    Key(
        name="communication/all_reduce_ms",
        unit="ms",
        meaning="time in gradient all-reduces, hidden or not",
        per_rank="time of this optimizer step in which an all-reduce over the data axis was under way; over the steps "
        "that had one",
        aggregation="mean",
    ),
    Key(
        name="communication/total_ms",
        unit="ms",
        meaning="time in communication of any kind, hidden or not",
        per_rank="time of this optimizer step in which any transfer was under way",
        aggregation="mean",
    ),
    Key(
        name="communication/exposed_ms",
        unit="ms",
        meaning="communication that compute did not hide",
        per_rank="the part of total_ms in which the main thread (on a GPU: the compute stream) waited",
        aggregation="mean",
    ),
    Key(
        name="communication/sent_bytes",
        unit="bytes",
        meaning="payload sent per optimizer step and rank, of any kind",
        per_rank="bytes of all transfers of this optimizer step that this rank sent",
        aggregation="mean",
    ),
    Key(
        name="communication/memory_bytes",
        unit="bytes",
        meaning="the part of sent_bytes that goes through memory shared with ranks of the same host",
        per_rank="bytes that this rank wrote to shared memory in this optimizer step",
        aggregation="mean",
    ),
    Key(
        name="communication/algbw_gb_per_sec",
        unit="GB/s (1e9 bytes)",
        meaning="algorithm bandwidth of the gradient all-reduces",
        per_rank="bytes all-reduced over the data axis in this optimizer step, over all_reduce_ms",
        aggregation="mean",
    ),
    Key(
        name="communication/busbw_gb_per_sec",
        unit="GB/s (1e9 bytes)",
        meaning="bus bandwidth of the gradient all-reduces: comparable with the wire's speed whatever the world's size",
        per_rank="algbw_gb_per_sec times 2(n-1)/n, n being the ranks of the data axis",
        aggregation="mean",
    ),
    Key(
        name="device/utilization_percent",
        unit="%",
        meaning="how busy the device is",
        per_rank="GPU: share of time in which a kernel ran, as in nvidia-smi; CPU: processor time of this process, "
        f"100 being all of its intra-op threads, each on a core that it may use; {_SAMPLED}",
        aggregation="mean",
    ),
    Key(
        name="device/memory_used_bytes",
        unit="bytes",
        meaning="memory in use on the device",
        per_rank=f"GPU: by all processes, as in nvidia-smi; CPU: in use on the host, by all processes; {_SAMPLED}",
        aggregation="max",
    ),
    Key(
        name="device/power_watts",
        unit="W",
        meaning="power that the GPUs draw",
        per_rank=f"of this rank's GPU; {_SAMPLED}",
        aggregation="sum",
    ),
    Key(
        name="device/temperature_celsius",
        unit="degrees Celsius",
        meaning="temperature of the hottest GPU",
        per_rank=f"of this rank's GPU; {_SAMPLED}",
        aggregation="max",
    ),
    Key(
        name="device/cpu_percent",
        unit="%",
        meaning="how busy the host's processors are",
        per_rank=f"processor time of all processes on this rank's host, 100 being all of its cores; {_SAMPLED}",
        aggregation="mean",
    ),
    Key(
        name="device/process_rss_bytes",
        unit="bytes",
        meaning="main memory of the largest training process",
        per_rank=f"resident set of this rank's process; {_SAMPLED}",
        aggregation="max",
    ),
)

AGGREGATIONS: dict[str, Aggregation] = {key.name: key.aggregation for key in KEYS}


def keys_of(group: Group) -> tuple[Key, ...]:
    """The rows of one callback, in the table's order.

    Raises:
        ValueError: there is no such group.
    """
    rows = tuple(key for key in KEYS if key.name.startswith(f"{group}/"))
    if not rows:
        raise ValueError(f"group={group!r} is unknown; known: {', '.join(sorted(_groups()))}")
    return rows


def markdown_table(rows: tuple[Key, ...] = KEYS) -> str:
    """The table as Markdown, for the documentation."""
    lines = ["| key | unit | meaning | value of one rank | over ranks |", "|---|---|---|---|---|"]
    lines += [f"| `{k.name}` | {k.unit} | {k.meaning} | {k.per_rank} | {k.aggregation} |" for k in rows]
    return "\n".join(lines) + "\n"


def documents_keys(group: Group) -> Callable[[_Class], _Class]:
    """Appends a callback's rows of the table to its docstring, so that they are written down once."""

    def decorate(cls: _Class) -> _Class:
        rows = "\n".join(
            f"    ``{k.name}`` ({k.unit}; over ranks: {k.aggregation})\n        {k.meaning}; per rank: {k.per_rank}."
            for k in keys_of(group)
        )
        cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n\n    Keys:\n\n{rows}\n    "
        return cls

    return decorate


def _groups() -> set[str]:
    return {key.name.split("/")[0] for key in KEYS}
