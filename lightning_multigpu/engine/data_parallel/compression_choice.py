"""Choice of a compression by measurement at the start of a run: ``compression="auto"``.

Each candidate averages the buckets of a step, in turn, so that a disturbance slows all candidates; the median on the
slowest rank decides. On a slow link, which a short probe detects, only the first buckets are sent::

    probe     none 1 MiB                      tells how many bytes there is time for
    round 0   none, bf16, int8                not counted: memory is cold; tells how many rounds there is time for
    round 1   none, bf16, int8                \\
    round 2   none, bf16, int8                 > medians
    ...                                       /
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_multigpu.communication.compression import Compressor, GradientPiece, Pieces, cut, make_compressor
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.clocks import timed
from lightning_multigpu.communication.tensors import alike
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer
from lightning_multigpu.planning.numbers import ms, size

UNCOMPRESSED = "none"
CLEARLY = 0.9
"""A compression that loses more precision must take at most this share of the time of one that loses less."""
BUDGET_S = 1.0
"""Time limit of the rounds; on a very slow link three rounds of the smallest sample may take longer."""

# The one that loses less comes first. Compressors that delay most of a gradient change training, so only the user
# chooses them; fp16 takes as long as bf16, and overflows.
_CANDIDATES: dict[torch.dtype, tuple[str, ...]] = {
    torch.float32: ("bf16", "int8"),
    torch.bfloat16: ("int8",),
    torch.float16: ("int8",),
}
_PROBE_BYTES = 1 << 20
_SHARE_OF_A_ROUND = 1.75  # bytes of a round / bytes of its uncompressed turn: 1 + 1/2 + 1/4
_MIN_ROUNDS = 3
_MAX_ROUNDS = 7
_MAX_SAMPLE_BYTES = 64 << 20

Agree = Callable[[Sequence[float]], list[float]]
"""Returns, on all ranks, the largest value of any rank for each number; a collective."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        pieces: the parameters whose gradients it holds, in order.
        dtype: the dtype of these gradients.
    """

    pieces: Pieces
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Measured:
    """The measured times of the candidates; the same on all ranks.

    Attributes:
        seconds: the slowest rank's median, by name.
        rounds: how often each candidate was timed.
    """

    seconds: Mapping[str, float]
    rounds: int


def candidates(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    """The compressions to try for gradients of these types, the one that loses least first.

    For bfloat16 and float16 only those with fewer bits. None for float64, which users choose for its precision, and for
    types that cannot be compressed.
    """
    of_each = [_CANDIDATES.get(dtype, ()) for dtype in set(dtypes)]
    if not of_each:
        return ()
    return tuple(name for name in of_each[0] if all(name in others for others in of_each))


def choice(seconds: Mapping[str, float]) -> str:
    """The candidate to use: one that loses more precision only if it is clearly faster than one that loses less.

    Args:
        seconds: by name, the candidate that loses least first.
    """
    ways = iter(seconds)
    chosen = next(ways)
    for way in ways:
        if seconds[way] <= CLEARLY * seconds[chosen]:
            chosen = way
    return chosen


def buckets(pieces: Mapping[Tensor, GradientPiece], bucket_bytes: float) -> list[Bucket]:
    """The buckets that DistributedDataParallel makes of these parameters, the last parameter first.

    Args:
        pieces: by parameter, in the module's order.
        bucket_bytes: the size from which on a bucket is full.
    """
    groups = alike(reversed(list(pieces)), full_bytes=bucket_bytes)
    found = [Bucket(tuple(pieces[parameter] for parameter in group), group[0].dtype) for group in groups]
    return [bucket for bucket in found if bucket.numel]


def first_bytes(of: Sequence[Bucket], limit_bytes: float) -> list[Bucket]:
    """The first whole buckets that fit the limit; a part of the first bucket if that alone is larger."""
    found: list[Bucket] = []
    left_bytes = limit_bytes
    for bucket in of:
        if bucket.num_bytes > left_bytes:
            break
        found.append(bucket)
        left_bytes -= bucket.num_bytes
    if found or not of:
        return found
    numel = max(1, int(limit_bytes) // of[0].dtype.itemsize)
    return [Bucket(cut(of[0].pieces, 0, numel), of[0].dtype)]


def sample_bytes(probe: Callable[[], float], agree: Agree, *, budget_s: float = BUDGET_S) -> float:
    """The bytes of gradients that the rounds can send within the time limit; a collective.

    Args:
        probe: sends 1 MiB uncompressed, and returns the seconds that it took.
        agree: the maximum over all ranks.
        budget_s: the time limit of all rounds.
    """
    probe()  # the first call connects
    (seconds,) = agree([min(probe(), probe())])
    return min(_MAX_SAMPLE_BYTES, budget_s / (_MIN_ROUNDS + 1) / _SHARE_OF_A_ROUND * _PROBE_BYTES / seconds)


def measure(ways: Mapping[str, Callable[[], float]], agree: Agree, *, budget_s: float = BUDGET_S) -> Measured:
    """Times the candidates in turn; a collective.

    Args:
        ways: by name, functions that do the same work and return the seconds that it took.
        agree: the maximum over all ranks; it makes them begin each turn together.
        budget_s: the time limit of all rounds; at least three run.
    """
    first = agree([run() for run in ways.values()])
    rounds = min(max(int(budget_s / max(sum(first), 1e-9)) - 1, _MIN_ROUNDS), _MAX_ROUNDS)
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            agree([0.0])
            samples[way].append(run())
    medians = agree([statistics.median(found) for found in samples.values()])
    return Measured(dict(zip(ways, medians, strict=True)), rounds)


def reducer_of_choice(
    pieces: Mapping[Tensor, GradientPiece],
    plain: GradientReducer,
    all_reduce: HierarchicalAllReduce,
    *,
    bucket_bytes: float,
    ranks: MeteredGroup,
    device: torch.device,
    info: Callable[[str], object],
) -> GradientReducer:
    """``plain``, or a reducer that compresses if compressed gradients arrive clearly sooner.

    The choice is the same on all ranks; a collective.

    Args:
        pieces: the name and shape of each parameter, in the module's order.
        plain: averages gradients as they are.
        all_reduce: over the same ranks, for tensors in the host's memory; closed if it is not used afterwards.
        bucket_bytes: how many bytes of gradients travel together.
        ranks: the ranks that take part.
        device: the device of the gradients.
        info: prints the choice and the measured times on rank 0.
    """
    compressor = None
    try:
        if all_reduce.between is not None:
            compressor = _chosen(pieces, plain, all_reduce, bucket_bytes, ranks, device, info)
    finally:
        if compressor is None and plain.all_reduce is not all_reduce:
            all_reduce.close()
    return plain if compressor is None else plain.through(all_reduce.compressing(compressor), pieces)


def _chosen(
    pieces: Mapping[Tensor, GradientPiece],
    plain: GradientReducer,
    all_reduce: HierarchicalAllReduce,
    bucket_bytes: float,
    ranks: MeteredGroup,
    device: torch.device,
    info: Callable[[str], object],
) -> Compressor | None:
    trained = {parameter: piece for parameter, piece in pieces.items() if parameter.requires_grad}
    dtypes = {parameter.dtype for parameter in trained}
    compressors = {name: make_compressor(name) for name in candidates(dtypes)}
    if not compressors:
        listed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        info(f"compression='auto': none. Gradients in {listed} are compressed on demand only.")
        return None
    reducers = {name: plain.through(all_reduce.compressing(each), trained) for name, each in compressors.items()}

    def agree(seconds: Sequence[float]) -> list[float]:
        found: list[float] = ranks.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max").tolist()
        return found

    def probe() -> float:
        tensor = torch.ones(_PROBE_BYTES // 4, device=device)
        return timed(lambda: plain.average(tensor), device)

    all_buckets = buckets(trained, bucket_bytes)
    sample = first_bytes(all_buckets, sample_bytes(probe, agree))
    measured = measure(_ways({UNCOMPRESSED: plain, **reducers}, sample, device), agree)
    chosen = choice(measured.seconds)
    info(_report(chosen, measured, all_buckets, sample))
    return None if chosen == UNCOMPRESSED else compressors[chosen]


def _ways(
    reducers: Mapping[str, GradientReducer], sample: Sequence[Bucket], device: torch.device
) -> dict[str, Callable[[], float]]:
    tensors: list[tuple[Tensor, Sequence[GradientPiece]]] = [
        (torch.ones(bucket.numel, dtype=bucket.dtype, device=device), bucket.pieces) for bucket in sample
    ]

    def way(reducer: GradientReducer) -> Callable[[], float]:
        def step() -> None:
            reducer.average_all(tensors)
            if reducer.all_reduce is not None:
                reducer.all_reduce.end_step()

        return lambda: timed(step, device)

    return {name: way(reducer) for name, reducer in reducers.items()}


def _report(chosen: str, measured: Measured, step: Sequence[Bucket], sample: Sequence[Bucket]) -> str:
    total_bytes, sampled_bytes = (sum(bucket.num_bytes for bucket in of) for of in (step, sample))
    times = ", ".join(f"{way} {ms(seconds * total_bytes / sampled_bytes)}" for way, seconds in measured.seconds.items())
    part = "" if sampled_bytes == total_bytes else f" with {size(sampled_bytes)} of them, in proportion"
    return (
        f"compression='auto': {chosen}. A step's {size(total_bytes)} of gradients take: {times} "
        f"(medians of {measured.rounds}{part}, on the slowest rank)."
    )
