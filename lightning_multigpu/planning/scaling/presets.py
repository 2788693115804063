"""Presets: machines and models by name, from published figures.

A preset model's computation takes 6 P D operations, 2 forward and 4 backward, for P parameters and D tokens (Kaplan et
al. 2020, arXiv:2001.08361), at a share of the machine's peak: its utilisation. A parameter takes 16 bytes: under mixed
precision 2 + 2 and 12 for Adam (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1), in float32 4 + 4 and 8.
Gradients become ready evenly during backward. Where the layers are known, activations, split layers and stages follow
Korthikanti et al. 2022, arXiv:2205.05198, section 4; embeddings count as spread evenly over the layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from lightning_multigpu.planning.pipelines.pipeline_prediction import PipelinePlan, plan
from lightning_multigpu.planning.pipelines.schedule_order import LOOPED_SCHEDULES, SCHEDULES
from lightning_multigpu.planning.pipelines.stage_costs import LinkCost, PartCost, StageCosts
from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.planning.scaling.links import Link
from lightning_multigpu.planning.scaling.machine_model import Machine
from lightning_multigpu.planning.scaling.model_profile import ModelProfile, Phases, SplitPart
from lightning_multigpu.planning.scaling.step_model import PIPELINES

USUAL_UTILISATION = 0.5
_GRADIENT_PARTS = 128
_NVLINK_LATENCY_S = 5e-6
_SERVED = ("cpu_ps", "sync_ps", "async_ps", "sharded_ps")
_NO_SERVERS = "its optimizer runs on the host's cores, and the preset has figures of GPUs only"
_NO_LAYERS = "the preset does not have the model's layers"


def _node(name: str, peak: float, bytes_per_s: float, nvlink_bytes_per_s: float, gbit_per_s: int = 0) -> Machine:
    """8 GPUs of 80 GB; NVLink's figure counts both directions. A link between nodes has a latency of 20 us."""
    node = Machine(
        name=f"{name}_{gbit_per_s}gbit" if gbit_per_s else name, device_type="cuda", processor=name.upper(), devices=8,
        memory_bytes=80 * 10**9, flops_per_s={"bfloat16": peak}, memory_bytes_per_s=bytes_per_s,
        inside=Link(_NVLINK_LATENCY_S, 2 / nvlink_bytes_per_s),
    )  # fmt: skip
    return node.with_link(gbit_per_s) if gbit_per_s else node


# NVIDIA's data sheets of the A100 80GB SXM and the H100 SXM: dense bf16, memory, NVLink.
_A100, _H100 = ("a100", 312e12, 2.0e12, 600e9), ("h100", 989e12, 3.35e12, 900e9)
# 4 cores at 3 GHz with two 8-wide fused multiply-adds; two channels of DDR4-3200 (25.6 GB/s each), which the cores
# share; a message to another rank is read and written; Gigabit Ethernet.
_LAPTOP = Machine(
    name="laptop", device_type="cpu", processor="4 cores", devices=4, memory_bytes=16 * 10**9,
    flops_per_s={"float32": 3e9 * 2 * 8 * 2}, memory_bytes_per_s=51.2e9 / 4, inside=Link(20e-6, 8 / 51.2e9),
    slowdown=dict.fromkeys(range(1, 5), 1.0),
).with_link(1)  # fmt: skip
_NODES = [(_A100, 0), (_H100, 0), (_A100, 25), (_A100, 100), (_A100, 400), (_H100, 400)]
MACHINES = {each.name: each for each in (_LAPTOP, *(_node(*gpu, gbit) for gpu, gbit in _NODES))}
"""Machines by name; the number is that of the Gbit/s of each node's link."""


@dataclass(frozen=True)
class PresetModel:
    """A published model.

    Attributes:
        sequence: tokens of a sample.
        batch_tokens: of all devices together.
        devices: that share the batch.
        layers, width, heads: of the transformer; 0 if they are not known or not of one kind.
        sample_flops: of a step, for one sample; by default 6 P for each token.
        source: of the figures.
    """

    parameters: float
    batch_tokens: float
    source: str
    sequence: int = 1
    devices: int = 64
    layers: int = 0
    width: int = 0
    heads: int = 0
    sample_flops: float = 0.0

    @property
    def usual_samples(self) -> int:
        """A device's share of the batch, at least one sample."""
        return max(1, round(self.batch_tokens / self.sequence / self.devices))

    def flops(self, samples: float) -> float:
        """Operations of a step with ``samples``."""
        return samples * (self.sample_flops or 6 * self.parameters * self.sequence)

    def layer_activations_bytes(self, samples: float, split: int = 1) -> float:
        """Bytes that a layer saves for backward on each of ``split`` ranks, in mixed precision without recomputation.

        34 s b h + 5 a s^2 b for s tokens, b samples, width h and a heads; split over t ranks, s b h (10 + 24/t) + 5 a
        s^2 b / t.
        """
        tokens = samples * self.sequence
        return tokens * self.width * (10 + 24 / split) + 5 * self.heads * self.sequence * tokens / split


def _gpt3(parameters: float, layers: int, width: int, heads: int, batch_tokens: float) -> PresetModel:
    source = "Brown et al. 2020, arXiv:2005.14165, table 2.1; a device has 1/64 of the batch"
    return PresetModel(parameters, batch_tokens, source, 2048, 64, layers, width, heads)


MODELS = {
    "seed": PresetModel(10e9, 32 * 128, "Ray 2024, 'Will it scale to N GPUs?'", sequence=128, devices=32),
    "gpt3_125m": _gpt3(125e6, 12, 768, 12, 2**19),
    "gpt3_350m": _gpt3(350e6, 24, 1024, 16, 2**19),
    "gpt3_760m": _gpt3(760e6, 24, 1536, 16, 2**19),
    "gpt3_1.3b": _gpt3(1.3e9, 24, 2048, 24, 2**20),
    "gpt3_2.7b": _gpt3(2.7e9, 32, 2560, 32, 2**20),
    "gpt3_6.7b": _gpt3(6.7e9, 32, 4096, 32, 2**21),
    "gpt3_13b": _gpt3(13e9, 40, 5140, 40, 2**21),
    "gpt3_175b": _gpt3(175e9, 96, 12288, 96, 3.2e6),
    "clip": PresetModel(
        623.26e6, 32_768, "Radford et al. 2021, arXiv:2103.00020, section 2.5: RN50x64, 18 days on 592 V100; size "
        "and operations as OpenCLIP counts them", devices=592, sample_flops=3 * 552.65e9,
    ),
}  # fmt: skip
"""Models by name."""


def peak_flops_per_s(machine: Machine) -> float:
    """Of the fastest dtype."""
    return max(machine.flops_per_s.values())


def _optimizer_s(held: HeldBytes, machine: Machine) -> float:
    """Parameters and states are read and written, gradients read."""
    return (2 * (held.parameters_bytes + held.optimizer_bytes) + held.gradients_bytes) / machine.memory_bytes_per_s


def _refused(machine: Machine) -> dict[str, str]:
    return {} if machine.device_type == "cpu" else dict.fromkeys(_SERVED, _NO_SERVERS)


def profile_of(
    name: str,
    model: PresetModel,
    machine: Machine,
    sizes: Iterable[int] = (),
    *,
    samples: int = 0,
    utilisation: float = USUAL_UTILISATION,
    gradient_bytes: int = 2,
) -> ModelProfile:
    """The profile of a preset model, which nobody has measured.

    Args:
        sizes: ranks over which layers are split, or which have stages.
        samples: of a device's batch, or of that of ranks which share one; by default ``usual_samples``.
        utilisation: the share of the machine's peak that computation reaches.
        gradient_bytes: of a parameter's gradient: 2 under mixed precision, 4 in float32.
    """
    samples = samples or model.usual_samples
    compute_s = model.flops(samples) / (peak_flops_per_s(machine) * utilisation)

    def part(share: float) -> tuple[HeldBytes, Phases]:
        count = round(model.parameters * share)
        held = HeldBytes(*(count * n for n in (gradient_bytes, gradient_bytes, 16 - 2 * gradient_bytes)))
        forward_s = share * compute_s / 3
        return held, Phases(
            forward_s=forward_s, backward_s=2 * forward_s, optimizer_s=_optimizer_s(held, machine)
        )  # fmt: skip

    held, phases = part(1.0)
    message = 2 * samples * model.sequence * model.width
    splits = {}
    for size in sizes if model.layers else ():
        if model.heads % size == 0:
            part_held, part_phases = part(1 / size)
            splits[size] = SplitPart(
                num_ranks=size, phases={1: part_phases}, held=part_held,
                collectives=[("all_reduce", message)] * (4 * model.layers),
                activations_bytes=round(model.layers * model.layer_activations_bytes(samples, size)),
            )  # fmt: skip
    names = () if model.layers else (*PIPELINES, "tensor_split", "hybrid")
    parts = _GRADIENT_PARTS
    return ModelProfile(
        name=name, samples=samples, parameters=round(model.parameters), held=held, flops=model.flops(samples),
        activations_bytes=round(model.layers * model.layer_activations_bytes(samples)),
        gradients=[(held.gradients_bytes // parts, (each + 1) / parts) for each in range(parts)],
        phases={1: phases}, splits=splits,
        pipelines=list(_pipelines(model, held, phases, samples, sizes)) if model.layers else (),
        refused={**_refused(machine), **dict.fromkeys(names, _NO_LAYERS)},
    )  # fmt: skip


def _pipelines(
    model: PresetModel, held: HeldBytes, phases: Phases, samples: int, sizes: Iterable[int]
) -> Iterator[PipelinePlan]:
    """Pipelines of equal layers, for each number of micro-batches that divides the batch, up to 4 for each rank."""
    layers, kinds = model.layers, (held.parameters_bytes, held.gradients_bytes, held.optimizer_bytes)
    for size, schedule in product(sizes, SCHEDULES):
        a_rank = 2 if schedule in LOOPED_SCHEDULES else 1
        stages = a_rank * size
        bounds = [(i * layers // stages, (i + 1) * layers // stages) for i in range(stages)]
        counts = [sum(stop - start for start, stop in bounds[rank::size]) for rank in range(size)]
        for number in (n for n in range(1, 4 * size + 1) if samples % n == 0 and stages <= layers):
            layer = PartCost(
                phases.forward_s / layers / number, phases.backward_s / layers / number,
                2 * samples * model.sequence * model.width // number,
                round(model.layer_activations_bytes(samples / number)),
            )  # fmt: skip
            costs = StageCosts(
                [PartCost(), *[layer] * layers, PartCost()], [sum(kinds) // layers] * layers, LinkCost(0.0, 0.0),
                schedule=schedule, num_ranks=size, stages_per_rank=a_rank, num_micro_batches=number,
            )  # fmt: skip
            yield plan(
                schedule, costs, bounds, one_device_s=phases.step_s,
                parameter_bytes=[kinds[0] // layers] * layers,
                held=[HeldBytes(*(count * each // layers for each in kinds)) for count in counts],
            )  # fmt: skip


def moved(profile: ModelProfile, machine: Machine, utilisation: float = USUAL_UTILISATION) -> ModelProfile:
    """A model that was measured elsewhere, on ``machine``.

    Forward and backward take the counted operations at ``utilisation`` of the peak, divided between them, the layers
    and the parts as measured; the optimizer takes its bytes over the memory's bandwidth. Loading of batches and
    Lightning's loop take as long as measured; the bytes of gradients and of tensors saved for backward stay.

    Raises:
        ValueError: the model's operations were not counted.
    """
    if not profile.flops:
        raise ValueError(f"{profile.name} has no matrix product that torch can count, so its time on "
                         f"{machine.name} is unknown; plan on a machine of 'lightning-multigpu calibrate'")  # fmt: skip
    compute_s = profile.flops / (peak_flops_per_s(machine) * utilisation)
    alone = profile.phases[1]
    factor = compute_s / (alone.forward_s + alone.backward_s)

    def there(phases: Phases, crowd: int, held: HeldBytes) -> Phases:
        beside = profile.at_once(crowd, 1.0)  # a part that was measured beside others, over the whole beside others
        times = phases.times(compute_s / (beside.forward_s + beside.backward_s))
        optimizer_s = _optimizer_s(held, machine)
        return replace(phases, forward_s=times.forward_s, backward_s=times.backward_s, optimizer_s=optimizer_s)

    splits = {}
    for size, part in profile.splits.items():
        crowd = min(part.phases)
        splits[size] = replace(part, phases={1: there(part.phases[crowd], crowd, part.held)})
    pipelines = []
    for planned in profile.pipelines:
        stages = (replace(s, forward_s=factor * s.forward_s, backward_s=factor * s.backward_s) for s in planned.stages)
        pipelines.append(replace(planned, stages=tuple(stages)))
    return replace(
        profile, phases={1: there(alone, 1, profile.held)}, splits=splits, pipelines=pipelines,
        refused={**profile.refused, **_refused(machine)},
    )  # fmt: skip
