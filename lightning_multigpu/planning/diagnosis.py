"""Diagnosis of a profiled run: the reasons for a long step, in order of the time that a remedy would save.

If ranks wait for each other, a step takes as long as the slowest rank's own work plus that rank's exposed
communication::

    own work of a rank     its step without "communication" and "stage_wait"
    step                   max over ranks of own work + exposed communication of the slowest rank
    saving of a remedy     step - step with the part that the remedy removes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from lightning_multigpu.planning.launch_queue import LaunchQueue
from lightning_multigpu.planning.numbers import ms, size
from lightning_multigpu.planning.pipeline_figures import PipelineFigures

SMALLEST_SHARE = 0.05
"""A smaller saving, as a share of the step, is not reported."""
_BF16 = 0.5
_MOST_WORKERS = 64
_NEAR_LIMIT = 0.9
"""Memory in use above this share of the limit is reported."""
_SHORT_QUEUE = 1
"""With this number of kernels in the queue, or fewer, the GPU waits for the host."""


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """A rank's profiled steps; times are medians over its optimizer steps, in seconds.

    Attributes:
        rank, host: the rank, and its host's name.
        node: number of its host.
        phases_s: seconds of a step by phase, see :data:`~lightning_multigpu.planning.step_phases.PHASES`.
        callbacks_s: seconds of a step by callback, for those that take time.
        transfers_s: time in which transfers were under way, hidden or not.
        waits_s: parts of "communication": "gradients" for transfers once in an optimizer step (gradients and weights),
            "activations" for transfers of split layers.
        activations_rate: bytes per second of the transfers of split layers.
        data_workers: worker processes of its DataLoader; None if unknown.
        threads: intra-op threads.
        cores: cores that the processes of its host may use.
        reads: the values of tensors that a step reads.
        memory: memory in use; None if not measured.
        launches: the launches of a step's kernels; None without a GPU, and if operators were not recorded.
    """

    rank: int
    host: str
    node: int = 0
    phases_s: Mapping[str, float]
    callbacks_s: Mapping[str, float] = field(default_factory=dict)
    transfers_s: float = 0.0
    waits_s: Mapping[str, float] = field(default_factory=dict)
    activations_rate: float = 0.0
    data_workers: int | None = None
    threads: int = 1
    cores: int = 1
    reads: tuple[ReadValues, ...] = ()
    memory: MemoryUse | None = None
    launches: LaunchQueue | None = None

    @property
    def step_s(self) -> float:
        return sum(self.phases_s.values())

    def of(self, *phases: str) -> float:
        return sum(self.phases_s.get(phase, 0.0) for phase in phases)

    @property
    def own_s(self) -> float:
        """The step without waiting for others."""
        return self.step_s - self.of("communication", "stage_wait")


@dataclass(frozen=True)
class ReadValues:
    """Values of tensors that one line of code reads in a step, by ``item()`` and the like."""

    line: str
    count: int
    seconds: float


@dataclass(frozen=True)
class MemoryUse:
    """Memory in use on a rank's GPU, on its host, or in the container that limits the host's memory.

    Attributes:
        place: "GPU", "host" or "container".
        peak_bytes: the most bytes that all processes together had in use.
        limit_bytes: the most bytes that they can have.
        kinds_bytes: bytes that the rank itself holds, by kind: "parameters", "gradients", "optimizer", "activations".
    """

    place: str
    peak_bytes: float
    limit_bytes: float
    kinds_bytes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """A parameter server's part of the traffic.

    Attributes:
        sent_bytes: bytes from and to all ranks.
        share: the server's intended part of the traffic, relative to the other servers' shares.
    """

    sent_bytes: float
    share: float


@dataclass(frozen=True)
class ThreadTrial:
    """The median steps of a run with its threads and with fewer threads, measured one after the other."""

    threads: int
    step_s: float
    fewer: int
    fewer_step_s: float


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
    shards: Sequence[Shard] = (),
    can_compress: bool = False,
    own_pace: bool = False,
) -> list[Finding]:
    """The reasons for long steps, the largest saving first, then limits that the run is near to.

    The list is empty if no remedy would save 5 % of a step.

    Args:
        ranks: all ranks of the run, in order; at least one.
        pipeline: the figures of a pipeline, if the model is split into stages.
        trial: the trial with fewer threads, if any.
        shards: the traffic of parameter servers, in the order of the servers.
        can_compress: the strategy can compress gradients, and does not.
        own_pace: ranks do not wait for each other; the findings are the slowest rank's.
    """
    of_all = ranks
    if own_pace:
        ranks = [max(ranks, key=lambda rank: rank.step_s)]
    step_s = max(rank.step_s for rank in ranks)
    found = [
        *_input(ranks),
        *_straggler(ranks, pipeline),
        *_communication(ranks, can_compress),
        *_callbacks(ranks),
        *_reads(ranks),
        *_small_batches(ranks),
        *_threads(ranks, trial, step_s),
        *_stages(pipeline, step_s),
        *_shards(ranks, shards),
        *_launches(ranks),
    ]
    worth = [finding for finding in found if finding.saving_s >= SMALLEST_SHARE * step_s]
    return [*sorted(worth, key=lambda finding: -finding.saving_s), *_memory(of_all)]


def step_of(ranks: Sequence[RankFigures], own_s: Callable[[RankFigures], float] = lambda rank: rank.own_s) -> float:
    """The predicted step if each rank's own work took ``own_s``."""
    return max(map(own_s, ranks)) + _exposed_s(ranks)


def _exposed_s(ranks: Sequence[RankFigures]) -> float:
    """Seconds of a step in which the slowest rank waits for transfers; other ranks also wait for that rank."""
    slowest = max(ranks, key=lambda rank: rank.own_s)
    return min(slowest.of("communication"), *(rank.of("communication") for rank in ranks))


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


def _communication(ranks: Sequence[RankFigures], can_compress: bool) -> list[Finding]:
    exposed_s = _exposed_s(ranks)
    if not exposed_s:
        return []
    step_s = max(rank.step_s for rank in ranks)
    total_s = min(rank.transfers_s for rank in ranks)
    evidence = f"every rank waits at least {ms(exposed_s)} of a step of {ms(step_s)} for transfers between ranks; "
    evidence += f"{ms(max(0.0, total_s - exposed_s))} of their {ms(total_s)} are hidden behind computation."
    least = min(ranks, key=lambda rank: rank.of("communication"))  # the others also wait for slower ranks
    gradients_s, activations_s = (min(exposed_s, least.waits_s.get(kind, 0.0)) for kind in ("gradients", "activations"))
    often = "Use batches of twice the size"
    if gradients_s >= (exposed_s - activations_s) / 2:
        often = "Communicate half as often: Trainer(accumulate_grad_batches=2), or batches of twice the size"
    remedies = {f"{often} (the time is for as many samples as now)": (exposed_s - activations_s) / 2}
    if can_compress and len({rank.node for rank in ranks}) > 1:
        # Half of the bytes take half of the time; the hidden part can stay hidden.
        remedies['Send half of the bytes between hosts: RingDDPStrategy(compression="bf16")'] = exposed_s - max(
            0.0, exposed_s - _BF16 * total_s
        )
    if activations_s and least.memory is not None and least.activations_rate:
        # Each rank holds a part of the model; an all-reduce would send the gradients of all parts once in a step.
        model_bytes = sum(r.memory.kinds_bytes.get("parameters", 0.0) for r in ranks if r.memory is not None)
        all_reduce_s = 2 * model_bytes * (len(ranks) - 1) / len(ranks) / least.activations_rate
        remedies['If the model fits on one device, average its gradients instead: strategy="ring_ddp"'] = max(
            0.0, activations_s - all_reduce_s
        )
    best, *others = sorted(
        ((s, remedy) for remedy, s in remedies.items() if s >= SMALLEST_SHARE * step_s), reverse=True
    ) or [(0.0, often)]
    remedy = f"{best[1]}." + "".join(f" Or: {other}, {ms(step_s - s)} a step predicted." for s, other in others)
    return [Finding(kind="communication", saving_s=best[0], step_s=step_s - best[0], evidence=evidence, remedy=remedy)]


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


def _stages(pipeline: PipelineFigures | None, step_s: float) -> list[Finding]:
    if pipeline is None:
        return []
    busiest = max(pipeline.busy_s, key=lambda rank: pipeline.busy_s[rank])
    mean_s = sum(pipeline.busy_s.values()) / len(pipeline.busy_s)
    messages_s = max(0.0, pipeline.wall_s - pipeline.passes_s)
    return [
        Finding(
            kind="small micro-batches",
            saving_s=messages_s / 2,
            step_s=step_s - messages_s / 2,
            evidence=f"the passes of {pipeline.num_micro_batches} micro-batches explain {ms(pipeline.passes_s)} of "
            f"{ms(pipeline.wall_s)}; the rest goes into messages between stages, and into what a pass costs whatever "
            "its size.",
            remedy="Use batches of twice the size with as many micro-batches (the time is for as many samples as now), "
            "or fewer micro-batches.",
        ),
        Finding(
            kind="imbalance of stages",
            saving_s=pipeline.wall_s - pipeline.balanced_s,
            step_s=step_s - (pipeline.wall_s - pipeline.balanced_s),
            evidence=f"the stages of rank {busiest} compute for {ms(pipeline.busy_s[busiest])} of a step, those of a "
            f"rank for {ms(mean_s)} on average.",
            remedy='Let the measured time of the layers decide: PipelineStrategy(balance="time"), or give the number '
            "of layers of each stage.",
        ),
        Finding(
            kind="pipeline bubble",
            saving_s=pipeline.wall_s - pipeline.with_more_s,
            step_s=step_s - (pipeline.wall_s - pipeline.with_more_s),
            evidence=f"ranks are not busy in {100 * pipeline.bubble:.0f} % of a step with "
            f"{pipeline.num_micro_batches} micro-batches.",
            remedy=f"Cut the batch into more parts: num_micro_batches={pipeline.more_micro_batches}.",
        ),
    ]


def _shards(ranks: Sequence[RankFigures], shards: Sequence[Shard]) -> list[Finding]:
    """Ranks wait for the busiest server; even shares shorten that wait in proportion."""
    total, shares = sum(shard.sent_bytes for shard in shards), sum(shard.share for shard in shards)
    if len(shards) < 2 or not total:
        return []

    def excess(shard: Shard) -> float:
        return shard.sent_bytes / total * shares / shard.share if shard.share else 0.0

    fullest = max(range(len(shards)), key=lambda server: excess(shards[server]))
    times = excess(shards[fullest])
    exposed_s, step_s = _exposed_s(ranks), max(rank.step_s for rank in ranks)
    saving_s = max(0.0, exposed_s * (1 - 1 / times))
    return [
        Finding(
            kind="imbalance of shards",
            saving_s=saving_s,
            step_s=step_s - saving_s,
            evidence=f"server {fullest} moves {100 * shards[fullest].sent_bytes / total:.0f} % of the bytes, "
            f"{times:.2f} times its share; every rank waits at least {ms(exposed_s)} of a step of {ms(step_s)} for "
            "servers and other ranks.",
            remedy="Use an optimizer of torch that updates each element by itself (SGD, Adam, AdamW): its parameters "
            "are cut evenly. With another one, make the largest layer smaller, or take fewer servers (num_servers).",
        )
    ]


def _launches(ranks: Sequence[RankFigures]) -> list[Finding]:
    """With a host that is ahead of its GPU, a step's computation takes as long as its kernels."""

    def idle_s(rank: RankFigures) -> float:
        if rank.launches is None or rank.launches.queued > _SHORT_QUEUE:
            return 0.0
        return max(0.0, rank.of("forward", "backward", "optimizer") - rank.launches.busy_s)

    waiting = max(ranks, key=idle_s)
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
            "Use larger batches, or launch less: compile the layers in the module's __init__, "
            'self.layers = torch.compile(self.layers), with mode="reduce-overhead" for CUDA graphs.',
        )
    ]


_SAVES_MEMORY = {
    "parameters": 'Split the model over ranks: Trainer(strategy="pipeline_1f1b"), or strategy="tensor_split".',
    "optimizer": 'Shard the states of the optimizer over ranks, Trainer(strategy="ddp_sharded"), or keep them in the '
    'memory of the host, strategy="cpu_ps".',
    "activations": "Use smaller batches with accumulate_grad_batches=2, or compute layers again in backward: "
    "activation_checkpointing=True of the strategy.",
}


def _memory(ranks: Sequence[RankFigures]) -> list[Finding]:
    measured = [(rank, rank.memory) for rank in ranks if rank.memory is not None and rank.memory.limit_bytes > 0]
    near = [(rank, use) for rank, use in measured if use.peak_bytes >= _NEAR_LIMIT * use.limit_bytes]
    if not near:
        return []
    rank, use = max(near, key=lambda pair: pair[1].peak_bytes / pair[1].limit_bytes)
    kinds = dict(use.kinds_bytes)
    kinds["parameters"] = kinds.get("parameters", 0.0) + kinds.pop("gradients", 0.0)  # which are split together
    remedy = _SAVES_MEMORY[max(_SAVES_MEMORY, key=lambda kind: kinds.get(kind, 0.0))]
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
