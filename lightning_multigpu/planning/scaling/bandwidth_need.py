"""Bandwidth need: what a node's link has to carry so that communication hides behind computation.

From Ray 2024, "Will it scale to N GPUs?": P parameters, D tokens in the batch of all nodes, N nodes::

    computation     6 P D operations / (N nodes x devices x peak x utilisation)
    communication   2 P bytes of gradients / bandwidth              <= computation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_DEVICES, _PEAK, _UTILISATION = 8, 300e12, 0.5


@dataclass(frozen=True)
class BandwidthNeed:
    """The need of data parallel training: P parameters, and D tokens in the batch of all nodes."""

    parameters: float
    tokens: float
    node_flops_per_s: float = _DEVICES * _PEAK * _UTILISATION
    gradient_bytes: int = 2

    @property
    def flops(self) -> float:
        return 6 * self.parameters * self.tokens

    def step_s(self, nodes: int) -> float:
        return self.flops / (nodes * self.node_flops_per_s)

    def gbit_per_s(self, nodes: int) -> float:
        """Gbit/s of a node's link, if each node sends all gradients once."""
        return 8e-9 * self.gradient_bytes * self.parameters / self.step_s(nodes)

    def ring_gbit_per_s(self, nodes: int) -> float:
        """Gbit/s of a node's link for a ring all-reduce, which sends 2 (n-1) / n times the gradients."""
        return 2 * (nodes - 1) / nodes * self.gbit_per_s(nodes)


def source_arithmetic(nodes: Sequence[int]) -> list[str]:
    """The source's example line by line, each with its assumption, and where it is not what its inputs give."""
    p, tokens = 10e9, 32 * 128
    stated, given = BandwidthNeed(p, 10 * tokens), BandwidthNeed(p, tokens)
    lines = [
        "The source's example: 10e9 parameters, nodes of 8 A100, data parallel in mixed precision",
        f"  computation of a step: 6 P D = {stated.flops / 1e14:.3f}e14 FLOPs (2 forward and 4 backward for each "
        "parameter and token; no attention scores, no optimizer)",
        f"  a node: 8 x 300e12 FLOP/s x 50 % = {stated.node_flops_per_s / 1e14:g}e14 FLOP/s (300e12 is an A100's "
        "312e12, rounded; the utilisation is assumed)",
        f"  a step on N nodes: {stated.step_s(1):.3f}/N s, about 2/N s (the batch is divided among the nodes)",
        f"  gradients: {2 * p / 1e9:g} GB (2 bytes each), sent once by each node",
        f"  bandwidth of a node: N x {stated.gbit_per_s(1):.1f} Gb/s; N x 80 Gb/s with 2/N s (computation hides "
        "communication exactly, also that of the first and the last gradient)",
        "  in general: IB >= N x P GB/s with P in billions (2 P bytes in 2/N s)",
    ]
    lines += [
        f"  {n} nodes: {80 * n} Gb/s; exactly {stated.gbit_per_s(n):.1f}; {stated.ring_gbit_per_s(n):.1f} for a ring "
        f"all-reduce, which sends 2(n-1)/n = {2 * (n - 1) / n:g} times the gradients"
        for n in nodes
    ]
    return [
        *lines,
        "  4 adapters x 100 Gb/s / 8 = 50 GB/s in theory; 42 GB/s measured = 84 % (Lambda Hyperplane V100)",
        "What to know before using it:",
        f"  6 x 10e9 x (32 x 128 tokens) is {given.flops / 1e14:.4f}e14, a tenth of the source's figure. Its other "
        "figures are those of 10 times the tokens, as in 320 x 128.",
        f"  With 32 x 128 tokens: {given.step_s(1):.4f}/N s a step, bandwidth of a node N x {given.gbit_per_s(1):.0f} "
        f"Gb/s, for 4 nodes {given.gbit_per_s(4):,.0f} Gb/s.",
        "  P cancels, as computation and gradients both grow with it: the bandwidth is N x a node's FLOP/s / (3 D) "
        "bytes/s. N x P GB/s holds only where a step takes 2/N s.",
    ]
