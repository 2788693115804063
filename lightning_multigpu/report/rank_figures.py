"""The figures of a profiled run, from which :mod:`.diagnosis` finds what makes its steps long.

If ranks wait for each other, a step takes as long as the slowest rank's own work plus that rank's exposed
communication::

    own work of a rank     its step without "communication" and "stage_wait"
    step                   max over ranks of own work + exposed communication of the slowest rank
    saving of a remedy     step - step with the part that the remedy removes
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from lightning_multigpu.planning.pipelines.stage_costs import ChainFigures

PHASES = (
    "data_wait",
    "device_transfer",
    "forward",
    "backward",
    "communication",
    "stage_wait",
    "optimizer",
    "callbacks",
    "other",
)
"""In the order in which reports show them.

"communication" is the exposed part of the transfers; "stage_wait" the time in which a rank of a pipeline waits for
messages of other stages; "callbacks" the time of callbacks and hooks of the module; "other" the rest of Lightning's
loop: results of steps, loggers, learning-rate schedulers, the progress bar.
"""


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """A rank's profiled steps; times are medians over its optimizer steps, in seconds.

    Attributes:
        node: number of its host.
        steps: the number of its profiled steps.
        phases_s: seconds of a step by phase, see :data:`PHASES`; where medians
            of phases add up to less than the median step, they are scaled up to it.
        callbacks_s: seconds of a step by callback, for those that take most time.
        hidden_s: time in which transfers were under way behind other phases than "communication" and "stage_wait".
        waits_s: parts of "communication": "gradients" for transfers once in an optimizer step (gradients and weights),
            "activations" for transfers of split layers.
        activations_rate: bytes per second of the transfers of split layers.
        transfers: between ranks, in a step.
        is_metered: whether its strategy measures transfers.
        batches: batches of an optimizer step.
        data_workers: worker processes of its DataLoader; absent if unknown.
        parameters_bytes: of the parameters that it holds.
        launches: the launches of a step's kernels; absent without a GPU.
        reads: functions that wait for values of tensors in a step.
        adding_s: that backward takes longer where its gradients are added to those of an earlier batch.
        model: parts of the model; only of ``ProfilerReport(for_plan=True)``.
    """

    rank: int
    host: str
    node: int = 0
    steps: int = 1
    phases_s: Mapping[str, float]
    callbacks_s: Mapping[str, float] = field(default_factory=dict)
    hidden_s: float = 0.0
    waits_s: Mapping[str, float] = field(default_factory=dict)
    activations_rate: float = 0.0
    transfers: Sequence[TransferSums] = ()
    is_metered: bool = True
    batches: int = 1
    data_workers: int | None = None
    parameters_bytes: int = 0
    launches: LaunchQueue | None = None
    reads: Sequence[ReadValues] = ()
    adding_s: float = 0.0
    model: ModelFigures | None = None

    @property
    def step_s(self) -> float:
        return sum(self.phases_s.values())

    def of(self, *phases: str) -> float:
        return sum(self.phases_s.get(phase, 0.0) for phase in phases)

    @property
    def own_s(self) -> float:
        """The step without waiting for others."""
        return self.step_s - self.of("communication", "stage_wait")


class ReadyGradient(NamedTuple):
    """A gradient's bytes, and the share of backward after which it is ready."""

    size_bytes: int
    share: float


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """Parts of the model's step on one batch, from trial steps.

    Attributes:
        samples: of the batch; 0 if they cannot be counted.
        gradients: in the order in which they are ready; empty where the step runs backward by itself.
        chain: the layers that a pipeline can cut.
        refused: why there are no such layers.
    """

    samples: int
    gradients: Sequence[ReadyGradient] = ()
    chain: ChainFigures | None = None
    refused: str = ""


@dataclass(frozen=True)
class CommonStep:
    """The step that ``ranks`` have in common; there is one rank at least."""

    ranks: Sequence[RankFigures]

    @property
    def seconds(self) -> float:
        """Of the rank with the longest step."""
        return max(rank.step_s for rank in self.ranks)

    @property
    def first_to_wait(self) -> RankFigures:
        """The rank that waits for transfers for the shortest time, and so for no slower rank."""
        return min(self.ranks, key=lambda rank: rank.of("communication"))

    @property
    def exposed_s(self) -> float:
        """Seconds in which the slowest rank waits for transfers; other ranks also wait for that rank."""
        return self.first_to_wait.of("communication")

    def exposed_part_s(self, kind: str) -> float:
        """The part of :attr:`exposed_s` in which "gradients", or "activations" of split layers, travel."""
        return min(self.exposed_s, self.first_to_wait.waits_s.get(kind, 0.0))

    @property
    def who_waits(self) -> str:
        """The subject of a sentence about :attr:`exposed_s`."""
        return f"rank {self.ranks[0].rank} waits" if len(self.ranks) == 1 else "every rank waits at least"

    def with_own(self, own_s: Callable[[RankFigures], float]) -> float:
        """The predicted step if each rank's own work took ``own_s``."""
        return max(map(own_s, self.ranks)) + self.exposed_s

    def saving(self, removed_s: Callable[[RankFigures], float]) -> float:
        """Seconds of the step that are saved if each rank's own work is shorter by ``removed_s``."""
        return self.with_own(lambda rank: rank.own_s) - self.with_own(lambda rank: rank.own_s - removed_s(rank))


@dataclass(frozen=True, kw_only=True)
class TransferSums:
    """The transfers of one operation and group in a step, on average; ``seconds`` with at least one under way."""

    operation: str
    group: str
    group_size: int
    count: float
    size_bytes: float
    sent_bytes: float
    memory_bytes: float
    seconds: float


@dataclass(frozen=True)
class ReadValues:
    """Values of tensors that a function waits for in a step, by ``item()`` and the like.

    ``function`` is "train.py(7): training_step", by the line at which it begins.
    """

    function: str
    count: int
    seconds: float


@dataclass(frozen=True)
class LaunchQueue:
    """Kernels between their launch by the host and their start on the GPU::

        host    L0 L1 L2 L3              launches
        GPU        [k0][k1  ][k2][k3]    at L3, k1 and k2 wait: 2 are queued

    Attributes:
        busy_s: seconds in which at least one kernel runs.
        queued: kernels that wait for their start when another one is launched; the median over all launches.
    """

    kernels: int
    busy_s: float
    queued: int

    @classmethod
    def of(cls, kernels: Sequence[tuple[float, float, float]]) -> LaunchQueue | None:
        """The queue of a step, from the times of each kernel's launch, start and end; None without a kernel."""
        if not kernels:
            return None
        launches = sorted(launch_s for launch_s, _, _ in kernels)
        starts = sorted(start_s for _, start_s, _ in kernels)
        queued = [bisect_left(launches, launch_s) - bisect_right(starts, launch_s) for launch_s in launches]
        busy_s, until_s = 0.0, starts[0]
        for start_s, end_s in sorted((start_s, end_s) for _, start_s, end_s in kernels):
            busy_s += max(0.0, end_s - max(start_s, until_s))
            until_s = max(until_s, end_s)
        return cls(len(kernels), busy_s, max(0, median_low(queued)))
