"""Tracing: records a module's forward pass with ``torch.export``, and cuts the graph where named submodules are called.

Nothing is computed: the pass runs on tensors without values (``FakeTensorMode``, which torch.export recommends for
models that do not fit into memory). They also replace the parameters and buffers, since a stage has only its own.
Parameters and buffers are inputs of the graph, so each run uses those that the module has at that time: tied ones stay
tied, and trained or loaded values are used.

Each piece of the graph gets the results of earlier pieces from the previous piece::

    piece 0    tensors, arguments                  -> results for later pieces
    piece 1    received values, tensors, arguments -> results for later pieces
    piece 2    received values, tensors, arguments -> the output of the forward pass

A value that a later piece needs is sent through all pieces between. Arguments are not sent: every stage has them.

``torch.distributed.pipelining.pipeline``, which cuts the same graph, copies a parameter that two stages use, so that no
optimizer has it; returns the output without its containers; and lets stages write into each other's buffers unseen. It
leaves the module's forward patched: to trace another shape or mode is a "maximum recursion depth exceeded". Functional
graphs (``run_decompositions``), in which nothing is written, compute gradients within ``torch.no_grad()``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining import pipe_split
from torch.fx import Graph, GraphModule, Node
from torch.nn import Module
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map_only

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.step_state import other_random_states

# Operations that write into running statistics, although their schemas do not say so.
_WRITES_STATISTICS: dict[Any, tuple[int, ...]] = {
    torch.ops.aten.batch_norm.default: (3, 4),
    torch.ops.aten.instance_norm.default: (3, 4),
}
_MARK = torch.ops.pippy._pipe_split.default  # the node of pipe_split() in a graph


@dataclass(frozen=True)
class GraphPiece:
    """One piece of a graph.

    Attributes:
        module: takes received values, then tensors, then arguments; returns a tuple of tensors, the last piece a tuple
            of the forward pass's results.
        tensors: names of the parameters and buffers that the piece takes.
        arguments: indices of the leaves of ``(args, kwargs)`` that the piece takes.
        written: the tensors that the piece writes into.
        changes_arrived: the piece writes into received values.
    """

    module: GraphModule
    tensors: tuple[str, ...]
    arguments: tuple[int, ...]
    written: Collection[str]
    changes_arrived: bool


class _Cuts:
    """Cuts a graph at its marks, which are left out; its inputs are ``tensors``, by name, and then the arguments.

    Raises:
        PipelineError: the pieces cannot run apart from each other.
    """

    def __init__(self, root: GraphModule, tensors: Sequence[str]) -> None:
        self._root = root
        self._piece: dict[Node, int] = {}
        self.num_pieces = 1
        for node in root.graph.nodes:
            if node.target is _MARK:
                self.num_pieces += 1
            else:
                self._piece[node] = self.num_pieces - 1
        inputs = [node for node in self._piece if node.op == "placeholder"]
        self._tensors = dict(zip(inputs, tensors, strict=False))
        self._arguments = {node: index for index, node in enumerate(inputs[len(tensors) :])}
        self._last_use = {node: max((self._piece[user] for user in node.users), default=0) for node in self._piece}
        self._written: set[str] = set()
        self._changed: set[int] = set()

    def pieces(self) -> tuple[GraphPiece, ...]:
        """The pieces, in the order in which they run."""
        for piece in range(1, self.num_pieces):
            self._check_crossing(piece)
        aliases: dict[int, list[Node]] = defaultdict(list)
        for node in self._piece:
            for tensor in _tensors_of(node):
                aliases[_storage(tensor)].append(node)
        for node in self._piece:
            for tensor in [tensor for written in _written(node) for tensor in _tensors_of(written)]:
                self._check_write(node, aliases[_storage(tensor)])
        return tuple(map(self._cut, range(self.num_pieces)))

    def _is_everywhere(self, node: Node) -> bool:
        """Whether every stage has the value without a message."""
        return node.op in ("placeholder", "get_attr")

    def _arriving(self, piece: int) -> list[Node]:
        """The values that ``piece`` gets from the previous piece, in the order in which they are computed."""
        return [
            node
            for node, its_piece in self._piece.items()
            if not self._is_everywhere(node) and its_piece < piece <= self._last_use[node]
        ]

    def _check_crossing(self, piece: int) -> None:
        arriving = self._arriving(piece)
        if not arriving:
            raise PipelineError(
                f"nothing that is computed before split point {piece} is needed after it, so that the stages would not "
                "depend on each other; move the split point"
            )
        for node in arriving:
            if not isinstance(node.meta.get("val"), Tensor):
                raise PipelineError(
                    f"{node.target} before split point {piece} gives a {type(node.meta.get('val')).__name__} that is "
                    "needed after it, and only tensors travel; move the split point"
                )

    def _check_write(self, writer: Node, aliases: list[Node]) -> None:
        """Checks that no other piece sees what a node writes.

        Raises:
            PipelineError: another piece uses this memory.
        """
        piece = self._piece[writer]
        for node in filter(self._is_everywhere, aliases):
            if node not in self._tensors:
                what = "an argument" if node in self._arguments else "a tensor that is no buffer"
                raise PipelineError(
                    f"the forward pass changes {what} in place ({writer.target}), which other stages would not see; "
                    "work on a copy, or make it a buffer"
                )
            users = {self._piece[user] for alias in aliases for user in alias.users}
            if users != {piece}:
                raise PipelineError(
                    f"stage {piece} changes {self._tensors[node]!r} in place, and the stages {sorted(users)} use it; "
                    "move the split points so that one stage does"
                )
            self._written.add(self._tensors[node])
        arriving = [node for node in self._arriving(piece) if node in aliases]
        if len(arriving) > 1:
            raise PipelineError(
                f"after split point {piece} the result of {arriving[0].target} is changed in place "
                f"({writer.target}), and {arriving[1].target}, which shares its memory, is needed too; work on a copy, "
                "or move the split point"
            )
        if arriving:
            self._changed.add(piece)

    def _cut(self, piece: int) -> GraphPiece:
        graph = Graph()
        own = [node for node, its_piece in self._piece.items() if its_piece == piece and not self._is_everywhere(node)]
        needed = {source for node in own for source in node.all_input_nodes}
        tensors, arguments = (
            [node for node in inputs if node in needed] for inputs in (self._tensors, self._arguments)
        )
        values = {node: graph.placeholder(node.name) for node in (*self._arriving(piece), *tensors, *arguments)}
        values.update((node, graph.node_copy(node)) for node in self._piece if node.op == "get_attr" and node in needed)
        for node in own:
            values[node] = graph.node_copy(node, lambda source: values[source])
        if piece < self.num_pieces - 1:
            graph.output(tuple(values[node] for node in self._arriving(piece + 1)))
        names = tuple(self._tensors[node] for node in tensors)
        return GraphPiece(
            GraphModule(self._root, graph),
            names,
            tuple(self._arguments[node] for node in arguments),
            self._written.intersection(names),
            piece in self._changed,
        )


def _written(node: Node) -> list[Node]:
    """The nodes into whose memory ``node`` writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found = [node.args[i] for i in _WRITES_STATISTICS.get(node.target, ()) if i < len(node.args)]
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(node.args[index] if index < len(node.args) else node.kwargs.get(argument.name))
    return [entry for entry in tree_leaves(found) if isinstance(entry, Node)]


def _tensors_of(node: Node) -> list[Tensor]:
    return [entry for entry in tree_leaves(node.meta.get("val")) if isinstance(entry, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


Trace = tuple[tuple[GraphPiece, ...], TreeSpec]
"""The pieces of a forward pass, in the order in which they run, and the containers that it returns."""


def traced(
    module: Module,
    forward: Callable[..., Any],
    points: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> Trace:
    """The forward pass of ``module`` in its present mode (training or not), cut before ``points``.

    Args:
        points: names of submodules, each called once; a piece begins with each of them.
        args, kwargs: only shapes, dtypes and devices of their tensors matter.

    Raises:
        PipelineError: the pass cannot be traced, or does not call each submodule once; the message says why.
    """
    named: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    called: list[str] = []

    def mark(name: str) -> None:
        called.append(name)
        pipe_split()  # type: ignore[no-untyped-call]

    hooks = [
        module.get_submodule(point).register_forward_pre_hook(lambda *_, point=point: mark(point)) for point in points
    ]
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [_fake(tensor, device) for tensor in named.values()]
        fake_args, fake_kwargs = tree_map_only(Tensor, lambda tensor: _fake(tensor, tensor.device), (args, kwargs))
    before = other_random_states()
    try:
        # Other hooks on saved tensors are replaced, since the traced tensors have no values.
        unwatched = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.inference_mode(False), torch.set_grad_enabled(grad), unwatched:
            program = torch.export.export(
                _Call(module, forward, list(named)), (tensors, fake_args, fake_kwargs), strict=False
            )
    except Exception as error:
        raise PipelineError(
            f"torch.export cannot trace the forward pass of {type(module).__name__}: {_first_lines(error)}. If it runs "
            "untraced, write it without branches and loops that depend on values of tensors; or split an "
            "nn.Sequential or nn.ModuleList, which needs no tracing, with module="
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if other_random_states() != before:
        raise PipelineError(
            f"the forward pass of {type(module).__name__} draws random numbers of Python's random or of NumPy, which "
            "would stay the same in every batch; draw them with torch"
        )
    if called != list(points):
        raise PipelineError(
            f"a forward pass calls the split points {_listed(called) or 'not at all'}, and stages begin in the order "
            f"{_listed(points)}: name submodules that are called once, in the order in which they run"
        )
    cuts = _Cuts(program.module(check_guards=False), list(named))
    if cuts.num_pieces != len(points) + 1:
        raise PipelineError(
            f"the forward pass of {type(module).__name__} is cut into {cuts.num_pieces} pieces, and the split points "
            f"{_listed(points)} make {len(points) + 1}; leave pipe_split() out of its code, and do not call the "
            "submodules in a block such as torch.no_grad()"
        )
    return cuts.pieces(), program.call_spec.out_spec


class _Call(Module):
    """Calls ``forward`` with tensors instead of the parameters and buffers, which torch.export does not see."""

    def __init__(self, module: Module, forward: Callable[..., Any], names: Sequence[str]) -> None:
        super().__init__()
        holder = Module()
        holder.module = module
        holder.forward = lambda args, kwargs: forward(*args, **kwargs)
        self._hidden = (holder,)
        self._names = [f"module.{name}" for name in names]

    def forward(self, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (holder,) = self._hidden
        values = dict(zip(self._names, tensors, strict=True))
        return torch.func.functional_call(holder, values, (args, kwargs))


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
    )


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:400]}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
