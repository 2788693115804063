"""Diagnosis of a profiled run: the reasons for a long step, in order of the time that a remedy would save."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from types import MappingProxyType
from typing import Any

from lightning_multigpu.planning.numbers import ms
from lightning_multigpu.report.pipelines import PipelineFigures
from lightning_multigpu.report.rank_figures import CommonStep, RankFigures

SMALLEST_SHARE = 0.05
"""A smaller saving, as a share of the step, is not reported."""
_MOST_WORKERS = 64
_COMPUTING = ("forward", "backward", "optimizer")
_BF16 = 0.5
_SHORT_QUEUE = 1
"""With this number of kernels in the queue, or fewer, the GPU waits for the host."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A reason for long steps.

    Attributes:
        rank: the rank that the evidence is of.
        saving_s: predicted saving of the remedy, in seconds of a step.
        step_s: predicted step with the remedy.
        evidence: the measurements, as text.
        remedy: the proposed change.
        phases: the phases of a step in which the time is; empty if any of them may have it.
    """

    kind: str
    rank: int
    saving_s: float
    step_s: float
    evidence: str
    remedy: str
    phases: tuple[str, ...] = ()


def diagnose(
    ranks: Sequence[RankFigures],
    *,
    pipeline: PipelineFigures | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    asynchronous: bool = False,
) -> list[Finding]:
    """The reasons for long steps, the largest saving first.

    The list is empty if no remedy would save 5 % of a step.

    Args:
        ranks: all ranks of the run, in order; at least one.
        pipeline: the figures of a pipeline, if the model is split into stages.
        options: all options of the run's strategy, which remedies may change.
        asynchronous: ranks do not wait for each other; the findings are the slowest rank's.
    """
    nodes = len({rank.node for rank in ranks})
    if asynchronous:
        ranks = [max(ranks, key=lambda rank: rank.step_s)]
    step = CommonStep(ranks)
    found = [
        *_input(step),
        *(_straggler(step) if pipeline is None else ()),
        *_communication(step, options, nodes),
        *_callbacks(step),
        *_reads(step),
        *_small_batches(step),
        *(() if pipeline is None else _stages(step, pipeline, options)),
        *_launches(step),
    ]
    worth = [finding for finding in found if finding.saving_s >= SMALLEST_SHARE * step.seconds]
    return sorted(worth, key=lambda finding: -finding.saving_s)


def _finding(
    kind: str, step: CommonStep, rank: int, saving_s: float, evidence: str, remedy: str, *phases: str
) -> Finding:
    """A finding of ``rank`` whose remedy saves ``saving_s`` of the step; ``phases`` have the time."""
    return Finding(
        kind=kind,
        rank=rank,
        saving_s=saving_s,
        step_s=step.seconds - saving_s,
        evidence=evidence,
        remedy=remedy,
        phases=phases,
    )


def _input(step: CommonStep) -> Iterator[Finding]:
    slowest = max(step.ranks, key=lambda rank: rank.of("data_wait"))
    wait_s = slowest.of("data_wait")
    if not wait_s:
        return
    rest_s = step.with_own(lambda rank: rank.own_s - rank.of("data_wait"))
    workers = slowest.data_workers
    # Workers produce a batch every load / workers seconds. Without workers, the wait is the time to load a batch.
    load_s = wait_s if not workers else workers * slowest.step_s
    wanted = max(1, math.ceil(1.1 * load_s / rest_s)) if rest_s > 0 else _MOST_WORKERS
    have = "" if workers is None else f" (num_workers={workers})"
    yield _finding(
        "input",
        step,
        slowest.rank,
        step.saving(lambda rank: rank.of("data_wait")),
        f"rank {slowest.rank} waits {ms(wait_s)} of a step of {ms(slowest.step_s)} for its next batch{have}.",
        f"Load batches beside the training: DataLoader(num_workers={min(wanted, _MOST_WORKERS)}, "
        "persistent_workers=True), with pin_memory=True for GPUs; or make a sample cheaper to load.",
        "data_wait",
    )


def _straggler(step: CommonStep) -> Iterator[Finding]:
    if len(step.ranks) < 2:
        return
    phases = ("device_transfer", *_COMPUTING)
    slowest = max(step.ranks, key=lambda rank: rank.of(*phases))
    others = [rank for rank in step.ranks if rank is not slowest]
    usual_s = median_low(rank.of(*phases) for rank in others)
    phase = max(phases, key=lambda phase: slowest.of(phase) - median_low(rank.of(phase) for rank in others))
    yield _finding(
        "straggler",
        step,
        slowest.rank,
        step.saving(lambda rank: max(0.0, rank.of(*phases) - usual_s)),
        f"rank {slowest.rank} on host {slowest.host} computes for {ms(slowest.of(*phases))} of a step, other "
        f"ranks for {ms(usual_s)}; it is slowest in its {phase}.",
        "Look for other work on its host, for a slower or hotter device, or for larger samples in its part of the "
        "data.",
        phase,
    )


def _communication(step: CommonStep, options: Mapping[str, Any], num_nodes: int) -> Iterator[Finding]:
    remedies = _communication_remedies(step, options, num_nodes)
    worth = sorted(((s, remedy) for remedy, s in remedies.items() if s >= SMALLEST_SHARE * step.seconds), reverse=True)
    if not step.exposed_s or not worth:
        return
    hidden_s = step.first_to_wait.hidden_s
    hidden = f"{ms(hidden_s)} of other transfers are" if hidden_s >= 0.01 * step.exposed_s else "no others are"
    (saving_s, best), *others = worth
    yield _finding(
        "communication",
        step,
        step.first_to_wait.rank,
        saving_s,
        f"{step.who_waits} {ms(step.exposed_s)} of a step of {ms(step.seconds)} for transfers between ranks; "
        f"{hidden} hidden behind computation.",
        f"{best}." + "".join(f" Or: {other}, {ms(step.seconds - s)} a step predicted." for s, other in others),
        "communication",
    )


def _communication_remedies(step: CommonStep, options: Mapping[str, Any], num_nodes: int) -> dict[str, float]:
    """The remedies as sentences without a full stop, with the seconds of a step that each saves."""
    gradients_s = step.exposed_part_s("gradients")
    per_step_s = step.exposed_s - step.exposed_part_s("activations")
    often = "Use batches of twice the size"
    if gradients_s >= per_step_s / 2:
        batches = 2 * step.first_to_wait.batches
        often = f"Communicate half as often: Trainer(accumulate_grad_batches={batches}), or batches of twice the size"
    remedies = {f"{often} (the time is for as many samples as now)": per_step_s / 2}
    if num_nodes > 1 and options.get("compression", "") is None and options.get("average_every", 1) == 1:
        saving_s = min(gradients_s, _BF16 * (gradients_s + step.first_to_wait.hidden_s))
        remedies['Send half of the bytes between hosts: compression="bf16"'] = saving_s
    return remedies | _another_strategy(step)


def _another_strategy(step: CommonStep) -> dict[str, float]:
    """Gradients of the whole model once a step in place of the activations of each batch, where layers are split."""
    least, activations_s = step.first_to_wait, step.exposed_part_s("activations")
    if not activations_s or not least.parameters_bytes or not least.activations_rate:
        return {}
    model_bytes = sum(rank.parameters_bytes for rank in step.ranks)
    all_reduce_s = 2 * (len(step.ranks) - 1) / len(step.ranks) * model_bytes / least.activations_rate  # of a ring
    remedy = 'If the model fits on one device, average its gradients instead: strategy="ring_ddp"'
    return {remedy: max(0.0, activations_s - all_reduce_s)}


def _callbacks(step: CommonStep) -> Iterator[Finding]:
    slowest = max(step.ranks, key=lambda rank: rank.of("callbacks"))
    if not slowest.callbacks_s:
        return
    name, seconds = max(slowest.callbacks_s.items(), key=lambda item: item[1])
    evidence = f"{name} takes {ms(seconds)} of a step of {ms(slowest.step_s)} on rank {slowest.rank}."
    saving_s = step.saving(lambda rank: rank.callbacks_s.get(name, 0.0))
    remedy = "Do its work every n-th batch only."
    yield _finding("callbacks", step, slowest.rank, saving_s, evidence, remedy, "callbacks")


def _reads(step: CommonStep) -> Iterator[Finding]:
    reading = [(rank, read) for rank in step.ranks for read in rank.reads]
    if not reading:
        return
    rank, most = max(reading, key=lambda pair: pair[1].seconds)
    yield _finding(
        "synchronising calls",
        step,
        rank.rank,
        step.saving(lambda rank: sum(read.seconds for read in rank.reads if read.function == most.function)),
        f"{most.function} reads {most.count} values of tensors in a step of {ms(rank.step_s)}: {ms(most.seconds)}. "
        "Each call waits until the device has computed its value.",
        "Keep tensors, and read them every n-th step, or all at once with tolist().",
    )


def _small_batches(step: CommonStep) -> Iterator[Finding]:
    """With batches of twice the size, costs that do not grow with the batch occur half as often."""
    slowest = max(step.ranks, key=lambda rank: rank.own_s)
    yield _finding(
        "small batches",
        step,
        slowest.rank,
        step.saving(lambda rank: rank.of("other") / 2),
        f"Lightning's loop takes {ms(slowest.of('other'))} of a step of {ms(slowest.step_s)}, whatever the size of the "
        "batch: results of steps, loggers, learning-rate schedulers, the progress bar.",
        "Use larger batches (the time is per as many samples as now), log_every_n_steps=50 or more, and "
        "enable_progress_bar=False or a larger refresh_rate.",
        "other",
    )


def _stages(step: CommonStep, pipeline: PipelineFigures, options: Mapping[str, Any]) -> Iterator[Finding]:
    most_waits = max(step.ranks, key=lambda rank: rank.of("stage_wait"))
    busiest = max(pipeline.busy_s, key=lambda rank: pipeline.busy_s[rank])
    mean_s = sum(pipeline.busy_s.values()) / len(pipeline.busy_s)
    count, wall_s = pipeline.num_micro_batches, pipeline.wall_s
    fewer = ", or fewer micro-batches" if count > 1 else ""
    for kind, saving_s, evidence, remedy in (
        (
            "small micro-batches",
            max(0.0, wall_s - pipeline.passes_s) / 2,
            f"the passes of {count} micro-batches explain {ms(pipeline.passes_s)} of {ms(wall_s)}; the rest goes into "
            "messages between stages, and into what a pass costs whatever its size.",
            "Use batches of twice the size with as many micro-batches (the time is for as many samples as now)"
            f"{fewer}.",
        ),
        (
            "imbalance of stages",
            wall_s - pipeline.balanced_s,
            f"the stages of rank {busiest} compute for {ms(pipeline.busy_s[busiest])} of a step, those of a rank for "
            f"{ms(mean_s)} on average.",
            _balance(options),
        ),
        (
            "pipeline bubble",
            wall_s - pipeline.with_more_s,
            f"ranks are not busy in {100 * pipeline.bubble:.0f} % of a step with {count} micro-batches.",
            f"Cut the batch into parts of one sample or more: num_micro_batches={pipeline.more_micro_batches}.",
        ),
    ):
        yield _finding(kind, step, most_waits.rank, saving_s, evidence, remedy, "stage_wait")


def _balance(options: Mapping[str, Any]) -> str:
    counts = "the number of layers of each stage, balance=[...]"
    if options.get("split_points"):
        return "Move split_points, so that the stages have as much work as each other."
    if options.get("balance") == "time":
        return f'balance="time" cannot divide a layer: cut the largest layers into smaller ones, or pass {counts}.'
    return f'Let the measured time of the layers decide: balance="time", or pass {counts}.'


def _launches(step: CommonStep) -> Iterator[Finding]:
    """With a host that is ahead of its GPU, a step's computation takes as long as its kernels."""

    def idle_s(rank: RankFigures) -> float:
        if rank.launches is None or rank.launches.queued > _SHORT_QUEUE:
            return 0.0
        return max(0.0, rank.of(*_COMPUTING) - rank.launches.busy_s)

    waiting = max(step.ranks, key=idle_s)
    if waiting.launches is None or not idle_s(waiting):
        return
    yield _finding(
        "launch-bound",
        step,
        waiting.rank,
        step.saving(idle_s),
        f"the GPU of rank {waiting.rank} is busy for {ms(waiting.launches.busy_s)} of a step of "
        f"{ms(waiting.step_s)}: the host launches {waiting.launches.kernels} kernels and is not ahead of the GPU, "
        f"in whose queue {waiting.launches.queued} kernels wait at a launch (median).",
        "Use larger batches, or (not under dp, which copies the module) launch less: compile each layer in place, "
        'layer.compile(), with mode="reduce-overhead" for CUDA graphs.',
        *_COMPUTING,
    )
