"""The traffic of an optimizer step, and the arithmetic of its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

Interval = tuple[float, float]

# Share of the size S that each rank of a group of n sends, for algorithms that are optimal in bandwidth. The factors
# are those by which nccl-tests turns "algbw" into "busbw" (S is the total over the ranks where ranks hold parts of it).
_SENT_SHARE: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "gather": lambda n: Fraction(n - 1, n),
    "scatter": lambda n: Fraction(n - 1, n),
    "broadcast": lambda n: Fraction(1 if n > 1 else 0),
    "reduce": lambda n: Fraction(1 if n > 1 else 0),
    "send": lambda n: Fraction(1),
    "recv": lambda n: Fraction(0),
    "push": lambda n: Fraction(1),
    "pull": lambda n: Fraction(0),
    "barrier": lambda n: Fraction(0),
}


def sent_share(operation: str, group_size: int) -> float:
    """Bytes that one rank sends for each byte of the collective's size: 2(n-1)/n for an all-reduce, for example.

    This is also nccl-tests' factor between the algorithm's bandwidth (``algbw``) and the bus's (``busbw``).

    Raises:
        ValueError: ``operation`` is none of the collectives above, or ``group_size`` is below 1.
    """
    if group_size < 1:
        raise ValueError(f"group_size={group_size}: a group has at least 1 rank")
    if operation not in _SENT_SHARE:
        raise ValueError(f"operation={operation!r} is unknown; known: {', '.join(sorted(_SENT_SHARE))}")
    return float(_SENT_SHARE[operation](group_size))


@dataclass(frozen=True)
class OperationTotals:
    """All transfers of one operation over one group within one optimizer step, as this rank saw them.

    ``total_s`` is the time during which at least one of them was under way, ``exposed_s`` the part of it in which the
    main thread waited (on a GPU: the compute stream). ``memory_bytes`` is the part of ``sent_bytes`` that went through
    memory shared with other ranks of this host.
    """

    operation: str
    group: str
    group_size: int
    count: int
    size_bytes: int
    sent_bytes: int
    total_s: float
    exposed_s: float
    memory_bytes: int = 0

    @property
    def hidden_s(self) -> float:
        return self.total_s - self.exposed_s


@dataclass(frozen=True)
class StepTraffic:
    """The traffic of one optimizer step of this rank; steps are counted from 0."""

    index: int
    start_s: float
    end_s: float
    operations: tuple[OperationTotals, ...]
    total_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        return self.total_s - self.exposed_s

    @property
    def sent_bytes(self) -> int:
        return sum(totals.sent_bytes for totals in self.operations)

    @property
    def memory_bytes(self) -> int:
        """The part of :attr:`sent_bytes` that went through memory shared with other ranks of this host."""
        return sum(totals.memory_bytes for totals in self.operations)

    def of(self, operation: str, group: str | None = None) -> list[OperationTotals]:
        """The totals of ``operation``, one a group; of ``group`` only, if given."""
        return [t for t in self.operations if t.operation == operation and group in (None, t.group)]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint intervals in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def overlaps(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """The parts that two lists have in common, each of which is disjoint and in order."""
    found: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if end > start:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
