"""Presets: machines and models by name, from published figures, of which nothing was measured here.

A model's step takes 6 P D operations, 2 forward and 4 backward, for P parameters and D tokens (Kaplan et al. 2020,
arXiv:2001.08361), at half of the machine's peak. A parameter takes 2 + 2 + 12 bytes: mixed precision with Adam
(Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1). Gradients become ready evenly during backward. Activations,
split layers and stages follow Korthikanti et al. 2022, arXiv:2205.05198, section 4, without recomputation; embeddings
count as spread evenly over the layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from lightning_multigpu.planning.pipelines.pipeline_prediction import ChainFigures, MeasuredParts
from lightning_multigpu.planning.pipelines.stage_costs import PartCost
from lightning_multigpu.planning.pipelines.timeline import NOTHING, HeldBytes
from lightning_multigpu.planning.scaling.links import Link
from lightning_multigpu.planning.scaling.machine_model import Machine
from lightning_multigpu.planning.scaling.model_profile import ModelProfile, Phases, SplitPart

_PARTS = 128
_UNIT = Phases(forward_s=1 / 3, backward_s=2 / 3)
_SERVED = ("cpu_ps", "sync_ps", "async_ps", "sharded_ps")
_NO_SERVERS = "its optimizer runs on the host's cores, and the preset has figures of GPUs only"


def _node(name: str, peak: float, bytes_per_s: float, nvlink_bytes_per_s: float) -> Machine:
    """8 GPUs of 80 GB; NVLink's figure counts both directions."""
    return Machine(
        name=name, device_type="cuda", processor=name.upper(), devices=8, memory_bytes=80 * 10**9,
        flops_per_s={"bfloat16": peak}, memory_bytes_per_s=bytes_per_s, inside=Link(5e-6, 2 / nvlink_bytes_per_s),
    )  # fmt: skip


# NVIDIA's data sheets of the A100 80GB SXM and the H100 SXM: dense bf16, memory, NVLink.
_A100, _H100 = _node("a100", 312e12, 2.0e12, 600e9), _node("h100", 989e12, 3.35e12, 900e9)
# 4 cores at 3 GHz with two 8-wide fused multiply-adds; two channels of DDR4-3200 (25.6 GB/s each), which the cores
# share; a message to another rank is read and written; Gigabit Ethernet.
_LAPTOP = Machine(
    name="laptop", device_type="cpu", processor="4 cores", devices=4, memory_bytes=16 * 10**9,
    flops_per_s={"float32": 3e9 * 2 * 8 * 2}, memory_bytes_per_s=51.2e9 / 4, inside=Link(20e-6, 8 / 51.2e9),
    slowdown=dict.fromkeys(range(1, 5), 1.0),
).with_link(1)  # fmt: skip
_LINKED = [(_A100, 25), (_A100, 100), (_A100, 400), (_H100, 400)]
MACHINES = {each.name: each for each in (_LAPTOP, _A100, _H100)} | {
    f"{node.name}_{gbit}gbit": replace(node.with_link(gbit), name=f"{node.name}_{gbit}gbit") for node, gbit in _LINKED
}
"""Machines by name; the number is that of the Gbit/s of each node's link, whose latency is 20 us."""


class PresetModel(NamedTuple):
    """A transformer; ``samples`` are those of a device's batch, ``sequence`` the tokens of a sample."""

    parameters: float
    layers: int
    width: int
    heads: int
    samples: int
    sequence: int = 2048

    def layer_activations_bytes(self, samples: float, split: int = 1) -> float:
        """Saved by a layer on each of t = ``split`` ranks: s b h (10 + 24/t) + 5 a s^2 b / t in 16 bits."""
        tokens = samples * self.sequence
        return tokens * self.width * (10 + 24 / split) + 5 * self.heads * self.sequence * tokens / split


MODELS = {
    "gpt3_125m": PresetModel(125e6, 12, 768, 12, 4),
    "gpt3_350m": PresetModel(350e6, 24, 1024, 16, 4),
    "gpt3_760m": PresetModel(760e6, 24, 1536, 16, 4),
    "gpt3_1.3b": PresetModel(1.3e9, 24, 2048, 24, 8),
    "gpt3_2.7b": PresetModel(2.7e9, 32, 2560, 32, 8),
    "gpt3_6.7b": PresetModel(6.7e9, 32, 4096, 32, 16),
    "gpt3_13b": PresetModel(13e9, 40, 5140, 40, 16),
    "gpt3_175b": PresetModel(175e9, 96, 12288, 96, 24),
}
"""Brown et al. 2020, arXiv:2005.14165, table 2.1, as printed; a device has 1/64 of the batch."""


def even_gradients(size_bytes: int) -> list[tuple[int, float]]:
    """Gradients of equal parts of a model, which become ready one after another."""
    return [(size_bytes // _PARTS, (each + 1) / _PARTS) for each in range(_PARTS)]


def profile_of(name: str, model: PresetModel, sizes: Iterable[int] = (), *, samples: int = 0) -> ModelProfile:
    """A preset model's profile on a device that computes forward and backward in a second; see :func:`moved`.

    ``sizes`` are numbers of ranks over which layers are split; ``samples`` those of a device's batch, or of that of
    ranks which share one, by default the model's.
    """
    samples = samples or model.samples
    message = 2 * samples * model.sequence * model.width

    def held(size: int) -> HeldBytes:
        count = round(model.parameters / size)
        return HeldBytes(2 * count, 2 * count, 12 * count)

    splits = {
        size: SplitPart(
            num_ranks=size, phases=_UNIT.times(1 / size), held=held(size),
            collectives=[("all_reduce", message)] * (4 * model.layers),
            activations_bytes=round(model.layers * model.layer_activations_bytes(samples, size)),
        )
        for size in sizes if model.heads % size == 0
    }  # fmt: skip
    return ModelProfile(
        name=name, samples=samples, parameters=round(model.parameters), held=held(1),
        flops=6 * model.parameters * model.sequence * samples,
        activations_bytes=round(model.layers * model.layer_activations_bytes(samples)),
        gradients=even_gradients(held(1).gradients_bytes), phases=_UNIT, splits=splits,
        chain=_chain(model, samples, message, held(model.layers)),
    )  # fmt: skip


def _chain(model: PresetModel, samples: int, message: int, held: HeldBytes) -> ChainFigures:
    """Equal layers."""
    each = 1 / model.layers
    saved = round(model.layer_activations_bytes(samples))
    layer = PartCost(_UNIT.forward_s * each, _UNIT.backward_s * each, message, saved)
    parts = MeasuredParts(samples=samples, parts=[PartCost(), *[layer] * model.layers, PartCost()])
    return ChainFigures(name="layers", measured=[parts], held=[NOTHING, *[held] * model.layers, NOTHING])


def moved(profile: ModelProfile, machine: Machine, utilisation: float = 0.5) -> ModelProfile:
    """A model that was measured elsewhere, or nowhere, on ``machine``.

    Forward and backward take the counted operations at ``utilisation`` of the fastest dtype's peak, divided between
    them, the layers and the parts as measured; the optimizer reads and writes parameters and states, and reads
    gradients. Loading of batches and Lightning's loop take as long as measured.

    Raises:
        ValueError: the model's operations were not counted.
    """
    if not profile.flops:
        raise ValueError(f"{profile.name} has no matrix product that torch can count, so its time on "
                         f"{machine.name} is unknown; plan on a machine of 'lightning-multigpu calibrate'")  # fmt: skip
    compute_s = profile.flops / (max(machine.flops_per_s.values()) * utilisation)

    alone = profile.phases
    factor = compute_s / (alone.forward_s + alone.backward_s)

    def there(phases: Phases, held: HeldBytes) -> Phases:
        times = phases.times(factor)
        moved_bytes = 2 * (held.parameters_bytes + held.optimizer_bytes) + held.gradients_bytes
        optimizer_s = moved_bytes / machine.memory_bytes_per_s
        return replace(phases, forward_s=times.forward_s, backward_s=times.backward_s, optimizer_s=optimizer_s)

    refused = {} if machine.device_type == "cpu" else dict.fromkeys(_SERVED, _NO_SERVERS)
    return replace(
        profile, phases=there(alone, profile.held), refused={**profile.refused, **refused},
        splits={n: replace(part, phases=there(part.phases, part.held)) for n, part in profile.splits.items()},
        chain=profile.chain and profile.chain.times(factor),
    )  # fmt: skip


def seed(nodes: Iterable[int]) -> Iterator[str]:
    """The example of Ray 2024, "Will it scale to N GPUs?", with what it assumes, and where its inputs give another."""
    yield """\
The source's example: 10e9 parameters, nodes of 8 A100, data parallel in mixed precision
  computation of a step: 6 P D = 24.576e14 FLOPs (2 forward and 4 backward for each parameter and token; no attention
    scores, no optimizer)
  a node: 8 x 300e12 FLOP/s x 50 % = 12e14 FLOP/s (300e12 is an A100's 312e12, rounded; the utilisation is assumed)
  a step on N nodes: 2.048/N s, about 2/N s (the batch is divided among the nodes)
  gradients: 20 GB (2 bytes each), sent once by each node
  bandwidth of a node: N x 78.1 Gb/s; N x 80 Gb/s with 2/N s (computation hides communication exactly, also that of the
    first and the last gradient)
  in general: IB >= N x P GB/s with P in billions (2 P bytes in 2/N s)"""
    for n in nodes:
        ring = 2 * (n - 1) / n
        yield (f"  {n} nodes: {80 * n} Gb/s; exactly {78.125 * n:.1f}; {ring * 78.125 * n:.1f} for a ring all-reduce, "
               f"which sends 2(n-1)/n = {ring:g} times the gradients")  # fmt: skip
    yield """\
  4 adapters x 100 Gb/s / 8 = 50 GB/s in theory; 42 GB/s measured = 84 % (Lambda Hyperplane V100)
What to know before using it:
  6 x 10e9 x (32 x 128 tokens) is 2.4576e14, a tenth of the source's figure. Its other figures are those of 10 times the
  tokens, as in 320 x 128.
  With 32 x 128 tokens: 0.2048/N s a step, bandwidth of a node N x 781 Gb/s, for 4 nodes 3,125 Gb/s.
  P cancels, as computation and gradients both grow with it: the bandwidth is N x a node's FLOP/s / (3 D) bytes/s. N x P
  GB/s holds only where a step takes 2/N s."""
