"""Presets: machines and models by name, from published figures, of which nothing was measured here.

A model's step takes 6 P D operations, 2 forward and 4 backward, for P parameters and D tokens (Kaplan et al. 2020,
arXiv:2001.08361), at half of the machine's peak. A parameter takes 2 + 2 + 12 bytes: mixed precision with Adam
(Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1). Gradients become ready evenly during backward. Activations are
those of Korthikanti et al. 2022, arXiv:2205.05198, section 4, without recomputation. Stages and split layers are not
known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.planning.scaling.machine import Link, Machine
from lightning_multigpu.planning.scaling.model_profile import ModelProfile, Phases

_PARTS = 128


class Node(NamedTuple):
    """A node of NVIDIA's data sheets: GPUs, their dense operations a second, bytes a second of memory and NVLink."""

    devices: int
    memory_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    gbit_per_s: float = 0.0

    def machine(self, name: str) -> Machine:
        """NVLink's figure counts both directions; the latency between nodes is 20 us."""
        node = Machine(
            name=name, device_type="cuda", devices=self.devices, memory_bytes=self.memory_bytes,
            inside=Link.straight(5e-6, 2 / self.nvlink_bytes_per_s),
        )  # fmt: skip
        return node.with_link(self.gbit_per_s) if self.gbit_per_s else node


_A100, _H100 = Node(8, 80 * 10**9, 312e12, 2.0e12, 600e9), Node(8, 80 * 10**9, 989e12, 3.35e12, 900e9)  # SXM, bf16
NODES = {"a100": _A100, "h100": _H100} | {
    f"{name}_{gbit}gbit": node._replace(gbit_per_s=gbit)
    for name, node, gbit in (("a100", _A100, 25), ("a100", _A100, 100), ("a100", _A100, 400), ("h100", _H100, 400))
}
"""Machines by name; the number is that of the Gbit/s of each node's link."""


class PresetModel(NamedTuple):
    """A transformer; ``samples`` of 2,048 tokens are those of a device's batch."""

    parameters: float
    layers: int
    width: int
    heads: int
    samples: int


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
TOKENS = 2048


def profile_of(name: str, node: Node, samples: int = 0) -> ModelProfile:
    """A preset model on a device of ``node``, with ``samples`` in a device's batch, by default the model's."""
    model = MODELS[name]
    samples = samples or model.samples
    tokens = samples * TOKENS  # a layer saves s b h 34 + 5 a s^2 b bytes in 16 bits
    activations = model.layers * tokens * (34 * model.width + 5 * model.heads * TOKENS)
    return computed(name, model.parameters, (2, 2, 12), samples, 6 * model.parameters * tokens, node, activations)


def computed(
    name: str, parameters: float, bytes_: tuple[int, int, int], samples: int, flops: float, node: Node,
    activations: int = 0,
) -> ModelProfile:  # fmt: skip
    """A model of so many operations a step; ``bytes_`` of a parameter, its gradient and its optimizer states.

    The optimizer reads and writes parameters and states, and reads gradients.
    """
    held = HeldBytes(*(round(parameters) * each for each in bytes_))
    compute_s = flops / (0.5 * node.flops_per_s)
    moved_bytes = 2 * (held.parameters_bytes + held.optimizer_bytes) + held.gradients_bytes
    why = "the preset has figures of GPUs only"
    return ModelProfile(
        name=name, samples=samples, parameters=round(parameters), held=held, activations_bytes=activations,
        gradients=[(held.gradients_bytes // _PARTS, (each + 1) / _PARTS) for each in range(_PARTS)],
        phases=Phases(
            forward_s=compute_s / 3, backward_s=2 / 3 * compute_s, optimizer_s=moved_bytes / node.memory_bytes_per_s
        ),
        refused=dict.fromkeys(("cpu_ps", "sync_ps", "async_ps", "sharded_ps"), f"its optimizer runs on the host: {why}")
        | {"pipelines": "stages of a preset's model are not known"},
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
