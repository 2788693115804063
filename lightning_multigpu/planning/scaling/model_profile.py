"""The profile of a model: what a training step takes on one device, as measured or by the model's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from lightning_multigpu.planning.pipelines.stage_costs import ChainFigures
from lightning_multigpu.planning.pipelines.timeline import HeldBytes


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Seconds of a training step on one device.

    Attributes:
        input_s: waiting for the next batch, and moving it to the device.
        adding_s: that backward takes longer where its gradients are added to those of an earlier batch.
        other_s: Lightning's loop and the module's hooks.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    input_s: float = 0.0
    adding_s: float = 0.0
    other_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s + self.input_s + self.other_s

    def times(self, factor: float) -> Phases:
        times = {name: value * factor for name, value in asdict(self).items() if name.endswith("_s")}
        return replace(self, **times)


@dataclass(frozen=True, kw_only=True)
class SplitPart:
    """One rank's part of a model whose layers are split.

    Attributes:
        phases: the step of the part alone, without collectives.
        collectives: operation and bytes of each collective of a step.
    """

    phases: Phases
    collectives: Sequence[tuple[str, int]]
    held: HeldBytes
    activations_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model with its batch and its optimizers.

    Attributes:
        samples: of a batch of one rank; 0 if they cannot be counted.
        divides_batch: whether data-parallel ranks divide that batch among them, instead of having one each.
        held: bytes that one device holds.
        activations_bytes: saved for backward on one device.
        gradients: bytes of each gradient and the share of backward after which it is ready, in that order.
        phases: the step of one device, alone on its machine.
        splits: ranks that split layers -> one rank's part.
        chain: the layers that a pipeline can cut.
        refused: strategy, "strategy on N ranks" or "pipelines" -> why it cannot train this model.
        slowdown: ranks that compute at once on one machine -> the time of forward and backward over that alone.
        disturbed: the share of the processors, or of the GPU, that other processes took during the measurement.
    """

    name: str
    samples: int
    parameters: int
    held: HeldBytes
    activations_bytes: int
    gradients: Sequence[tuple[int, float]]
    phases: Phases
    splits: Mapping[int, SplitPart] = field(default_factory=dict)
    chain: ChainFigures | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    slowdown: Mapping[int, float] = field(default_factory=dict)
    disturbed: float = 0.0
    divides_batch: bool = False

    @property
    def gradient_bytes(self) -> int:
        """S: bytes of all gradients."""
        return self.held.gradients_bytes

    def phases_of(self, crowd: int, part: Phases | None = None) -> Phases:
        """The step, or that of a part, beside ``crowd`` - 1 other ranks; as alone where that was not measured."""
        return (part or self.phases).times(self.slowdown.get(crowd, 1.0))

    def with_batches(self, factor: float) -> ModelProfile:
        """The model with batches ``factor`` times as large; forward and backward take as many times as long.

        That is so where a batch already fills the device, and too much where it does not.
        """
        longer = {name: getattr(self.phases, name) * factor for name in ("forward_s", "backward_s", "input_s")}
        return replace(
            self,
            samples=round(self.samples * factor),
            activations_bytes=round(self.activations_bytes * factor),
            phases=replace(self.phases, **longer),
            splits={},
        )
