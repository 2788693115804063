"""The forms of a loss: the operations of its autograd graph, to notice a term that later losses have."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_DEPTH = 8
_MOST_NODES = 2000


class LossForms:
    """Remembers from which operations losses were computed.

    A form is the set of pairs of successive operations, with their distances from the loss. Distances of 8 and more
    count as 8, so that loops of varying length make few forms. A loss that lacks operations has no new form.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, str, str]] = set()

    def is_new(self, loss: Tensor) -> bool:
        """Whether the graph of ``loss``, before backward, has a pair of operations that no earlier loss had.

        The first loss has no new one. The graph is followed to the leaves and to the stage's inputs, over at most 2000
        operations.
        """
        found: set[tuple[int, str, str]] = set()
        nodes: list[Any] = [loss.grad_fn]
        seen = set(nodes)
        depth = 0
        while nodes and len(seen) < _MOST_NODES:
            following: list[Any] = []
            for node in nodes:
                name = node.name() if node is not None else ""
                for other, _ in () if node is None else node.next_functions:
                    if other is None:
                        continue
                    found.add((depth, name, other.name()))
                    if other not in seen:
                        seen.add(other)
                        following.append(other)
            nodes, depth = following, min(depth + 1, _DEPTH)
        is_new = bool(self._known) and not found <= self._known
        self._known |= found
        return is_new
