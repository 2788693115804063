"""``compression="auto"``: the ways that gradients could take between these hosts are tried, and the best is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_multigpu.communication.compression import Compressor, Piece, make_compressor
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.data_parallel import compression_choice
from lightning_multigpu.engine.data_parallel.compression_choice import UNCOMPRESSED, Bucket, Measured
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer
from lightning_multigpu.planning.break_even import (
    break_even_bytes_per_s,
    measured_cost_s_per_byte,
)
from lightning_multigpu.strategies.compressed_gradients import pieces_of

AUTO = "auto"


def is_auto(compression: object) -> bool:
    """Whether the setting asks for a choice.

    Raises:
        ValueError: it does so in a mapping, as if there were options.
    """
    if isinstance(compression, Mapping) and compression.get("name") == AUTO:
        raise ValueError(f"compression={dict(compression)!r}: the choice has no options; write compression='auto'")
    return compression == AUTO


def reducer_of_choice(
    module: LightningModule,
    plain: GradientReducer,
    all_reduce: HierarchicalAllReduce,
    *,
    bucket_bytes: float,
    ranks: MeteredGroup,
    device: torch.device,
) -> GradientReducer:
    """``plain``, or what takes its place where compressed gradients arrive clearly sooner.

    The same choice on all ranks, a collective. Rank 0 prints it with the times that it was made from.

    Args:
        module: whose gradients are to travel.
        plain: averages them as they are.
        all_reduce: over the same ranks, for tensors in the host's memory; closed if it is not used afterwards.
        bucket_bytes: how many bytes of gradients travel together.
        ranks: all that take part.
        device: of the gradients.
    """
    compressor = None
    try:
        if all_reduce.between is not None:
            compressor = _chosen(module, plain, all_reduce, bucket_bytes, ranks, device)
    finally:
        if compressor is None and plain.all_reduce is not all_reduce:
            all_reduce.close()
    return plain if compressor is None else plain.through(all_reduce.compressing(compressor), pieces_of(module))


def _chosen(
    module: LightningModule,
    plain: GradientReducer,
    all_reduce: HierarchicalAllReduce,
    bucket_bytes: float,
    ranks: MeteredGroup,
    device: torch.device,
) -> Compressor | None:
    trained = {parameter: piece for parameter, piece in pieces_of(module).items() if parameter.requires_grad}
    dtypes = {parameter.dtype for parameter in trained}
    compressors = {name: make_compressor(name) for name in compression_choice.candidates(dtypes)}
    if not compressors:
        listed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        rank_zero_info(f"compression='auto': none. Gradients in {listed} are compressed on demand only.")
        return None
    reducers = {name: plain.through(all_reduce.compressing(each), trained) for name, each in compressors.items()}

    def agree(seconds: Sequence[float]) -> list[float]:
        found: list[float] = ranks.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max").tolist()
        return found

    def probe(num_bytes: int) -> float:
        tensor = torch.ones(num_bytes // 4, device=device)
        return compression_choice.timed(lambda: plain.average(tensor), device)

    buckets = compression_choice.buckets(
        [(piece, parameter.dtype) for parameter, piece in trained.items()], bucket_bytes
    )
    sample = compression_choice.first_bytes(buckets, compression_choice.sample_bytes(probe, agree))
    measured = compression_choice.measure(_ways({UNCOMPRESSED: plain, **reducers}, sample, device), agree)
    chosen = compression_choice.choice(measured.seconds)
    rank_zero_info(_report(chosen, measured, buckets, sample) + _break_even_report(measured, reducers, sample))
    return None if chosen == UNCOMPRESSED else compressors[chosen]


def _ways(
    reducers: Mapping[str, GradientReducer], sample: Sequence[Bucket], device: torch.device
) -> dict[str, Callable[[], float]]:
    tensors: list[tuple[Tensor, Sequence[Piece]]] = [
        (torch.ones(bucket.numel, dtype=bucket.dtype, device=device), bucket.pieces) for bucket in sample
    ]

    def way(reducer: GradientReducer) -> Callable[[], float]:
        def step() -> None:
            reducer.average_all(tensors)
            if reducer.all_reduce is not None:
                reducer.all_reduce.end_step()

        return lambda: compression_choice.timed(step, device)

    return {name: way(reducer) for name, reducer in reducers.items()}


def _report(chosen: str, measured: Measured, buckets: Sequence[Bucket], sample: Sequence[Bucket]) -> str:
    total_bytes, sampled_bytes = (sum(bucket.num_bytes for bucket in of) for of in (buckets, sample))
    times = ", ".join(
        f"{way} {_ms(seconds * total_bytes / sampled_bytes)}" for way, seconds in measured.seconds.items()
    )
    part = "" if sampled_bytes == total_bytes else f" with {sampled_bytes / 2**20:.3g} MiB of them, in proportion"
    return (
        f"compression='auto': {chosen}. A step's {total_bytes / 2**20:.3g} MiB of gradients take: {times} "
        f"(medians of {measured.rounds}{part}, on the slowest rank)."
    )


def _break_even_report(measured: Measured, reducers: Mapping[str, GradientReducer], sample: Sequence[Bucket]) -> str:
    """Where each compression pays; nothing where the link is too slow to tell."""
    num_bytes = sum(bucket.num_bytes for bucket in sample)
    found = []
    for name, reducer in reducers.items():
        assert reducer.all_reduce is not None
        compressed = reducer.all_reduce.compressed
        assert compressed is not None
        ratio = compressed.statistics.ratio
        cost_s = measured_cost_s_per_byte(measured.seconds[UNCOMPRESSED], measured.seconds[name], ratio, num_bytes)
        if cost_s:
            border = break_even_bytes_per_s(cost_s, ratio, world_size=compressed.world_size)
            found.append(f"{name} below {border * 8e-9:.2g} Gbit/s")
    return f" At what that costs here, it pays: {', '.join(found)} between hosts." if found else ""


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"
