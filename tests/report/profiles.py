"""Reports with profiles of runs that never were."""

from dataclasses import replace
from typing import Any

from lightning_multigpu.planning.pipelines.timeline import StageRecord, StepTimeline, theoretical
from lightning_multigpu.report.document import HeldMemory, RunDocument
from lightning_multigpu.report.rank_figures import LaunchQueue, RankFigures, TransferSums
from tests.report.examples import document_of, record

PHASES_S = {"data_wait": 0.05, "forward": 0.02, "backward": 0.04, "communication": 0.01, "optimizer": 0.005}
ALL_REDUCE = TransferSums(
    operation="all_reduce", group="data", group_size=2, count=1, size_bytes=1000, sent_bytes=1000, memory_bytes=0,
    seconds=0.03,
)  # fmt: skip


def figures(rank: int, phases_s: dict[str, float] | None = None, **changes: Any) -> RankFigures:
    """A rank whose step is limited by its loader."""
    found = RankFigures(
        rank=rank, host=f"host<{rank}>", steps=2, phases_s={**PHASES_S, **(phases_s or {})}, hidden_s=0.02,
        waits_s={"gradients": 0.01}, transfers=[ALL_REDUCE], data_workers=0,
    )  # fmt: skip
    return replace(found, **changes)


def report(*ranks: RankFigures, strategy: str = "ring_ddp", **metrics: float) -> RunDocument:
    """The report of these ranks, else of two."""
    told = ranks or (figures(0), figures(1))
    return document_of(*(replace(record(each.rank, **metrics), profiled=each) for each in told), strategy=strategy)


HEALTHY = {"data_wait": 0.001, "communication": 0.001}


def with_all() -> RunDocument:
    """A report with every section, those of a pipeline and of parameter servers side by side."""
    timelines = theoretical("gpipe", 2, 1, 2, unit_s=0.01)
    records = []
    for rank, timeline in enumerate(timelines):
        stages = StageRecord(
            pipeline=0, position=rank, num_ranks=2, stages_per_rank=1, schedule="gpipe",
            steps=(StepTimeline(1, 2, timeline),),
        )  # fmt: skip
        memory = HeldMemory(
            rank=rank, parameters_bytes=4_000_000, gradients_bytes=4_000_000, optimizer_bytes=8_000_000,
            activations_bytes=2_000_000 * (1 + rank), device_peak_bytes=19_000_000,
        )  # fmt: skip
        of_rank = figures(
            rank, {"communication": 0.05}, launches=LaunchQueue(kernels=40, busy_s=0.02, queued=1),
        )  # fmt: skip
        measured = record(rank, throughput__samples_per_sec=89.5)
        records.append(replace(measured, memory=memory, profiled=of_rank, stages=stages))
    workers = [
        {"rank": rank, "updates": 8, "staleness": {"median": 1, "p95": 19 + rank, "max": 20}} for rank in range(2)
    ]
    servers = {"servers": [{"server": 0, "weights_bytes": 8000}], "workers": workers}
    return document_of(*records, strategy="async_ps", parameter_servers=servers)
