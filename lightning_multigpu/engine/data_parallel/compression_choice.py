"""Choice of a compression by measurement at the start of a run: ``compression="auto"``.

Each candidate averages the first 4 MiB of a step's gradients, in turn, so that a disturbance slows all candidates; the
median on the slowest rank decides::

    round 0   none, bf16, int8    not counted: memory is cold; tells how many rounds there is time for
    round 1   none, bf16, int8    \\
    round 2   none, bf16, int8     > medians
    ...                           /
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
"""Time limit of the rounds; on a slow link three rounds may take longer."""

# The one that loses less comes first. Compressors that delay most of a gradient change training, so only the user
# chooses them; fp16 takes as long as bf16, and overflows.
_CANDIDATES: dict[torch.dtype, tuple[str, ...]] = {
    torch.float32: ("bf16", "int8"),
    torch.bfloat16: ("int8",),
    torch.float16: ("int8",),
}
_MIN_ROUNDS = 3
_MAX_ROUNDS = 7
_SAMPLE_BYTES = 4 << 20

Agree = Callable[[Sequence[float]], list[float]]
"""Returns, on all ranks, the largest value of any rank for each number; a collective."""


@dataclass(frozen=True)
class Measured:
    """The slowest rank's median time of each candidate, by name, and how often each was timed."""

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


def sample_of(pieces: Mapping[Tensor, GradientPiece], limit_bytes: int) -> list[tuple[Tensor, Pieces]]:
    """A flat tensor for each dtype, with the parameters whose gradients it stands for, of ``limit_bytes`` in all.

    Backward makes the gradients of the last parameter first; ``pieces`` are in the module's order.
    """
    found = []
    for parameters in alike(reversed(list(pieces))):
        whole = tuple(pieces[parameter] for parameter in parameters)
        numel = min(sum(parameter.numel() for parameter in parameters), limit_bytes // parameters[0].itemsize)
        if numel:
            found.append((parameters[0].new_ones(numel), cut(whole, 0, numel)))
            limit_bytes -= found[-1][0].nbytes
    return found


def measure(ways: Mapping[str, Callable[[], float]], agree: Agree, *, budget_s: float = BUDGET_S) -> Measured:
    """Times functions that do the same work and return the seconds that it took, in turn; a collective.

    ``agree`` also makes the ranks begin each turn together. At least three rounds run, whatever the time limit.
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
    ranks: MeteredGroup,
    device: torch.device,
    info: Callable[[str], object],
) -> GradientReducer:
    """``plain``, or a reducer that compresses if compressed gradients arrive clearly sooner.

    The choice is the same on all ranks; a collective. ``all_reduce``, for tensors in the host's memory, is closed if it
    is not used afterwards. ``info`` prints the choice and the measured times on rank 0.
    """
    compressor = None
    try:
        if all_reduce.between is not None:
            compressor = _chosen(pieces, plain, all_reduce, ranks, device, info)
    finally:
        if compressor is None and plain.all_reduce is not all_reduce:
            all_reduce.close()
    return plain if compressor is None else plain.through(all_reduce.compressing(compressor), pieces)


def _chosen(
    pieces: Mapping[Tensor, GradientPiece],
    plain: GradientReducer,
    all_reduce: HierarchicalAllReduce,
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

    sample = sample_of(trained, _SAMPLE_BYTES)
    measured = measure(_ways({UNCOMPRESSED: plain, **reducers}, sample, device), agree)
    chosen = choice(measured.seconds)
    total_bytes, sampled_bytes = (sum(tensor.nbytes for tensor in of) for of in (trained, (t for t, _ in sample)))
    info(_report(chosen, measured, total_bytes, sampled_bytes))
    return None if chosen == UNCOMPRESSED else compressors[chosen]


def _ways(
    reducers: Mapping[str, GradientReducer], sample: Sequence[tuple[Tensor, Pieces]], device: torch.device
) -> dict[str, Callable[[], float]]:
    def way(reducer: GradientReducer) -> Callable[[], float]:
        def step() -> None:
            for tensor, of in sample:
                reducer.average(tensor, of)
            if reducer.all_reduce is not None:
                reducer.all_reduce.end_step()

        return lambda: timed(step, device)

    return {name: way(reducer) for name, reducer in reducers.items()}


def _report(chosen: str, measured: Measured, total_bytes: int, sampled_bytes: int) -> str:
    times = ", ".join(f"{way} {ms(seconds * total_bytes / sampled_bytes)}" for way, seconds in measured.seconds.items())
    part = "" if sampled_bytes == total_bytes else f" with {size(sampled_bytes)} of them, in proportion"
    return (
        f"compression='auto': {chosen}. A step's {size(total_bytes)} of gradients take: {times} "
        f"(medians of {measured.rounds}{part}, on the slowest rank)."
    )
