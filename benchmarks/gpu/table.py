"""A table of checks: each runs on ranks that live through all of them, within a time limit, and has a verdict."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

import torch

from benchmarks.gpu.card import Card
from tests.world import DeadlineError, RankDiedError, World

T = TypeVar("T")

DEADLINE_S = 30.0
_WARM_UP_S = 120.0
_DETAIL_LINES = 60
_SYMBOLS = {"held": "+", "failed": "X", "not possible": "-", "not run": "?"}


class NotPossibleError(Exception):
    """The check says nothing on this machine; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A cell of the table.

    Args:
        row: the registered name of a strategy, or "machine" for what concerns none of them.
        column: what is checked.
        function: raises where it does not hold, and :class:`NotPossibleError` where it says nothing; returns a note.
        ranks: of the world that it uses, which starts before the time of the check begins; 0 for none.
        needs: the reason why it is not possible without a GPU; empty if CPUs can do it.
        deadline_s: its time limit, where the default is too short.
        alone: no other check runs beside it: processes that share a GPU get it in turns, and its kernels wait.
    """

    row: str
    column: str
    function: Callable[[Place], str | None]
    ranks: int = 0
    needs: str = ""
    deadline_s: float = DEADLINE_S
    alone: bool = False

    @property
    def name(self) -> str:
        return f"{self.row}: {self.column}"


@dataclass(frozen=True)
class Result:
    """The verdict of a check; ``text`` is the note, or the reason."""

    check: Check
    verdict: Literal["held", "failed", "not possible", "not run"]
    text: str
    seconds: float
    details: str = ""

    def lines(self) -> str:
        """One line; below it what a failure says, since a run that is cut off has no summary."""
        text = f"  {self.text}" if self.text else ""
        details = "".join(f"\n    {line}" for line in self.details.rstrip().splitlines())
        return f"{self.verdict:12}  {self.check.row:20}  {self.check.column:36}  {self.seconds:5.1f} s{text}{details}"


class Place:
    """Where a check runs: the card, worlds of ranks that live on, and a directory of its own.

    Args:
        card: the devices.
        references: results on one device, shared by all places.
    """

    def __init__(self, card: Card, references: References | None = None) -> None:
        self.card = card
        self._references = References() if references is None else references
        self._worlds: dict[int, World] = {}
        self._until_s = float("inf")
        self.directory = Path()

    @contextmanager
    def of(self, check: Check) -> Iterator[None]:
        """Starts the ranks that the check needs, then its time; its directory is removed at the end."""
        for ranks in {1, check.ranks} if check.ranks else ():
            self._start(ranks)
        with TemporaryDirectory(prefix="check-") as directory:
            self.directory = Path(directory)
            self._until_s = time.monotonic() + check.deadline_s * self.card.slowness(check.ranks)
            yield

    @property
    def left_s(self) -> float:
        """Seconds until the check's time is over."""
        return max(1.0, self._until_s - time.monotonic())

    def run(self, ranks: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """The answers of all ranks, in order; their stacks are in the error where they do not answer in time."""
        return self._start(ranks).run(function, *args, timeout_s=self.left_s, **kwargs)

    def reference(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The answer of one process on the same card, which is computed once for all checks."""
        return self._references.of(
            (function.__qualname__, repr(args), repr(sorted(kwargs.items()))),
            lambda: self.run(1, function, *args, **kwargs)[0],
        )

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()

    def _start(self, ranks: int) -> World:
        world = self._worlds.setdefault(ranks, World(ranks, may_leak=True))
        if not world.processes:
            world.run(_warm_up, self.card, timeout_s=_WARM_UP_S)
        return world


@dataclass
class References:
    """Results on one device, by what was computed."""

    _found: dict[Any, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, key: Any, compute: Callable[[], Any]) -> Any:
        with self._lock:  # the others wait: they need the same few references
            if key not in self._found:
                self._found[key] = compute()
            return self._found[key]


def _warm_up(card: Card) -> None:
    """Makes this rank's CUDA context, which takes seconds and stays."""
    from tests.world import rank

    if card.is_gpu:
        device = card.device(rank())
        torch.cuda.set_device(device)
        square = torch.ones(64, 64, device=device)
        (square @ square).sum().item()


class _Turns:
    """Lets checks run beside each other, and those alone that ask for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._is_asked = False

    @contextmanager
    def taken(self, *, alone: bool) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_asked)
            if alone:
                self._is_asked = True
                self._changed.wait_for(lambda: self._running == 0)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._is_asked &= not alone
                self._changed.notify_all()


def run_table(
    checks: Sequence[Check],
    card: Card,
    *,
    lanes: int,
    limit_s: float = float("inf"),
    say: Callable[[str], None] = print,
) -> list[Result]:
    """Runs the checks in their order, ``lanes`` at a time, each lane with ranks of its own.

    Args:
        checks: what is run.
        card: the devices.
        lanes: number of checks at a time.
        limit_s: no check begins later than this.
        say: gets the line of each check as it ends.
    """
    until_s = time.monotonic() + limit_s
    references, places, turns = References(), threading.local(), _Turns()
    made: list[Place] = []

    def run(check: Check) -> Result:
        if time.monotonic() > until_s:
            return Result(check, "not run", f"the time was over ({limit_s:.0f} s)", 0.0)
        if not hasattr(places, "own"):
            places.own = Place(card, references)
            made.append(places.own)
        with turns.taken(alone=check.alone):
            return run_check(check, places.own)

    results = []
    try:
        with ThreadPoolExecutor(lanes) as pool:
            for future in as_completed([pool.submit(run, check) for check in checks]):
                results.append(future.result())
                say(results[-1].lines())
    finally:
        for place in made:
            place.close()
    return results


def run_check(check: Check, place: Place) -> Result:
    """The verdict of one check; ranks that have failed or hang are replaced before the next one."""
    if check.needs and not place.card.is_gpu:
        return Result(check, "not possible", check.needs, 0.0)
    start_s = time.monotonic()
    try:
        with place.of(check):
            start_s = time.monotonic()
            return Result(check, "held", check.function(place) or "", time.monotonic() - start_s)
    except NotPossibleError as error:
        return Result(check, "not possible", str(error), time.monotonic() - start_s)
    except Exception as error:
        details = "\n".join("".join(traceback.format_exception(error)).splitlines()[-_DETAIL_LINES:])
        return Result(check, "failed", _reason(error), time.monotonic() - start_s, details)


def _reason(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, DeadlineError):
        return f"hangs: {first}"
    if isinstance(error, RankDiedError | AssertionError):
        return first[:300] or type(error).__name__
    return f"{type(error).__name__}: {first[:300]}"


def summary(results: Iterable[Result], order: Sequence[Check]) -> str:
    """The table of verdicts, a row for each strategy.

    Args:
        results: in any order.
        order: checks in the order of the rows and columns.
    """
    by_name = {result.check.name: result for result in results}
    results = [by_name[check.name] for check in order]
    columns = list(dict.fromkeys(result.check.column for result in results))
    rows = list(dict.fromkeys(result.check.row for result in results))
    cells = {(result.check.row, result.check.column): _SYMBOLS[result.verdict] for result in results}
    width = max(map(len, rows), default=0)
    lines = [f"  {index:2} {column}" for index, column in enumerate(columns, 1)]
    lines.append(f"{'':{width}} " + " ".join(f"{index:2}" for index in range(1, len(columns) + 1)))
    lines += [f"{row:{width}} " + " ".join(f"{cells.get((row, column), ''):>2}" for column in columns) for row in rows]
    lines.append("  ".join(f"{symbol} {verdict}" for verdict, symbol in _SYMBOLS.items()))
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in _SYMBOLS}
    lines.append(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    reasons = dict.fromkeys(result.text for result in results if result.verdict == "not possible")
    lines += [f"not possible here: {reason}" for reason in reasons]
    return "\n".join(lines)
