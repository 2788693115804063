"""Whether compressed gradients arrive sooner: measured at the start of a run instead of guessed.

Every way for gradients to travel is timed with the buckets of a step, in turn, so that a disturbance meets all of them;
what counts is the median on the slowest rank. A link may be so slow that a step takes too long for that; a short probe
tells, and then fewer buckets stand for all::

    probe     none 64 KiB, 256 KiB, 1 MiB     until one takes long enough to tell the time of a byte
    round 0   none, bf16, int8                not counted: memory is cold; tells how many rounds there is time for
    round 1   none, bf16, int8                \\
    round 2   none, bf16, int8                 > medians
    ...                                       /
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_multigpu.communication.compression import Piece, cut
from lightning_multigpu.communication.compression.pieces import Pieces

UNCOMPRESSED = "none"
CLEARLY = 0.9
"""What loses more has to take at most this share of the time of what loses less."""
BUDGET_S = 1.0
"""How long the rounds may take; a link on which three rounds of the least there is take longer has its way."""

# The one that loses less first. Those that let most of a gradient wait change what training computes, and are for the
# user to choose; fp16 takes as long as bf16, and cannot hold what is large.
_CANDIDATES: dict[torch.dtype, tuple[str, ...]] = {
    torch.float32: ("bf16", "int8"),
    torch.bfloat16: ("int8",),
    torch.float16: ("int8",),
}
_PROBE_BYTES = (64 << 10, 256 << 10, 1 << 20)
_PROBE_ENOUGH_S = 0.02
_SHARE_OF_A_ROUND = 1.75  # a round's bytes over those of its uncompressed turn: all, a half, a fourth
_MIN_ROUNDS = 3
_MAX_ROUNDS = 7
_MAX_SAMPLE_BYTES = 64 << 20

Agree = Callable[[Sequence[float]], list[float]]
"""Takes a number or more of each rank and returns the largest of all ranks, the same on all; a collective."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        pieces: the parameters whose gradients it holds, in order.
        dtype: of all of them.
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
    """What came of timing the ways; the same on all ranks.

    Attributes:
        seconds: by way, the slowest rank's median.
        rounds: how often each was timed.
    """

    seconds: Mapping[str, float]
    rounds: int


def candidates(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    """The compressions that come into question for gradients of these types, the one that loses least first.

    Of bfloat16 and float16 only those that are shorter still. None for float64, whose digits somebody wants, and for
    types that cannot be compressed.
    """
    of_each = [_CANDIDATES.get(dtype, ()) for dtype in set(dtypes)]
    if not of_each:
        return ()
    return tuple(name for name in of_each[0] if all(name in others for others in of_each))


def choice(seconds: Mapping[str, float]) -> str:
    """The way to take: what loses more is preferred only where it is clearly faster than what loses less.

    Args:
        seconds: by way, the one that loses least first.
    """
    ways = iter(seconds)
    chosen = next(ways)
    for way in ways:
        if seconds[way] <= CLEARLY * seconds[chosen]:
            chosen = way
    return chosen


def buckets(parameters: Iterable[tuple[Piece, torch.dtype]], bucket_bytes: float) -> list[Bucket]:
    """The buckets that DistributedDataParallel makes of these parameters: from the last one on, full when not below.

    Args:
        parameters: those that are trained, in the module's order.
        bucket_bytes: the size from which on a bucket is full.
    """
    found: list[Bucket] = []
    under_way: dict[torch.dtype, list[Piece]] = {}
    for piece, dtype in reversed(list(parameters)):
        pieces = under_way.setdefault(dtype, [])
        pieces.append(piece)
        if Bucket(tuple(pieces), dtype).num_bytes >= bucket_bytes:
            found.append(Bucket(tuple(under_way.pop(dtype)), dtype))
    found += [Bucket(tuple(pieces), dtype) for dtype, pieces in under_way.items()]
    return [bucket for bucket in found if bucket.numel]


def first_bytes(of: Sequence[Bucket], limit_bytes: float) -> list[Bucket]:
    """Whole buckets from the first one on, as many as the limit holds; of one that is larger than that, a part."""
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


def sample_bytes(probe: Callable[[int], float], agree: Agree, *, budget_s: float = BUDGET_S) -> float:
    """How many bytes of gradients there is time to measure with; a collective.

    Args:
        probe: sends so many bytes uncompressed, and returns the seconds that it took.
        agree: over all ranks.
        budget_s: for all rounds.
    """
    probe(_PROBE_BYTES[0])  # the first call connects
    for num_bytes in _PROBE_BYTES:
        (seconds,) = agree([min(probe(num_bytes), probe(num_bytes))])
        if seconds >= _PROBE_ENOUGH_S:
            break
    return min(_MAX_SAMPLE_BYTES, budget_s / (_MIN_ROUNDS + 1) / _SHARE_OF_A_ROUND * num_bytes / seconds)


def measure(ways: Mapping[str, Callable[[], float]], agree: Agree, *, budget_s: float = BUDGET_S) -> Measured:
    """Times the ways in turn; a collective.

    Args:
        ways: by name, each does the same work and returns the seconds that it took.
        agree: over all ranks, which so begin each turn together.
        budget_s: time for all rounds together; three there are in any case.
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


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``work`` takes until its results are in the device's memory."""
    _synchronise(device)
    start_s = time.perf_counter()
    work()
    _synchronise(device)
    return time.perf_counter() - start_s


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
