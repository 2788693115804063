"""What makes a step long, and what its remedy would save, from the figures of ranks."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from lightning_multigpu.planning.numbers import ms
from lightning_multigpu.planning.pipelines.schedule_order import schedule_orders, work_times
from lightning_multigpu.planning.pipelines.timeline import Interval
from lightning_multigpu.report.diagnosis import diagnose
from lightning_multigpu.report.pipelines import PipelineFigures, TimedPipeline
from lightning_multigpu.report.rank_figures import LaunchQueue, RankFigures, ReadValues

HEALTHY = {"data_wait": 0.001, "forward": 0.030, "backward": 0.060, "communication": 0.002, "optimizer": 0.005}


def ranks(*changes: dict[str, float], **options: object) -> list[RankFigures]:
    return [
        RankFigures(rank=number, host="a", phases_s={**HEALTHY, **change}, **options)  # type: ignore[arg-type]
        for number, change in enumerate(changes or ({}, {}))
    ]


def test_a_healthy_run_has_no_finding() -> None:
    assert diagnose(ranks()) == []


@pytest.mark.parametrize("wait_s", [0.05, 0.3])
def test_a_slow_loader(wait_s: float) -> None:
    [finding] = diagnose(ranks({"data_wait": wait_s}, {"data_wait": 0.9 * wait_s}, data_workers=0))
    assert finding.kind == "input"
    assert finding.saving_s == pytest.approx(wait_s)
    assert finding.step_s == pytest.approx(0.097)
    # One worker more than the batch time needs, if it needs all of one.
    assert f"num_workers={1 if wait_s < 0.09 else 4}," in finding.remedy
    assert f"rank 0 waits {ms(wait_s)}" in finding.evidence


def test_workers_that_are_too_few_are_counted_in() -> None:
    """With workers, the wait is what is left of the loading; all of them take a step together for a batch each."""
    [finding] = diagnose(ranks({"data_wait": 0.1}, {"data_wait": 0.1}, data_workers=2))
    assert "num_workers=5," in finding.remedy  # 2 x 197 ms of loading in 97 ms
    assert "(num_workers=2)" in finding.evidence


def test_a_slow_rank_is_named_and_others_wait_for_it() -> None:
    [finding] = diagnose(ranks({"communication": 0.042}, {"forward": 0.070}))
    assert finding.kind == "straggler"
    assert "rank 1" in finding.evidence
    assert "slowest in its forward" in finding.evidence
    assert finding.saving_s == pytest.approx(0.040)


def test_communication_is_what_the_slowest_rank_waits() -> None:
    waits = {"hidden_s": 0.040, "waits_s": {"gradients": 0.070}}
    exposed = ranks({"communication": 0.100}, {"communication": 0.080, "forward": 0.050}, **waits)
    found = {finding.kind: finding for finding in diagnose(exposed)}
    assert found["communication"].saving_s == pytest.approx(0.040)
    assert "accumulate_grad_batches=2" in found["communication"].remedy
    accumulating = {f.kind: f for f in diagnose([replace(rank, batches=4) for rank in exposed])}
    assert "accumulate_grad_batches=8" in accumulating["communication"].remedy, "it has 4 already"
    apart, ring = [replace(rank, node=rank.rank) for rank in exposed], {"compression": None}
    compressed = {finding.kind: finding for finding in diagnose(apart, options=ring)}
    # Half of the 110 ms of gradients are gone; what is hidden can stay hidden.
    assert compressed["communication"].saving_s == pytest.approx(0.055)
    assert 'compression="bf16"' in compressed["communication"].remedy
    assert "accumulate_grad_batches=2" in compressed["communication"].remedy
    assert ", 156 ms a step predicted" in compressed["communication"].remedy, "196 ms without 40"


def test_hidden_transfers_are_beside_the_wait() -> None:
    """A wait of 3.41 ms, of which 0 of 2.56 ms of transfers were hidden: Lightning's broadcasts were no transfers."""
    [finding] = diagnose(ranks({"communication": 0.090}, {"communication": 0.080}, hidden_s=0.025))
    assert "waits at least 80.0 ms of a step of 186 ms" in finding.evidence
    assert "between ranks; 25.0 ms of other transfers are hidden behind computation." in finding.evidence
    [finding] = diagnose(ranks(*[{"communication": 0.080}] * 2))
    assert "; no others are hidden" in finding.evidence


def test_what_layers_send_within_a_batch_is_not_sent_less_often() -> None:
    """Under tensor_split, accumulation was said to halve the transfers of every batch's activations."""
    sums = {"waits_s": {"activations": 0.070}, "activations_rate": 1e9, "parameters_bytes": 5_000_000}
    split = ranks(*[{"communication": 0.080}] * 2, **sums)
    [finding] = diagnose(split)
    # 10 MB of gradients in place of the activations: each of two ranks sends 10 MB.
    assert finding.saving_s == pytest.approx(0.060)
    assert "ring_ddp" in finding.remedy
    assert "accumulate" not in finding.remedy
    assert diagnose([replace(rank, parameters_bytes=0) for rank in split]) == [], "half of the other 10 ms is below 5 %"
    [finding] = diagnose([replace(rank, waits_s={}) for rank in split])
    assert (finding.saving_s, "accumulate" in finding.remedy) == (pytest.approx(0.040), False)


def test_nobody_waits_for_a_slow_rank_where_each_has_its_own_pace() -> None:
    apart = ranks({"communication": 0.002}, {"forward": 0.070, "communication": 0.090})
    [finding] = diagnose(apart, asynchronous=True)
    assert (finding.kind, finding.saving_s) == ("communication", pytest.approx(0.045))
    assert finding.step_s == pytest.approx(0.226 - 0.045)
    assert "rank 1 waits 90.0 ms of a step of 226 ms" in finding.evidence, "the other one does not"


READS = ReadValues("train.py(7): f", 1000, 0.02), ReadValues("train.py(9): g", 1, 0.001)


@pytest.mark.parametrize(
    ("found", "kind", "saving_s", "evidence"),
    [
        (
            ranks(*[{"callbacks": 0.03}] * 2, callbacks_s={"Slow.on_x": 0.028}),
            "callbacks",
            0.028,
            "Slow.on_x takes 28.0",
        ),
        (ranks(reads=READS), "synchronising calls", 0.02, "train.py(7): f reads 1000 values"),
        (ranks(*[{"other": 0.03}] * 2), "small batches", 0.015, "takes 30.0 ms of a step of 128 ms"),
    ],
)
def test_one_cause_is_named(found: list[RankFigures], kind: str, saving_s: float, evidence: str) -> None:
    [finding] = diagnose(found)
    assert (finding.kind, finding.saving_s) == (kind, pytest.approx(saving_s))
    assert evidence in finding.evidence


@pytest.mark.parametrize("busy_s", [0.010, 0.060])
def test_a_host_that_is_not_ahead_of_its_gpu(busy_s: float) -> None:
    """Forward, backward and optimizer take 95 ms of the host."""
    bound = ranks(launches=LaunchQueue(kernels=900, busy_s=busy_s, queued=0))
    [finding] = diagnose(bound)
    assert (finding.kind, finding.saving_s) == ("launch-bound", pytest.approx(0.095 - busy_s))
    assert f"busy for {ms(busy_s)}" in finding.evidence
    assert "layer.compile()" in finding.remedy
    assert diagnose([replace(rank, launches=LaunchQueue(900, busy_s, queued=40)) for rank in bound]) == []


def figures(forward_s: list[float], num_micro_batches: int, message_s: float = 0.0) -> PipelineFigures:
    orders = schedule_orders("gpipe", len(forward_s), 1, num_micro_batches)
    last = len(forward_s) - 1
    times = work_times(orders, forward_s, [2 * seconds for seconds in forward_s], [message_s] * last)
    unsent = {"forward": last, "backward": 0}  # the stage whose pass sends nothing
    timelines = [
        tuple(
            Interval(*astuple(work), times[work][0], times[work][1] - message_s * (work.stage != unsent[work.kind]))
            for work in order
        )
        for order in orders
    ]
    return TimedPipeline(
        ranks=[7, 6], schedule="gpipe", stages_per_rank=1, num_micro_batches=num_micro_batches, timelines=timelines
    ).figures()


def test_a_bubble_asks_for_more_micro_batches() -> None:
    """Two equal stages of GPipe and M micro-batches take (M + 1) / M of their work: 1.5, 1.25 and 1.125."""
    found = figures([0.01, 0.01], 2)
    assert (found.wall_s, found.bubble) == (pytest.approx(0.09), pytest.approx(1 / 3))
    assert (found.more_micro_batches, found.with_more_s) == (8, pytest.approx(0.09 * 1.125 / 1.5))
    assert found.balanced_s == pytest.approx(0.09)
    [finding] = diagnose(ranks({"stage_wait": 0.03}, {"stage_wait": 0.03}), pipeline=found)
    assert (finding.kind, finding.saving_s) == ("pipeline bubble", pytest.approx(0.0225))
    assert "num_micro_batches=8" in finding.remedy


def test_unequal_stages() -> None:
    """The rank with the second stage was called rank 1 whatever its number is."""
    found = figures([0.01, 0.03], 16)
    assert found.balanced_s < 0.72 * found.wall_s
    findings = diagnose(ranks({"stage_wait": 0.5}, {}), pipeline=found)
    assert findings[0].kind == "imbalance of stages"
    assert "rank 6 compute for 1,440 ms" in findings[0].evidence


def test_messages_between_small_passes() -> None:
    """They were scaled with the passes, and all that waited for messages counted as imbalance of stages."""
    small = figures([0.0005, 0.0015], 2, message_s=0.01)
    assert small.passes_s == pytest.approx(0.0105)
    assert small.wall_s - small.balanced_s == pytest.approx(0.0105 - 0.009)
    wait_s = small.wall_s - 0.006
    [finding] = diagnose(ranks({"stage_wait": wait_s}, {"stage_wait": wait_s}), pipeline=small)
    assert (finding.kind, finding.saving_s) == ("small micro-batches", pytest.approx((small.wall_s - 0.0105) / 2))
