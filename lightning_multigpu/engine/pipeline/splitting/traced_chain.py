"""Traced chain: a module of any form, cut before named submodules by tracing it on the first batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.chain import Chain, modules_around, smallest_around, uncompiled
from lightning_multigpu.engine.pipeline.splitting.tracing import GraphPiece, Trace, traced
from lightning_multigpu.engine.replaced_attributes import replaced


class TracedPiece(Module):
    """The part of a traced module between two split points.

    It finds its parameters and buffers by name. It lists them as its own, and their modules as its children.
    """

    def __init__(self, whole: Module) -> None:
        super().__init__()
        self._owners: dict[str, Module] = dict(whole.named_modules(remove_duplicate=False))
        self.names: tuple[str, ...] = ()

    def forward(self, arrived: tuple[Tensor, ...], piece: GraphPiece, arguments: list[Any]) -> tuple[Any, ...]:
        """Runs a graph's piece on the previous piece's result and on the whole module's arguments that it uses."""
        if piece.changes_arrived:
            arrived = tuple(tensor.clone() for tensor in arrived)
        result: tuple[Any, ...] = piece.module(*arrived, *map(self._tensor, piece.tensors), *arguments)
        return result

    def modules(self, remove_duplicate: bool = True) -> Iterator[Module]:
        yield self
        yield from dict.fromkeys(self._owners[name.rpartition(".")[0]] for name in self.names)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        for name in self.names:
            tensor = self._tensor(name)
            if isinstance(tensor, Parameter):
                yield name, tensor

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            tensor = self._tensor(name)
            if not isinstance(tensor, Parameter):
                yield name, tensor

    def _tensor(self, name: str) -> Tensor:
        path, _, own_name = name.rpartition(".")
        tensor: Tensor = getattr(self._owners[path], own_name)
        return tensor


class _Arranged(BaseException):
    """Raised through the user's step when the module has been traced."""


class TracedChain(Chain):
    """The pieces of a module between split points.

    The forward pass is traced again for arguments of other shapes, and once each for training and evaluation; a trace
    takes seconds. Side effects of the forward pass, such as Python counters or logs, happen only in a trace. The name
    "auto" takes the smallest submodule with all points in its forward pass.

    Raises:
        ValueError: there are no such submodules.
    """

    layers: tuple[TracedPiece, ...]

    def __init__(self, module: Module, name: str, points: Sequence[str], device: torch.device) -> None:
        name = smallest_around(module, points) if name == "auto" else name
        self._whole = _checked(module, name, points)
        pieces = tuple(TracedPiece(self._whole) for _ in range(len(points) + 1))
        super().__init__(name or type(module).__name__, pieces, modules_around(module, name))
        self.points = points
        self._prefix = f"{name}." if name else ""
        self._points = [point.removeprefix(self._prefix) for point in points]
        self._device = device
        self._traces: dict[Any, Trace] = {}
        self.is_arranged = False
        self._is_all = self._whole is module  # code before its forward pass may need any parameter
        self._parts = tuple(self._whole.modules())

    def layer_name(self, index: int) -> str:
        return f"the piece that begins with {self.points[index - 1]!r}" if index else f"the beginning of {self.name!r}"

    def describe(self) -> str:
        return f"{self.name!r}, cut before {', '.join(map(repr, self.points))}"

    def describe_layers(self, start: int, stop: int) -> str:
        return self.layer_name(start)

    def modules(self) -> set[Module]:
        return set(self._parts)

    def unassigned(self) -> Iterable[Tensor]:
        if self.is_arranged or self._is_all:
            return ()
        return (*self._whole.parameters(), *self._whole.buffers())

    def arrange(self, step: Callable[[], Any], *, will_train: bool) -> None:
        """Runs ``step`` up to the call of the module, traces the module and assigns its tensors to the pieces.

        If it ``will_train``, it is traced in training mode too, which may use further parameters and buffers.

        Raises:
            PipelineError: the step does not call the module, or the module cannot be traced.
        """
        own = self._whole.forward

        def trace(*args: Any, **kwargs: Any) -> None:
            self._traced(own, args, kwargs)
            if will_train and not (self._whole.training and torch.is_grad_enabled()):
                with ExitStack() as undo:
                    for part in self._parts:
                        undo.enter_context(replaced(part, training=True))
                    undo.enter_context(torch.inference_mode(False))
                    undo.enter_context(torch.enable_grad())
                    self._traced(own, args, kwargs)
            raise _Arranged

        with suppress(_Arranged), replaced(self._whole, forward=uncompiled(trace)):
            step()
            raise PipelineError(f"the step returned without calling {self.name!r}; every step must run the split part")
        self.is_arranged = True

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Runs the module in pieces within the block."""
        forward = self._whole.forward

        def in_pieces(*args: Any, **kwargs: Any) -> Any:
            (pieces, output), leaves = self._traced(forward, args, kwargs)
            values: Any = ()
            for layer, piece in zip(self.layers, pieces, strict=True):
                values = layer(values, piece, [leaves[index] for index in piece.arguments])
            return tree_unflatten(list(values), output)

        with replaced(self._whole, forward=uncompiled(in_pieces)):
            yield

    def _traced(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Trace, list[Any]]:
        """The trace for arguments of this kind in the present mode, and the leaves of the arguments."""
        leaves, structure = tree_flatten((args, kwargs))
        key = (
            tuple(_kind(leaf) for leaf in leaves),
            structure,
            tuple(part.training for part in self._parts),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(self._device.type) and torch.get_autocast_dtype(self._device.type),
            torch.get_default_dtype(),
        )
        if key not in self._traces:
            trace = traced(self._whole, forward, self._points, args, kwargs, self._device)
            self._assign_tensors(trace[0])
            self._traces[key] = trace
        return self._traces[key], leaves

    def _assign_tensors(self, pieces: Sequence[GraphPiece]) -> None:
        """Records which piece uses which tensors.

        Raises:
            PipelineError: another piece used one of them in earlier traces.
        """
        for stage, (layer, piece) in enumerate(zip(self.layers, pieces, strict=True)):
            for name in piece.tensors:
                users = [other for other, one in enumerate(self.layers) if name in one.names]
                if self.is_arranged and stage not in users and (users or name in piece.written):
                    others = ", ".join(map(str, users)) or "none"
                    raise PipelineError(
                        f"stage {stage} uses {self._prefix + name!r} for these arguments in this mode, and the "
                        f"stages that used it before are: {others}; move the split points so that it stays on one "
                        "stage"
                    )
            if not self.is_arranged:
                layer.names = tuple(dict.fromkeys((*layer.names, *piece.tensors)))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf if isinstance(leaf, Hashable) else repr(leaf)


def _checked(module: Module, name: str, points: Sequence[str]) -> Module:
    """The submodule called ``name``.

    Raises:
        ValueError: it, or a point, is no submodule; a point is not within it; or it has a backward hook inside.
    """
    parts: dict[str, Module] = dict(module.named_modules())
    for option, path in (("module", name), *(("split_points", point) for point in points)):
        if path not in parts:
            raise ValueError(f"{option} names {path!r}, which is no part of the module")
    prefix = f"{name}." if name else ""
    for path, part in parts.items():
        if path in points and not path.startswith(prefix):
            raise ValueError(f"split_points names {path!r}, which is not within module={name!r}; leave module= out")
        if path.startswith(prefix) and path and (part._backward_hooks or part._backward_pre_hooks):
            raise ValueError(
                f"{path!r} has a backward hook, which a traced forward pass would leave out; remove it, or split a "
                "chain of layers with module="
            )
    return parts[name]
