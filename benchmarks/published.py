"""Published headline figures beside what the planner says with the inputs that the publication states.

    python -m benchmarks.published

Nothing is measured and nothing is fitted. What a publication does not state is assumed, and the last column says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightning_multigpu.planning.pipelines.timeline import bubble, theoretical
from lightning_multigpu.planning.scaling.machine import Link, World, ring_all_reduce_s, servers_s
from lightning_multigpu.planning.scaling.presets import MODELS, NODES, TOKENS, Node, computed
from lightning_multigpu.planning.scaling.step_model import Candidate, Prediction, one_device, predict

_P100 = Node(4, 16 * 10**9, 9.3e12, 732e9, 32e9, 25)
_V100 = Node(8, 32 * 10**9, 15.7e12, 900e9, 300e9, 100)
_IMAGES = {
    "Inception V3": (27.2e6, 5.71e9), "ResNet-101": (44.5e6, 7.80e9), "VGG-16": (138.4e6, 15.47e9),
    "ResNet-50": (25.6e6, 4.09e9),
}  # fmt: skip
"""torchvision's parameters, and multiply-adds of an image."""


class Row(NamedTuple):
    """A published figure, the planner's, and the inputs; ``published`` is None where the publication has no number."""

    what: str
    published: float | None
    planned: float
    unit: str
    inputs: str


def rows() -> Iterator[Row]:
    """All comparisons."""
    yield from _data_parallel()
    yield from _pipelines()
    yield from _memory_and_servers()
    yield from _computation()


def _data_parallel() -> Iterator[Row]:
    inputs = "512 P100 (9.3 TFLOP/s, 50 %), PCIe 16 GB/s, 4 a host, batch 64, float32, messages of 64 MiB"
    for name, published in (("Inception V3", 90), ("ResNet-101", 90), ("VGG-16", 68)):
        found, one = _ring(name, _P100, World(128, 4), 64)
        at_end = one.step_s / (one.step_s + found.exposed_s + found.hidden_s)
        yield Row(f"Horovod, {name}: efficiency", published, 100 * found.efficiency(one), "%", inputs)
        yield Row("the same if nothing hides behind backward", published, 100 * at_end, "%", "as above")
    found, one = _ring("ResNet-50", _V100, World(32, 8), 25)
    inputs = "'near-linear' has no number; V100 (15.7 TFLOP/s, 50 %), 8 a host, 100 Gbit/s, batch 64, float32, 25 MiB"
    yield Row("PyTorch DDP, ResNet-50, 256 GPUs: efficiency", None, 100 * found.efficiency(one), "%", inputs)


def _ring(name: str, node: Node, world: World, bucket_mb: int) -> tuple[Prediction, Prediction]:
    parameters, multiply_adds = _IMAGES[name]
    profile, machine = computed("", parameters, (4, 4, 8), 64, 64 * 3 * 2 * multiply_adds, node), node.machine(name)
    candidate = Candidate("ring_ddp", {"bucket_cap_mb": bucket_mb})
    return predict(profile, machine, candidate, world), one_device(profile, machine)


def _pipelines() -> Iterator[Row]:
    def speed_up(ranks: int, micro_batches: int) -> float:
        return ranks * (1 - bubble(theoretical("gpipe", ranks, 1, micro_batches)))

    inputs = "M P/(M+P-1) with M = 32; equal stages, free messages, no recomputation"
    yield Row("GPipe, 4 devices: speed-up", 3.5, speed_up(4, 32), "x", inputs)
    for ranks, micro_batches, published in ((2, 16, 1.35), (4, 64, 2.29), (8, 64, 3.11)):
        inputs = f"M = {micro_batches} as in its program of 2019; else as above"
        yield Row(
            f"torchgpipe, ResNet-101, {ranks} devices: speed-up", published, speed_up(ranks, micro_batches), "x", inputs
        )
        recomputed = 3 / 4 * speed_up(ranks, micro_batches)
        yield Row("the same with every forward pass computed twice", published, recomputed, "x", "backward = 2 forward")


def _memory_and_servers() -> Iterator[Row]:
    node = NODES["a100_400gbit"]
    machine, profile = node.machine("a100"), computed("", 7.5e9, (2, 2, 12), 1, 1.0, node)
    one, what = profile.held, "ZeRO, 7.5B parameters, 64 GPUs"
    states = (one.parameters_bytes + one.gradients_bytes + one.optimizer_bytes / 64) / 1e9
    yield Row(f"{what}: optimizer states sharded", 31.4, states, "GB", "4 + 12/64 bytes a parameter")
    for name, published, inputs in (
        ("ring_ddp", 120, "16 bytes a parameter"),
        ("ddp_sharded", 16.6, "2 + 14/64 bytes a parameter (gradients sharded too)"),
    ):
        held = predict(profile, machine, Candidate(name), World(8, 8)).memory.total / 1e9
        yield Row(f"{what}: {name}", published, held, "GB", inputs)
    size, link, n = 1e9, Link.straight(0.0, 8e-9 / 100), 32
    optimum_s = {k: 2 * n * (n - 1) * size / ((n * n + k * n - 2 * k) * 12.5e9) for k in (0, n)}
    planned = 1e3 * servers_s(World(n, 1), size, n, link, link)
    inputs = "t = 2n(n-1)M / [(n^2+kn-2k)B] with k = 0, n = 32 hosts, M = 1 GB, B = 100 Gbit/s; a server on each host"
    yield Row("BytePS's optimum, servers on the workers' hosts", 1e3 * optimum_s[0], planned, "ms", inputs)
    gain = 100 * (ring_all_reduce_s(n, size, link) / optimum_s[n] - 1)
    inputs = (
        "32 x 8 GPUs, as many servers on hosts of their own (k = n); a step that is communication only, so the most"
    )
    yield Row("BytePS against all-reduce, 256 GPUs: gain of up to", 84, gain, "%", inputs)


def _computation() -> Iterator[Row]:
    planned = 3072 * 312e12 * 0.5 / 1e15
    yield Row("Megatron-LM, 3,072 A100: PFLOP/s", 502, planned, "PFLOP/s", "the usual 50 %; 502 is 52.4 % of the peak")
    seconds = 6 * MODELS["gpt3_175b"].parameters * TOKENS * 1536 / (1024 * 312e12 * 0.5)
    inputs = "batch of 1,536 x 2,048, 50 %; no forward pass twice, no bubble, no communication (they state 44 %)"
    yield Row("Megatron-LM, GPT-3 175B, 1,024 A100: step", 32, seconds, "s", inputs)


def table() -> list[str]:
    """The comparisons as a table in Markdown."""
    lines = ["| what | published | planner | difference | inputs of the planner |", "|---|---|---|---|---|"]
    for row in rows():
        published = "near-linear" if row.published is None else f"{row.published:.4g} {row.unit}"
        difference = "" if row.published is None else f"{round(100 * (row.planned / row.published - 1)):+d} %"
        lines.append(f"| {row.what} | {published} | {row.planned:.3g} {row.unit} | {difference} | {row.inputs} |")
    return lines


if __name__ == "__main__":
    print("# python -m benchmarks.published")
    print(*table(), sep="\n")
