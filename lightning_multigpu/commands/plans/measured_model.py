"""The figures of a user's model for a plan, from profiles of one device: whole, and in parts of split layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_multigpu.commands.plans.short_run import Collectives, PlannedModule, ShortRunError, short_run
from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.planning.scaling.machine_model import QUIET, World
from lightning_multigpu.planning.scaling.model_profile import ModelProfile, Phases, SplitPart
from lightning_multigpu.report.document import RunDocument
from lightning_multigpu.report.schema import ReportError

_ATTEMPTS = 3
_OURS = ("ProfilerReport.", "ThroughputMonitor.", "CommunicationMonitor.", "DeviceUtilizationMonitor.")


def split_sizes(worlds: Iterable[World], names: Sequence[str]) -> list[int]:
    """The numbers of ranks over which the strategies ``names`` split layers in ``worlds``."""
    sizes = {world.size for world in worlds if world.size > 1}
    if "hybrid" in names:  # whose pipelines and split layers have some of the ranks
        return sorted({size for largest in sizes for size in range(2, largest + 1) if largest % size == 0})
    return sorted(sizes) if "tensor_split" in names else []


def measured_model(
    subject: PlannedModule, sizes: Sequence[int], *, tell: Callable[[str], object] = lambda what: None
) -> ModelProfile:
    """The figures of a model, whose layers may be split over ``sizes`` ranks; its weights do not change.

    Args:
        tell: called with what is measured next.

    Raises:
        ShortRunError: the training step raises an error on one device, or there is no batch.
    """
    document, _ = _quiet_run(subject, 1, tell, "the whole model, and its layers one by one")
    refused: dict[str, str] = {}
    splits: dict[int, SplitPart] = {}
    for size in sizes:
        try:
            part, collectives = _quiet_run(subject, size, tell, f"its layers split over {size} ranks")
        except ShortRunError as error:
            refused[f"tensor_split on {size} ranks"] = str(error)
        else:
            splits[size] = SplitPart(
                num_ranks=size,
                phases=phases_of(part),
                collectives=collectives,
                held=_held(part),
                activations_bytes=_activations(part),
            )
    divides = any(hasattr(callback, "check_before_launch") for callback in subject.callbacks)
    return model_of(document, splits=splits, refused=refused, divides_batch=divides)


def _quiet_run(
    subject: PlannedModule, num_ranks: int, tell: Callable[[str], object], what: str
) -> tuple[RunDocument, Collectives]:
    """The least disturbed of up to three runs; one where others take little."""
    tried: list[tuple[RunDocument, Collectives]] = []
    while len(tried) < _ATTEMPTS and (not tried or min(map(_others, tried)) > QUIET):
        tell(f"{what}, again: other processes are busy" if tried else what)
        tried.append(short_run(subject, num_ranks))
    return min(tried, key=_others)


def _others(run: tuple[RunDocument, Collectives]) -> float:
    document, _ = run
    return (document.profile.ranks[0].others or 0.0) if document.profile is not None else 0.0


def model_of(
    document: RunDocument,
    *,
    splits: dict[int, SplitPart] | None = None,
    refused: dict[str, str] | None = None,
    divides_batch: bool = False,
) -> ModelProfile:
    """The model of a profile of one device, with further fields of :class:`.ModelProfile`.

    Raises:
        ReportError: the profile is of several ranks, or lacks the figures for a plan.
    """
    model = document.profile.ranks[0].model if document.profile is not None else None
    if document.world.size > 1 or model is None:
        raise ReportError(
            "this is no profile of one device for plans; train on one device with ProfilerReport(for_plan=True)"
        )
    held = _held(document)
    return ModelProfile(
        name=document.model.class_.rpartition(".")[2],
        samples=model.samples,
        parameters=document.model.parameters,
        held=held,
        activations_bytes=_activations(document),
        flops=model.flops,
        gradients=model.gradients or [(held.gradients_bytes, 1.0)],
        phases=phases_of(document),
        splits=splits or {},
        chain=model.chain,
        refused={**({"pipelines": model.refused} if model.refused else {}), **(refused or {})},
        divides_batch=divides_batch,
        disturbed=_others((document, [])),
    )


def phases_of(document: RunDocument) -> Phases:
    """The step of one batch; callbacks of the profile itself do not count."""
    assert document.profile is not None
    [rank] = document.profile.ranks
    ours_s = sum(seconds for name, seconds in rank.callbacks_s.items() if name.startswith(_OURS))
    return Phases(
        forward_s=rank.of("forward") / rank.batches,
        backward_s=(rank.of("backward") - (rank.batches - 1) * rank.adding_s) / rank.batches,
        optimizer_s=rank.of("optimizer"),
        input_s=rank.of("data_wait", "device_transfer") / rank.batches,
        adding_s=rank.adding_s,
        other_s=max(0.0, rank.of("callbacks", "other") - ours_s) / rank.batches,
    )


def _held(document: RunDocument) -> HeldBytes:
    assert document.memory is not None
    [held] = document.memory
    return HeldBytes(held.parameters_bytes, held.gradients_bytes, held.optimizer_bytes)


def _activations(document: RunDocument) -> int:
    assert document.memory is not None
    return document.memory[0].activations_bytes or 0
