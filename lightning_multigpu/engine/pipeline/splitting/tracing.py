"""Traces a module's forward pass with ``torch.export``, marked where named submodules are called.

Nothing is computed: the pass runs on tensors without values (``FakeTensorMode``, which torch.export recommends for
models that do not fit into memory and offers from nowhere else), in place of the parameters and buffers too, of which
a stage has its own only. These are inputs of the graph, so that whoever runs it takes those that the module has at
that time: tied ones stay tied, and what was trained or loaded is used.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining import pipe_split
from torch.nn import Module
from torch.utils._pytree import TreeSpec, tree_map_only

from lightning_multigpu.engine.pipeline.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.graph_cuts import GraphCuts, GraphPiece

_MARK = torch.ops.pippy._pipe_split.default  # what pipe_split() leaves in a graph


@dataclass(frozen=True)
class Trace:
    """A forward pass in pieces.

    Attributes:
        pieces: in the order in which they run.
        tensors: names of the parameters and buffers, which are the first inputs of the graph; then come the leaves of
            ``(args, kwargs)``.
        output: the containers that the forward pass returns.
    """

    pieces: tuple[GraphPiece, ...]
    tensors: tuple[str, ...]
    output: TreeSpec

    def tensors_of(self, piece: int) -> list[str]:
        """The names of the parameters and buffers that a piece uses."""
        return [self.tensors[index] for index in self.pieces[piece].inputs if index < len(self.tensors)]

    def written_by(self, piece: int) -> list[str]:
        """The names of those that it writes into."""
        return [self.tensors[index] for index in sorted(self.pieces[piece].written)]


def traced(
    module: Module,
    forward: Callable[..., Any],
    points: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> Trace:
    """The forward pass of ``module`` in the mode in which it is (training or not), cut before ``points``.

    Args:
        module: the whole of what is cut.
        forward: its own.
        points: names of submodules, each called once; a piece begins with each.
        args, kwargs: only their shapes, dtypes and devices count, and what is no tensor.
        device: where parameters and buffers will be.

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
    before = _other_random_states()
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(grad), saved_tensors_hooks(_itself, _itself):
            program = torch.export.export(
                _Call(module, forward, list(named)), (tensors, fake_args, fake_kwargs), strict=False
            )
    except Exception as error:
        raise PipelineError(
            f"torch.export cannot trace the forward pass of {type(module).__name__}: {_first_lines(error)}. If it runs "
            "untraced, write it without what depends on values of tensors, such as branches and loops; or split an "
            "nn.Sequential or nn.ModuleList, which needs no tracing, with module="
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if _other_random_states() != before:
        raise PipelineError(
            f"the forward pass of {type(module).__name__} draws random numbers of Python's random or of NumPy, which "
            "would stay the same in every batch; draw them with torch"
        )
    _check_called(points, called)
    graph = program.module(check_guards=False)
    names = [*(f"{name!r}" for name in named), *["an argument"] * (len(list(_placeholders(graph))) - len(named))]
    cuts = GraphCuts(graph, _MARK, names, len(named))
    if cuts.num_pieces != len(points) + 1:
        raise PipelineError(
            f"the forward pass of {type(module).__name__} is cut into {cuts.num_pieces} pieces, and the split points "
            f"{_listed(points)} make {len(points) + 1}; leave pipe_split() out of its code, and do not call the "
            "submodules in a block such as torch.no_grad()"
        )
    return Trace(cuts.pieces, tuple(named), program.call_spec.out_spec)


class _Call(Module):
    """Calls ``forward`` with tensors in place of the parameters and buffers; shows torch.export none of its own."""

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


def _itself(tensor: Tensor) -> Tensor:
    """In place of hooks that look at what is saved for backward, which has no values here."""
    return tensor


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
    )


def _placeholders(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _check_called(points: Sequence[str], called: Sequence[str]) -> None:
    counts = Counter(called)
    for point in points:
        if counts[point] != 1:
            raise PipelineError(
                f"split point {point!r} is called {counts[point]} times in a forward pass, and a stage begins once: "
                "name a submodule that is called once"
            )
    if list(called) != list(points):
        raise PipelineError(f"the split points run in the order {_listed(called)}; name them in that order")


def _other_random_states() -> list[Any]:
    numpy = sys.modules.get("numpy")
    drawn = [] if numpy is None else [str(entry) for entry in numpy.random.get_state()[2:]]
    return [random.getstate(), *drawn]


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:400]}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
