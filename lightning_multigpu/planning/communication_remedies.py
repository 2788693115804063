"""Remedies for the wait for transfers between ranks, and the seconds of a step that each saves.

Servers and ranks use both directions of a link at the same time: weights of a bucket come back while the next bucket of
gradients is sent. With B buckets whose gradients take P together::

    gradients   [b3][b2][b1][b0]                    half of the bytes   [ ][ ][ ][ ]
    weights         [b3][b2][b1][b0]                                      [b3][b2][b1][b0]
    seconds      P  +  P / B                                            P / 2B  +  P
"""

from __future__ import annotations

from lightning_multigpu.planning.rank_figures import CommonStep, Pushes
from lightning_multigpu.planning.scaling.links import Link, ring_all_reduce_s, servers_s
from lightning_multigpu.planning.strategy_options import StrategyOptions

_BF16 = 0.5


def communication_remedies(
    step: CommonStep,
    strategy: StrategyOptions,
    num_servers: int,
    num_nodes: int,
    *,
    asynchronous: bool,
) -> dict[str, float]:
    """The remedies as sentences without a full stop, with the seconds of a step that each saves.

    Args:
        step: of the run's ranks; with ``asynchronous`` of the slowest one.
        strategy: of the run.
        num_servers: parameter servers, 0 without any.
        num_nodes: hosts of the run.
        asynchronous: ranks do not wait for each other.
    """
    ranks, gradients_s = step.ranks, step.exposed_part_s("gradients")
    per_step_s = step.exposed_s - step.exposed_part_s("activations")
    often = "Use batches of twice the size"
    if gradients_s >= per_step_s / 2:
        batches = 2 * step.first_to_wait.batches
        often = f"Communicate half as often: Trainer(accumulate_grad_batches={batches}), or batches of twice the size"
    remedies = {f"{often} (the time is for as many samples as now)": per_step_s / 2}
    if num_nodes == 1:
        return remedies | _another_strategy(step)
    pushes = max((rank.pushes for rank in ranks if rank.pushes is not None), key=lambda p: p.seconds, default=None)
    if compressed := strategy.with_compression():
        saving_s = min(gradients_s, _BF16 * (gradients_s + step.first_to_wait.hidden_s))
        what = "Send half of the bytes between hosts"
        if num_servers:
            what = "Push half of the bytes to the servers; weights come back as they are"
            saving_s = 0.0 if pushes is None else min(step.exposed_s, _pushed_in_half(pushes, num_servers))
        remedies[f"{what}: {compressed}"] = saving_s
    if num_servers == 1 and pushes is not None and not asynchronous:
        remedies['Average gradients around a ring, which no server\'s link holds up: strategy="ring_ddp"'] = min(
            step.exposed_s, pushes.seconds - _around_a_ring(pushes, len(ranks))
        )
    return remedies | _another_strategy(step)


def _another_strategy(step: CommonStep) -> dict[str, float]:
    """Gradients of the whole model once a step in place of the activations of each batch, where layers are split."""
    least, activations_s = step.first_to_wait, step.exposed_part_s("activations")
    if not activations_s or least.memory is None or not least.activations_rate:
        return {}
    model_bytes = sum(r.memory.kinds_bytes.get("parameters", 0.0) for r in step.ranks if r.memory is not None)
    all_reduce_s = ring_all_reduce_s(len(step.ranks), model_bytes, Link(0.0, 1 / least.activations_rate))
    remedy = 'If the model fits on one device, average its gradients instead: strategy="ring_ddp"'
    return {remedy: max(0.0, activations_s - all_reduce_s)}


def _gradients_s(pushes: Pushes, num_servers: int) -> tuple[float, float]:
    """P and B of the picture."""
    buckets = max(1.0, pushes.count / num_servers)
    return pushes.seconds * buckets / (buckets + 1), buckets


def _pushed_in_half(pushes: Pushes, num_servers: int) -> float:
    """Seconds saved by gradients of half the bytes."""
    gradients_s, buckets = _gradients_s(pushes, num_servers)
    return _BF16 * gradients_s / buckets


def _around_a_ring(pushes: Pushes, num_ranks: int) -> float:
    """Seconds of an all-reduce over the same links, which take P for the gradients of all ranks to one server."""
    link = Link(0.0, 1.0)
    ring_s, server_s = ring_all_reduce_s(num_ranks, 1.0, link), servers_s(num_ranks, 1, 1.0, 1, link, link)
    return _gradients_s(pushes, 1)[0] * ring_s / server_s
