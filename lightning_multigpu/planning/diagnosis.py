"""Diagnosis of a profiled run: the reasons for a long step, in order of the time that a remedy would save.

If ranks wait for each other, a step takes as long as the slowest rank's own work plus that rank's exposed
communication::

    own work of a rank     its step without "communication" and "stage_wait"
    step                   max over ranks of own work + exposed communication of the slowest rank
    saving of a remedy     step - step with the part that the remedy removes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low

from lightning_multigpu.planning.communication_remedies import SharedWait, communication_remedies
from lightning_multigpu.planning.numbers import ms, size
from lightning_multigpu.planning.pipelines.pipeline_figures import PipelineFigures
from lightning_multigpu.planning.rank_figures import RankFigures, ThreadTrial
from lightning_multigpu.planning.strategy_options import StrategyOptions

SMALLEST_SHARE = 0.05
"""A smaller saving, as a share of the step, is not reported."""
_MOST_WORKERS = 64
_NEAR_LIMIT = 0.9
"""Memory in use above this share of the limit is reported."""
_SHORT_QUEUE = 1
"""With this number of kernels in the queue, or fewer, the GPU waits for the host."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A reason for long steps, or a limit that the run is near to.

    Attributes:
        kind: short name.
        saving_s: predicted saving of the remedy, in seconds of a step; 0 for a limit.
        step_s: predicted step with the remedy.
        evidence: the measurements, as text.
        remedy: the proposed change.
    """

    kind: str
    saving_s: float
    step_s: float
    evidence: str
    remedy: str


def diagnose(
    ranks: Sequence[RankFigures],
    *,
    pipeline: PipelineFigures | None = None,
    trial: ThreadTrial | None = None,
    shards: Sequence[float] = (),
    strategy: StrategyOptions = StrategyOptions(),  # noqa: B008
    asynchronous: bool = False,
) -> list[Finding]:
    """The reasons for long steps, the largest saving first, then limits that the run is near to.

    The list is empty if no remedy would save 5 % of a step.

    Args:
        ranks: all ranks of the run, in order; at least one.
        pipeline: the figures of a pipeline, if the model is split into stages.
        trial: the trial with fewer threads, if any.
        shards: the traffic of parameter servers, in the order of the servers.
        strategy: the run's strategy, whose options the remedies name.
        asynchronous: ranks do not wait for each other; the findings are the slowest rank's.
    """
    of_all = ranks
    if asynchronous:
        ranks = [max(ranks, key=lambda rank: rank.step_s)]
    step_s = max(rank.step_s for rank in ranks)
    found = [
        *_input(ranks),
        *_straggler(ranks, pipeline),
        *_communication(ranks, strategy, len(shards), len({rank.node for rank in of_all}), asynchronous=asynchronous),
        *_callbacks(ranks),
        *_reads(ranks),
        *_small_batches(ranks),
        *_threads(ranks, trial, step_s),
        *_stages(pipeline, step_s, strategy),
        *_shards(ranks, shards, strategy),
        *_launches(ranks, strategy),
    ]
    worth = [finding for finding in found if finding.saving_s >= SMALLEST_SHARE * step_s]
    return [*sorted(worth, key=lambda finding: -finding.saving_s), *_memory(of_all, strategy)]


def step_of(ranks: Sequence[RankFigures], own_s: Callable[[RankFigures], float] = lambda rank: rank.own_s) -> float:
    """The predicted step if each rank's own work took ``own_s``."""
    return max(map(own_s, ranks)) + _exposed_s(ranks)


def _exposed_s(ranks: Sequence[RankFigures]) -> float:
    """Seconds of a step in which the slowest rank waits for transfers; other ranks also wait for that rank."""
    slowest = max(ranks, key=lambda rank: rank.own_s)
    return min(slowest.of("communication"), *(rank.of("communication") for rank in ranks))


def _who_waits(ranks: Sequence[RankFigures]) -> str:
    return f"rank {ranks[0].rank} waits" if len(ranks) == 1 else "every rank waits at least"


def _finding(
    kind: str, ranks: Sequence[RankFigures], own_s: Callable[[RankFigures], float], evidence: str, remedy: str
) -> Finding:
    """A finding whose remedy changes the ranks' own work."""
    step_s = max(rank.step_s for rank in ranks)
    saving_s = step_of(ranks) - step_of(ranks, own_s)
    return Finding(kind=kind, saving_s=saving_s, step_s=step_s - saving_s, evidence=evidence, remedy=remedy)


def _input(ranks: Sequence[RankFigures]) -> list[Finding]:
    slowest = max(ranks, key=lambda rank: rank.of("data_wait"))
    wait_s = slowest.of("data_wait")
    if not wait_s:
        return []
    rest_s = max(rank.own_s - rank.of("data_wait") for rank in ranks) + _exposed_s(ranks)
    workers = slowest.data_workers
    # Workers produce a batch every load / workers seconds. Without workers, the wait is the time to load a batch.
    load_s = wait_s if not workers else workers * slowest.step_s
    wanted = max(1, math.ceil(1.1 * load_s / rest_s)) if rest_s > 0 else _MOST_WORKERS
    have = "" if workers is None else f" (num_workers={workers})"
    return [
        _finding(
            "input",
            ranks,
            lambda rank: rank.own_s - rank.of("data_wait"),
            f"rank {slowest.rank} waits {ms(wait_s)} of a step of {ms(slowest.step_s)} for its next batch{have}.",
            f"Load batches beside the training: DataLoader(num_workers={min(wanted, _MOST_WORKERS)}, "
            "persistent_workers=True), with pin_memory=True for GPUs; or make a sample cheaper to load.",
        )
    ]


def _straggler(ranks: Sequence[RankFigures], pipeline: PipelineFigures | None) -> list[Finding]:
    if len(ranks) < 2 or pipeline is not None:
        return []

    def work_s(rank: RankFigures) -> float:
        return rank.of("device_transfer", "forward", "backward", "optimizer")

    slowest = max(ranks, key=work_s)
    usual_s = median_low(work_s(rank) for rank in ranks if rank is not slowest)
    phase = max(
        ("device_transfer", "forward", "backward", "optimizer"),
        key=lambda phase: slowest.of(phase) - median_low(rank.of(phase) for rank in ranks if rank is not slowest),
    )
    return [
        _finding(
            "straggler",
            ranks,
            lambda rank: rank.own_s - max(0.0, work_s(rank) - usual_s),
            f"rank {slowest.rank} on host {slowest.host} computes for {ms(work_s(slowest))} of a step, other "
            f"ranks for {ms(usual_s)}; it is slowest in its {phase}.",
            "Look for other work on its host, for a slower or hotter device, or for larger samples in its part of the "
            "data.",
        )
    ]


def _communication(
    ranks: Sequence[RankFigures], strategy: StrategyOptions, num_servers: int, num_nodes: int, *, asynchronous: bool
) -> list[Finding]:
    least = min(ranks, key=lambda rank: rank.of("communication"))  # the others also wait for slower ranks
    wait = SharedWait(_exposed_s(ranks), least)
    if not wait.seconds:
        return []
    step_s = max(rank.step_s for rank in ranks)
    evidence = f"{_who_waits(ranks)} {ms(wait.seconds)} of a step of {ms(step_s)} for transfers between ranks; "
    hidden = (
        f"{ms(least.hidden_s)} of other transfers are" if least.hidden_s >= 0.01 * wait.seconds else "no others are"
    )
    evidence += f"{hidden} hidden behind computation."
    remedies = communication_remedies(ranks, wait, strategy, num_servers, num_nodes, asynchronous=asynchronous)
    worth = sorted(((s, remedy) for remedy, s in remedies.items() if s >= SMALLEST_SHARE * step_s), reverse=True)
    if not worth:
        return []
    (saving_s, best), *others = worth
    remedy = f"{best}." + "".join(f" Or: {other}, {ms(step_s - s)} a step predicted." for s, other in others)
    return [
        Finding(kind="communication", saving_s=saving_s, step_s=step_s - saving_s, evidence=evidence, remedy=remedy)
    ]


def _callbacks(ranks: Sequence[RankFigures]) -> list[Finding]:
    slowest = max(ranks, key=lambda rank: rank.of("callbacks"))
    if not slowest.callbacks_s:
        return []
    name, seconds = max(slowest.callbacks_s.items(), key=lambda item: item[1])

    def own_s(rank: RankFigures) -> float:
        return rank.own_s - rank.callbacks_s.get(name, 0.0)

    kind, remedy = "callbacks", "Do its work every n-th batch only."
    if name.endswith(".log_metrics"):
        kind, remedy = "logging", "Log less often: Trainer(log_every_n_steps=50), or more."
    evidence = f"{name} takes {ms(seconds)} of a step of {ms(slowest.step_s)} on rank {slowest.rank}."
    return [_finding(kind, ranks, own_s, evidence, remedy)]


def _reads(ranks: Sequence[RankFigures]) -> list[Finding]:
    reading = [(rank, read) for rank in ranks for read in rank.reads]
    if not reading:
        return []
    rank, most = max(reading, key=lambda pair: pair[1].seconds)

    def own_s(rank: RankFigures) -> float:
        return rank.own_s - sum(read.seconds for read in rank.reads if read.line == most.line)

    return [
        _finding(
            "synchronising calls",
            ranks,
            own_s,
            f"{most.line} reads {most.count} values of tensors in a step of {ms(rank.step_s)}: {ms(most.seconds)}. "
            "Each call waits until the device has computed its value.",
            "Keep tensors, and read them every n-th step, or all at once with tolist().",
        )
    ]


def _small_batches(ranks: Sequence[RankFigures]) -> list[Finding]:
    """With batches of twice the size, costs that do not grow with the batch occur half as often."""
    slowest = max(ranks, key=lambda rank: rank.own_s)
    fixed_s = slowest.of("other")
    return [
        _finding(
            "small batches",
            ranks,
            lambda rank: rank.own_s - rank.of("other") / 2,
            f"Lightning's loop takes {ms(fixed_s)} of a step of {ms(slowest.step_s)}, whatever the size of the "
            "batch: results of steps, learning-rate schedulers, the progress bar.",
            "Use larger batches (the time is per as many samples as now), log_every_n_steps=50 or more, and "
            "enable_progress_bar=False or a larger refresh_rate.",
        )
    ]


def _threads(ranks: Sequence[RankFigures], trial: ThreadTrial | None, step_s: float) -> list[Finding]:
    if trial is None:
        return []
    saving_s = trial.step_s - trial.fewer_step_s
    on_host = [rank for rank in ranks if rank.node == ranks[0].node]
    threads = sum(rank.threads for rank in on_host)
    return [
        Finding(
            kind="threads",
            saving_s=saving_s,
            step_s=step_s - saving_s,
            evidence=f"{len(on_host)} ranks with {trial.threads} threads each are {threads} threads for "
            f"{ranks[0].cores} cores of host {ranks[0].host}; with {trial.fewer} a rank, a step took "
            f"{ms(trial.fewer_step_s)} instead of {ms(trial.step_s)}.",
            remedy=f"Set OMP_NUM_THREADS={trial.fewer}, or call torch.set_num_threads({trial.fewer}) in the ranks.",
        )
    ]


def _stages(pipeline: PipelineFigures | None, step_s: float, strategy: StrategyOptions) -> list[Finding]:
    if pipeline is None:
        return []
    busiest = max(pipeline.busy_s, key=lambda rank: pipeline.busy_s[rank])
    mean_s = sum(pipeline.busy_s.values()) / len(pipeline.busy_s)
    messages_s = max(0.0, pipeline.wall_s - pipeline.passes_s)
    fewer = ", or fewer micro-batches" if pipeline.num_micro_batches > 1 else ""
    return [
        Finding(
            kind="small micro-batches",
            saving_s=messages_s / 2,
            step_s=step_s - messages_s / 2,
            evidence=f"the passes of {pipeline.num_micro_batches} micro-batches explain {ms(pipeline.passes_s)} of "
            f"{ms(pipeline.wall_s)}; the rest goes into messages between stages, and into what a pass costs whatever "
            "its size.",
            remedy="Use batches of twice the size with as many micro-batches (the time is for as many samples as now)"
            f"{fewer}.",
        ),
        Finding(
            kind="imbalance of stages",
            saving_s=pipeline.wall_s - pipeline.balanced_s,
            step_s=step_s - (pipeline.wall_s - pipeline.balanced_s),
            evidence=f"the stages of rank {busiest} compute for {ms(pipeline.busy_s[busiest])} of a step, those of a "
            f"rank for {ms(mean_s)} on average.",
            remedy=_balance(strategy),
        ),
        Finding(
            kind="pipeline bubble",
            saving_s=pipeline.wall_s - pipeline.with_more_s,
            step_s=step_s - (pipeline.wall_s - pipeline.with_more_s),
            evidence=f"ranks are not busy in {100 * pipeline.bubble:.0f} % of a step with "
            f"{pipeline.num_micro_batches} micro-batches.",
            remedy="Cut the batch into more parts: "
            f"{strategy.with_pipeline(num_micro_batches=pipeline.more_micro_batches)}, each of one sample at least.",
        ),
    ]


def _balance(strategy: StrategyOptions) -> str:
    counts = "the number of layers of each stage, balance=[...]"
    if strategy.of_pipeline("split_points"):
        return "Move split_points, so that the stages have as much work as each other."
    if strategy.of_pipeline("balance") == "time":
        return f'balance="time" cannot divide a layer: cut the largest layers into smaller ones, or give {counts}.'
    return f"Let the measured time of the layers decide: {strategy.with_pipeline(balance='time')}, or give {counts}."


def _shards(ranks: Sequence[RankFigures], shards: Sequence[float], strategy: StrategyOptions) -> list[Finding]:
    """Ranks wait for the busiest server; even shares shorten that wait in proportion."""
    if len(shards) < 2 or not sum(shards):
        return []

    fullest = max(range(len(shards)), key=shards.__getitem__)
    part = shards[fullest] / sum(shards)
    times = part * len(shards)
    exposed_s, step_s = _exposed_s(ranks), max(rank.step_s for rank in ranks)
    saving_s = max(0.0, exposed_s * (1 - 1 / times))
    return [
        Finding(
            kind="imbalance of shards",
            saving_s=saving_s,
            step_s=step_s - saving_s,
            evidence=f"server {fullest} moves {100 * part:.0f} % of the bytes, "
            f"{times:.2f} times its share; {_who_waits(ranks)} {ms(exposed_s)} of a step of {ms(step_s)} for "
            "servers and other ranks.",
            remedy=_even_shards(strategy, len(shards)),
        )
    ]


def _even_shards(strategy: StrategyOptions, num_servers: int) -> str:
    elementwise = "an optimizer of torch that updates each element by itself (SGD, Adam, AdamW)"
    if (split := strategy.chosen.get("optimizer_split")) not in (None, "elements"):
        return f'Leave optimizer_split="{split}" out: the parameters of {elementwise} are then cut evenly.'
    fewer = "name fewer servers" if "servers" in strategy.chosen else strategy.with_(num_servers=num_servers - 1)
    return (
        f"Use {elementwise}: its parameters are cut evenly. With another one, make the largest layer smaller, or take "
        f"fewer servers: {fewer}."
    )


def _launches(ranks: Sequence[RankFigures], strategy: StrategyOptions) -> list[Finding]:
    """With a host that is ahead of its GPU, a step's computation takes as long as its kernels."""

    def idle_s(rank: RankFigures) -> float:
        if rank.launches is None or rank.launches.queued > _SHORT_QUEUE:
            return 0.0
        return max(0.0, rank.of("forward", "backward", "optimizer") - rank.launches.busy_s)

    waiting = max(ranks, key=idle_s)
    is_dp = strategy.class_name == "DataParallelStrategy"  # which copies the module, and cannot copy compiled layers
    compiled = (
        ', or launch less: compile each layer in place, layer.compile(), with mode="reduce-overhead" for CUDA graphs.'
    )
    if waiting.launches is None or not idle_s(waiting):
        return []
    return [
        _finding(
            "launch-bound",
            ranks,
            lambda rank: rank.own_s - idle_s(rank),
            f"the GPU of rank {waiting.rank} is busy for {ms(waiting.launches.busy_s)} of a step of "
            f"{ms(waiting.step_s)}: the host launches {waiting.launches.kernels} kernels and is not ahead of the GPU, "
            f"in whose queue {waiting.launches.queued} kernels wait at a launch (median).",
            "Use larger batches" + (', or strategy="ring_ddp" with compiled layers.' if is_dp else compiled),
        )
    ]


def _saves_memory(kind: str, strategy: StrategyOptions, batches: int) -> str:
    """What makes the memory of a GPU suffice, where ``kind`` takes the most of it."""
    if kind == "activations":
        checkpointed = strategy.with_checkpointing()
        again = f", or compute layers again in backward: {checkpointed}" if checkpointed else ""
        return f"Use smaller batches with Trainer(accumulate_grad_batches={2 * batches}){again}."
    if strategy.splits_model:
        return "Split the model over more ranks."
    if kind == "parameters":
        return 'Split the model over ranks: Trainer(strategy="pipeline_1f1b"), or strategy="tensor_split".'
    on_host = 'keep them in the memory of the host, strategy="cpu_ps"'
    if strategy.class_name != "ShardedStrategy":
        return f'Shard the states of the optimizer over ranks, Trainer(strategy="ddp_sharded"), or {on_host}.'
    if strategy.chosen.get("offload_optimizer"):
        return "Use more ranks, each of which then has a smaller shard."
    return f"Keep the states of the optimizer in the memory of the host: {strategy.with_(offload_optimizer=True)}."


def _memory(ranks: Sequence[RankFigures], strategy: StrategyOptions) -> list[Finding]:
    measured = [(rank, rank.memory) for rank in ranks if rank.memory is not None and rank.memory.limit_bytes > 0]
    near = [(rank, use) for rank, use in measured if use.peak_bytes >= _NEAR_LIMIT * use.limit_bytes]
    if not near:
        return []
    rank, use = max(near, key=lambda pair: pair[1].peak_bytes / pair[1].limit_bytes)
    kinds = dict(use.kinds_bytes)
    kinds["parameters"] = kinds.get("parameters", 0.0) + kinds.pop("gradients", 0.0)  # which are split together
    largest = max(("parameters", "optimizer", "activations"), key=lambda kind: kinds.get(kind, 0.0))
    remedy = _saves_memory(largest, strategy, rank.batches)
    if use.place != "GPU":
        remedy = "Use smaller batches, fewer ranks or DataLoader workers on this host, or a host with more memory."
    whose = (
        f"the GPU of rank {rank.rank}" if use.place == "GPU" else f"the {use.place} of rank {rank.rank}, {rank.host},"
    )
    held = ", ".join(f"{kind} {size(held_bytes)}" for kind, held_bytes in use.kinds_bytes.items() if held_bytes)
    return [
        Finding(
            kind="memory near the limit",
            saving_s=0.0,
            step_s=max(rank.step_s for rank in ranks),
            evidence=f"{whose} had {size(use.peak_bytes)} of {size(use.limit_bytes)} in use"
            + (f"; the rank holds {held}." if held else "."),
            remedy=remedy,
        )
    ]
