"""The step that several ranks have in common.

If ranks wait for each other, a step takes as long as the slowest rank's own work plus that rank's exposed
communication::

    own work of a rank     its step without "communication" and "stage_wait"
    step                   max over ranks of own work + exposed communication of the slowest rank
    saving of a remedy     step - step with the part that the remedy removes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_multigpu.planning.rank_figures import RankFigures


@dataclass(frozen=True)
class CommonStep:
    """A step of ``ranks``, of which there is one at least."""

    ranks: Sequence[RankFigures]

    @property
    def seconds(self) -> float:
        """Of the rank with the longest step."""
        return max(rank.step_s for rank in self.ranks)

    @property
    def first_to_wait(self) -> RankFigures:
        """The rank that waits for transfers for the shortest time, and so for no slower rank."""
        return min(self.ranks, key=lambda rank: rank.of("communication"))

    @property
    def exposed_s(self) -> float:
        """Seconds in which the slowest rank waits for transfers; other ranks also wait for that rank."""
        return self.first_to_wait.of("communication")

    def exposed_part_s(self, kind: str) -> float:
        """The part of :attr:`exposed_s` in which "gradients", or "activations" of split layers, travel."""
        return min(self.exposed_s, self.first_to_wait.waits_s.get(kind, 0.0))

    @property
    def who_waits(self) -> str:
        """The subject of a sentence about :attr:`exposed_s`."""
        return f"rank {self.ranks[0].rank} waits" if len(self.ranks) == 1 else "every rank waits at least"

    def with_own(self, own_s: Callable[[RankFigures], float]) -> float:
        """The predicted step if each rank's own work took ``own_s``."""
        return max(map(own_s, self.ranks)) + self.exposed_s

    def saving(self, removed_s: Callable[[RankFigures], float]) -> float:
        """Seconds of the step that are saved if each rank's own work is shorter by ``removed_s``."""
        return self.with_own(lambda rank: rank.own_s) - self.with_own(lambda rank: rank.own_s - removed_s(rank))
