"""Cuts a graph of operations into pieces, each of which gets what it needs of the earlier ones from the piece before.

::

    piece 0    arguments, tensors             -> what later pieces need
    piece 1    what arrived, arguments, tensors -> what later pieces need
    piece 2    what arrived, arguments, tensors -> what the forward pass returns

A value that a later piece needs travels through all pieces between. Arguments do not: every stage has them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from lightning_multigpu.engine.pipeline.errors import PipelineError

# They write into the running statistics, which their schemas do not say.
_WRITES_STATISTICS: dict[Any, tuple[int, ...]] = {
    torch.ops.aten.batch_norm.default: (3, 4),
    torch.ops.aten.instance_norm.default: (3, 4),
}


@dataclass(frozen=True)
class GraphPiece:
    """One piece.

    Attributes:
        module: takes what arrived, then arguments, then tensors; returns a tuple of tensors, the last piece a tuple of
            whatever the forward pass returns.
        inputs: indices of the arguments and tensors among the graph's inputs that it takes.
        written: those of them that it writes into.
        changes_arrived: it writes into what arrived.
    """

    module: GraphModule
    inputs: tuple[int, ...]
    written: Collection[int]
    changes_arrived: bool


class GraphCuts:
    """Cuts ``graph`` at its marks.

    Args:
        root: the graph's module.
        mark: the target of the nodes between two pieces; they are left out.
        names: of the graph's inputs, for messages.
        num_shared: the first so many inputs are parameters and buffers, which a piece may write into.

    Raises:
        PipelineError: the pieces cannot run apart from each other.
    """

    def __init__(self, root: GraphModule, mark: Any, names: Sequence[str], num_shared: int) -> None:
        self._root = root
        self._nodes = [node for node in root.graph.nodes if node.target is not mark]
        self._inputs = {n: i for i, n in enumerate(n for n in self._nodes if n.op == "placeholder")}
        self._names, self._num_shared = names, num_shared
        self._piece: dict[Node, int] = {}
        self.num_pieces = 1
        for node in root.graph.nodes:
            if node.target is mark:
                self.num_pieces += 1
            else:
                self._piece[node] = self.num_pieces - 1
        self._last_use = self._last_uses()
        self._check_crossing()
        self._written: set[int] = set()
        self._changed: set[int] = set()
        self._check_writes()
        self.pieces = tuple(self._cut(piece) for piece in range(self.num_pieces))

    def _last_uses(self) -> dict[Node, int]:
        """The last piece that uses each node."""
        return {
            node: max((self._piece[user] for user in node.users if user in self._piece), default=0)
            for node in self._nodes
        }

    def _is_everywhere(self, node: Node) -> bool:
        """Whether every stage has the value by itself."""
        return node.op in ("placeholder", "get_attr")

    def _arriving(self, piece: int) -> list[Node]:
        """What ``piece`` gets from the one before, in the order in which it is computed."""
        return [
            node
            for node in self._nodes
            if not self._is_everywhere(node) and self._piece[node] < piece <= self._last_use[node]
        ]

    def _check_crossing(self) -> None:
        for piece in range(1, self.num_pieces):
            arriving = self._arriving(piece)
            if not arriving:
                raise PipelineError(
                    f"nothing that is computed before split point {piece} is needed behind it, so that the stages "
                    "would not depend on each other; move the split point"
                )
            for node in arriving:
                if not isinstance(node.meta.get("val"), Tensor):
                    raise PipelineError(
                        f"{node.target} before split point {piece} gives a {type(node.meta.get('val')).__name__} that "
                        "is needed behind it, and only tensors travel; move the split point"
                    )

    def _check_writes(self) -> None:
        """Notes what is written into.

        Raises:
            PipelineError: what one piece writes, another one would have to see.
        """
        aliases: dict[int, list[Node]] = defaultdict(list)
        for node in self._nodes:
            for tensor in _tensors_of(node):
                aliases[_storage(tensor)].append(node)
        for node in self._nodes:
            for written in _written(node):
                for tensor in _tensors_of(written):
                    self._check_write(node, aliases[_storage(tensor)])

    def _check_write(self, writer: Node, aliases: list[Node]) -> None:
        """``aliases`` are the nodes with the memory that ``writer`` writes into."""
        piece = self._piece[writer]
        for node in aliases:
            if not self._is_everywhere(node):
                continue
            number = self._inputs.get(node)
            if number is None or number >= self._num_shared:
                what = "a tensor that is no buffer" if number is None else self._names[number]
                raise PipelineError(
                    f"the forward pass changes {what} in place ({writer.target}), which other stages would not see; "
                    "work on a copy, or make it a buffer"
                )
            users = {self._piece[user] for alias in aliases for user in alias.users if user in self._piece}
            if users != {piece}:
                raise PipelineError(
                    f"stage {piece} changes {self._names[number]} in place, and the stages {sorted(users)} use it; "
                    "move the split points so that one stage does"
                )
            self._written.add(number)
        arriving = [node for node in self._arriving(piece) if node in aliases]
        if len(arriving) > 1:
            raise PipelineError(
                f"behind split point {piece} the result of {arriving[0].target} is changed in place "
                f"({writer.target}), and {arriving[1].target}, which shares its memory, is needed too; work on a copy, "
                "or move the split point"
            )
        if arriving:
            self._changed.add(piece)

    def _cut(self, piece: int) -> GraphPiece:
        graph = Graph()
        values: dict[Node, Any] = {node: graph.placeholder(node.name) for node in self._arriving(piece)}
        own = [node for node in self._nodes if self._piece[node] == piece and not self._is_everywhere(node)]
        needed = {source for node in own for source in node.all_input_nodes}
        inputs = [node for node in self._inputs if node in needed]
        values.update((node, graph.placeholder(node.name)) for node in inputs)
        values.update((node, graph.node_copy(node)) for node in self._nodes if node.op == "get_attr" and node in needed)
        for node in own:
            if node.op == "output":
                (results,) = node.args
                graph.output(torch.fx.map_arg(results, lambda source: values[source]))
            else:
                values[node] = graph.node_copy(node, lambda source: values[source])
        if piece < self.num_pieces - 1:
            graph.output(tuple(values[node] for node in self._arriving(piece + 1)))
        numbers = tuple(self._inputs[node] for node in inputs)
        written = self._written.intersection(numbers)
        return GraphPiece(GraphModule(self._root, graph), numbers, written, piece in self._changed)


def _written(node: Node) -> list[Node]:
    """The nodes into whose memory ``node`` writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found = [node.args[i] for i in _WRITES_STATISTICS.get(node.target, ()) if i < len(node.args)]
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(node.args[index] if index < len(node.args) else node.kwargs.get(argument.name))
    flat = [entry for value in found for entry in (value if isinstance(value, (list, tuple)) else [value])]
    return [entry for entry in flat if isinstance(entry, Node)]


def _tensors_of(node: Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [entry for entry in values if isinstance(entry, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
