"""Runs one stage's part of a step, by standing in the way of the layers while the user's own code calls them.

The step runs from its beginning on every stage. Layers of earlier stages do nothing and return stand-ins; the first
layer of this stage gets what was received in their place; behind its last layer the stage leaves the step, or, on
the last stage, the rest of the step runs and returns the loss::

    stage 0        embed -> [0] -> [1] -> leaves
    stage 1        embed ->  0  ->  1  -> [2] -> [3] -> leaves             [ ] computed, otherwise passed by
    stage 2        embed ->  0  ->  1  ->  2  ->  3  -> [4] -> head -> loss

This is right only if each layer's input is the previous layer's output. So every call on every stage is checked for
that, and anything else is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_multigpu.engine.pipeline.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.splitting.placeholder import Placeholder, first_placeholder

T = TypeVar("T")

_PLAIN = (type(None), bool, int, float, str)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors within nested containers, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def map_only(kind: type[T], function: Callable[[T], Any], value: Any) -> Any:
    """Nested containers with every object of ``kind`` replaced by what ``function`` returns for it."""
    if isinstance(value, kind):
        return function(value)
    exact = type(value)
    if exact is tuple or exact is list:
        return exact([map_only(kind, function, entry) for entry in value])
    if exact is dict:
        return {key: map_only(kind, function, entry) for key, entry in value.items()}
    if exact in _PLAIN or isinstance(value, Tensor):
        return value
    return tree_map_only(kind, function, value)


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    exact = type(value)
    if exact is tuple or exact is list:
        for entry in value:
            _collect(entry, found)
    elif exact is dict:
        for entry in value.values():
            _collect(entry, found)
    elif exact not in _PLAIN:
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Slot:
    """The place of tensor ``index`` in a container that travels without its tensors."""

    index: int


@dataclass(frozen=True)
class Carried:
    """What one layer hands to the next: nested containers with slots, and the tensors that belong there."""

    structure: Any
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, output: Any) -> Carried:
        if isinstance(output, Tensor):
            return cls(Slot(0), (output,))
        tensors: list[Tensor] = []

        def take(tensor: Tensor) -> Slot:
            tensors.append(tensor)
            return Slot(len(tensors) - 1)

        return cls(map_only(Tensor, take, output), tuple(tensors))


class _Left(BaseException):
    """Thrown through the user's step when the stage's last layer has run; no ``except Exception`` stops it."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class LayerInterception:
    """One stage's way through a chain.

    Args:
        chain: all layers.
        start, stop: this stage's layers are ``[start, stop)``.
        begin_part: called with 0 before the step, with 1 + i before this stage's layer i and with 1 + n behind the
            last of n layers: the points at which a random state begins.
        run_layer: called with i, this stage's layer i's forward and its arguments, to run it.
    """

    def __init__(
        self,
        chain: Chain,
        start: int,
        stop: int,
        begin_part: Callable[[int], None] = lambda part: None,
        run_layer: Callable[..., Any] = lambda index, forward, args, kwargs: forward(*args, **kwargs),
    ) -> None:
        self.chain = chain
        self.start = start
        self.stop = stop
        self._begin_part = begin_part
        self._run_layer = run_layer
        self._receive: Callable[[], Carried] | None = None
        self._values: Callable[[], tuple[Tensor, ...]] | None = None
        self._next = 0
        self._previous: list[tuple[Tensor, int]] = []
        self._incoming: dict[int, int] = {}
        self._arrived: Carried | None = None
        self._passed: Any = None

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.chain)

    @property
    def is_behind(self) -> bool:
        """Whether the step that is being run has passed the last layer, which only the last stage's does."""
        return self._next == len(self.chain)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block the layers are called through this walk."""
        before = [layer.__dict__.get("forward") for layer in self.chain.layers]
        for index, layer in enumerate(self.chain.layers):
            layer.__dict__["forward"] = functools.partial(self._call, index, layer.forward)
        try:
            with self.chain.entered():
                yield
        finally:
            for layer, forward in zip(self.chain.layers, before, strict=True):
                if forward is None:
                    del layer.__dict__["forward"]
                else:
                    layer.__dict__["forward"] = forward

    def take(self, start: int, stop: int) -> None:
        """Goes on with another stage of this rank."""
        self.start, self.stop = start, stop

    def run(
        self,
        step: Callable[[], Any],
        receive: Callable[[], Carried] | None,
        values: Callable[[], tuple[Tensor, ...]] | None = None,
    ) -> tuple[bool, Any]:
        """Runs ``step`` as far as this stage goes; within :meth:`installed`.

        Args:
            step: the user's step.
            receive: gives what the previous stage has sent; called once the step has reached the chain. None on the
                first stage.
            values: gives the tensors of that with their values; called as this stage's first layer needs them, so that
                what comes before it does not wait. None where ``receive`` gives the values too.

        Returns:
            Whether the step was left, and what the stage's last layer returned; else what the step returned.

        Raises:
            PipelineError: the layers are not used as a chain, or a result needs values of another stage.
        """
        self._receive, self._values = receive, values
        self._next = 0
        self._previous = []
        self._incoming = {}
        self._arrived = None
        self._begin_part(0)
        try:
            result = step()
        except _Left as left:
            return True, left.output
        finally:
            reached = self._next
            self._previous = []
            self._incoming = {}
            self._arrived = self._passed = None
        if 0 < reached < len(self.chain):
            raise PipelineError(
                f"the step ended behind layer {self._name(reached - 1)} without running {self._name(reached)}: "
                "every step must run all layers of the split part"
            )
        lost = first_placeholder(result)
        if lost is not None:
            raise PipelineError(
                f"what the step returns depends on {lost.source}, whose values are on another stage: outside of the "
                "split part only the split part's result may be used"
            )
        return False, result

    def _call(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check_order(index)
        given = tensors_of((args, kwargs))
        self._check_input(index, given)
        self._next = index + 1
        if index < self.start:
            return self._pass_by(index)
        arriving = self._incoming if index == self.start else {}
        missing = next((t for t in given if isinstance(t, Placeholder) and id(t) not in arriving), None)
        if missing is not None:
            raise PipelineError(
                f"layer {self._name(index)} takes {missing.source} as an input, whose values are on another stage: "
                "besides the previous layer's output a layer can take only what every stage computes itself"
            )
        self._begin_part(1 + index)
        if arriving:
            assert self._arrived is not None
            values = self._arrived.tensors if self._values is None else self._values()
            args, kwargs = map_only(Placeholder, lambda placeholder: values[arriving[id(placeholder)]], (args, kwargs))
        output = self._run_layer(index, forward, args, kwargs)
        if index == self.stop - 1 and not self.is_last:
            raise _Left(output)
        if index == len(self.chain) - 1:
            self._begin_part(2 + index)
        self._remember(output)
        return output

    def _pass_by(self, index: int) -> Any:
        """The output of a layer of an earlier stage: what will be received, without its values.

        All but the last of these layers return the same stand-ins, which take time to make: whether they are called one
        after the other, the stages see that compute them.
        """
        if self._arrived is None:
            assert self._receive is not None
            self._arrived = self._receive()
        if not self._previous or index == self.start - 1:
            source = f"the output of layer {self._name(index)}"
            placeholders = [Placeholder(tensor, source, fixed=True) for tensor in self._arrived.tensors]
            self._passed = map_only(Slot, lambda slot: placeholders[slot.index], self._arrived.structure)
            self._incoming = {id(placeholder): number for number, placeholder in enumerate(placeholders)}
            self._remember(self._passed)
        return self._passed

    def _remember(self, output: Any) -> None:
        self._previous = [(tensor, _version(tensor)) for tensor in tensors_of(output)]

    def _check_order(self, index: int) -> None:
        if index == self._next:
            return
        if index == 0 and self._next == len(self.chain):
            raise PipelineError(
                f"the step runs the split part {self.chain.name!r} twice, and a pipeline can run it once a step: keep "
                "the result of the first call, or split another part with module="
            )
        expected = self._name(self._next) if self._next < len(self.chain) else "no further layer"
        raise PipelineError(
            f"the step calls {self._name(index)} where {expected} was due: the layers of {self.chain.name!r} must run "
            "one after the other, each once; name another part with module="
        )

    def _check_input(self, index: int, tensors: list[Tensor]) -> None:
        if index == 0:
            return
        given = {id(tensor) for tensor in tensors}
        used = [(tensor, version) for tensor, version in self._previous if id(tensor) in given]
        if not used:
            raise PipelineError(
                f"the input of layer {self._name(index)} is not the output of layer {self._name(index - 1)}: something "
                "is computed between the two, such as a residual x + layer(x), and would be lost between stages; move "
                "it into the layers, or name another part with module="
            )
        if any(_version(tensor) != version for tensor, version in used):
            raise PipelineError(
                f"the output of layer {self._name(index - 1)} is changed in place before layer {self._name(index)} "
                "takes it, which would be lost between stages; move that into the layers"
            )

    def _name(self, index: int) -> str:
        return self.chain.layer_name(index)


def _version(tensor: Tensor) -> int:
    """How often the tensor was written into; not known of tensors that were made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
