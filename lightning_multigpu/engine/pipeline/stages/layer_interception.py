"""Layer interception: runs one stage's part of a step by patching the calls of each layer.

Every stage runs the user's step from its beginning. Layers of earlier stages compute nothing and return placeholders.
The first layer of this stage gets the received tensors in their place. After its last layer the stage ends the step;
on the last stage the rest of the step runs and returns the loss::

    stage 0       [embed]-> [0] -> [1] -> end
    stage 1        embed ->  0  ->  1  -> [2] -> [3] -> end                [ ] computed, otherwise skipped
    stage 2        embed ->  0  ->  1  ->  2  ->  3  -> [4] -> [head] -> [loss]

This is correct only if each layer's input is the previous layer's output. Every call on every stage is checked for
that, and any other use of the layers raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from lightning_multigpu._torch_compat import is_transformed
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.chain import Chain, uncompiled
from lightning_multigpu.engine.placeholder import Placeholder, first_placeholder
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit
from lightning_multigpu.engine.tensor_split.parts import PartLayout, SplitTensor, local

T = TypeVar("T")

_PLAIN = (type(None), bool, int, float, str)
_CALLS = ("forward", "_compiled_call_impl")  # torch calls the second one, if there is one, instead of hooks and forward
_OTHER_WAYS = (
    "move it into the layers, name another part with module=, or cut the forward pass at submodules, unchanged, with "
    "split_points="
)


def map_only(kind: type[T], function: Callable[[T], Any], value: Any) -> Any:
    """Nested containers with every object of ``kind`` replaced by what ``function`` returns for it.

    As ``torch.utils._pytree``, but fast for tuples, lists and dictionaries: it runs at every layer call.
    """
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


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors within nested containers, in order; fast likewise."""
    found: list[Tensor] = []
    map_only(Tensor, found.append, value)
    return found


@dataclass(frozen=True)
class Slot:
    """Marks the place of tensor ``index`` in a container that is sent without its tensors.

    Of a part of a tensor, ``split`` tells the entries that each rank has, and ``layer`` the layer that has made it.
    """

    index: int
    split: ParameterSplit | None = None
    layer: str = ""


@dataclass(frozen=True)
class Activations:
    """The output of a layer as it is sent: nested containers with slots, and the tensors of these slots."""

    structure: Any
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, output: Any) -> Activations:
        tensors: list[Tensor] = []

        def take(tensor: Tensor) -> Slot:
            tensors.append(local(tensor))
            placed = (tensor.placed.split, tensor.placed.layer) if isinstance(tensor, SplitTensor) else ()
            return Slot(len(tensors) - 1, *placed)

        return cls(map_only(Tensor, take, output), tuple(tensors))


class _StageEnd(BaseException):
    """Raised through the user's step after the stage's last layer; no ``except Exception`` catches it."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class LayerInterception:
    """Runs the layers of one stage within the user's step, and skips those of the other stages.

    Args:
        begin_part: called to set a new random state: with 0 before the step, with 1 + i before layer i of this stage,
            and with 1 + n after the last of n layers.
        run_layer: called as ``run_layer(i, own, args, kwargs)`` to run layer i of this stage; ``own`` is its own call,
            with hooks and compiled code. None runs ``own`` as it is.
    """

    def __init__(
        self,
        chain: Chain,
        begin_part: Callable[[int], None] = lambda part: None,
        run_layer: Callable[..., Any] | None = None,
    ) -> None:
        self.chain = chain
        self._places: dict[Module, list[int]] = {}  # several of a layer that runs again
        for index, layer in enumerate(chain.layers):
            self._places.setdefault(layer, []).append(index)
        self._names = [chain.layer_name(index) for index in range(len(chain))]
        self._start = self._stop = 0  # of the running stage
        self._begin_part = begin_part
        self._run_layer = run_layer
        self._receive: Callable[[], Activations] | None = None
        self._values: Callable[[], tuple[Tensor, ...]] | None = None
        self._with_grad = False
        self._own: dict[Module, tuple[Any, ...]] = {}
        self._patches: dict[Module, dict[str, Any]] = {}
        self._before: dict[Module, dict[str, Any]] = {}
        self._is_inside = False  # a layer runs, within which calls are not intercepted
        self._next = 0
        self._running = False
        self._forget()

    def _forget(self) -> None:
        self._previous: list[tuple[Tensor, int]] = []
        self._incoming: dict[int, int] = {}
        self._arrived: Activations | None = None
        self._skipped: Any = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Intercepts the calls of the layers within the block."""
        try:
            for layer in self._places:
                own = layer.forward, layer._compiled_call_impl or layer._call_impl
                if self._own.get(layer) != own:  # wired once, and again if the layer has been compiled or replaced
                    patches = [uncompiled(partial(self._call, layer, function)) for function in own]
                    self._own[layer], self._patches[layer] = own, dict(zip(_CALLS, patches, strict=True))
                self._before[layer] = _put(layer, self._patches[layer])
            with self.chain.entered():
                yield
        finally:
            for layer, before in self._before.items():
                _put(layer, before)
            self._before = {}

    def run(
        self,
        bounds: tuple[int, int],
        step: Callable[[], Any],
        receive: Callable[[], Activations] | None,
        values: Callable[[], tuple[Tensor, ...]] | None = None,
    ) -> tuple[bool, Any]:
        """Runs ``step`` up to the end of a stage; call it within :meth:`installed`.

        Args:
            receive: returns the previous stage's output; called when the step reaches the chain. None on the first
                stage.
            values: returns the tensors of ``receive()`` with their values; called just before this stage's first layer
                runs, so that the step does not wait earlier. None if ``receive`` returns the values already.

        Returns:
            True and the output of the stage's last layer; or, on the last stage, False and what the step returned.

        Raises:
            PipelineError: the layers are not used as a chain, or a result needs values of another stage.
        """
        self._start, self._stop = bounds
        self._receive, self._values = receive, values
        self._with_grad = torch.is_grad_enabled()
        self._next = 0
        self._running = True
        self._begin_part(0)
        try:
            result = step()
        except _StageEnd as end:
            return True, end.output
        except RuntimeError as error:
            if "differentiated Tensor" not in str(error):
                raise
            raise PipelineError(
                "the step calls torch.autograd.grad, and a pipeline cannot differentiate across stages within a step: "
                "what is before the layers, and their parameters, are on other stages. Compute gradient penalties and "
                f"inner updates within one layer or after the layers, or use ring_ddp ({error})"
            ) from error
        finally:
            self._running = False
            self._forget()
        if 0 < self._next < len(self._names):
            raise PipelineError(
                f"the step ended after layer {self._names[self._next - 1]} without running {self._names[self._next]}: "
                "every step must run all layers of the split part"
            )
        lost = first_placeholder(result)
        if lost is not None:
            raise PipelineError(
                f"what the step returns depends on {lost.source}, whose values are on another stage: outside of the "
                "split part only the split part's result may be used",
                lost.sources,
            )
        return False, result

    def _call(self, layer: Module, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A call of a layer, in place of its own ``function``."""
        if self._is_inside:
            return function(*args, **kwargs)
        places = self._places[layer]
        index = self._next if self._next in places else places[0]
        given = tensors_of((args, kwargs))
        self._check(index, given)
        self._next = index + 1
        if index < self._start:
            return self._skip(index, args, kwargs)
        arriving = self._incoming if index == self._start else {}
        missing = next((t for t in given if isinstance(t, Placeholder) and id(t) not in arriving), None)
        self._begin_part(1 + index)
        if missing is not None:
            raise PipelineError(
                f"layer {self._names[index]} takes {missing.source} as an input, whose values are on another "
                "stage: besides the previous layer's output a layer can take only what every stage computes itself; "
                f"{_OTHER_WAYS}",
                missing.sources,
            )
        if arriving:
            assert self._arrived is not None
            values = self._placed(self._arrived.tensors if self._values is None else self._values())
            args, kwargs = map_only(Placeholder, lambda placeholder: values[arriving[id(placeholder)]], (args, kwargs))
        own = partial(self._run_own, layer, function)
        output = own(*args, **kwargs) if self._run_layer is None else self._run_layer(index, own, args, kwargs)
        tensors = tensors_of(output)
        if not tensors:
            raise PipelineError(
                f"layer {self._names[index]} returns {type(output).__name__}, in which a pipeline finds no "
                "tensors to pass on: return tensors, or tuples, named tuples, lists or dictionaries of tensors"
            )
        if index == self._stop - 1 and self._stop < len(self._names):
            raise _StageEnd(output)
        if index == len(self._names) - 1:
            self._begin_part(2 + index)
        self._previous = [(tensor, _version(tensor)) for tensor in tensors]
        return output

    def _run_own(self, layer: Module, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs a layer, which is not patched meanwhile: compiled code would look into the patches."""
        patches = _put(layer, self._before[layer])
        self._is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_inside = False
            _put(layer, patches)

    def _skip(self, index: int, args: Any, kwargs: Any) -> Any:
        """The output of a layer of an earlier stage: placeholders for what is received.

        Placeholders take time to make, so all skipped layers but the last return the same ones: the stages that compute
        these layers check the order of their calls. The layer's forward hooks get them, too: if the loss uses a value
        that a hook has kept, it finds a placeholder and is refused, instead of missing the value. The stage that runs
        the layer uses the hook's result.
        """
        if self._arrived is None:
            assert self._receive is not None
            self._arrived = self._receive()
        if not self._previous or index == self._start - 1:
            source = f"the output of layer {self._names[index]}"
            placeholders = [Placeholder(each, source, fixed=True) for each in self._placed(self._arrived.tensors)]
            self._skipped = map_only(Slot, lambda slot: placeholders[slot.index], self._arrived.structure)
            self._incoming = {id(placeholder): number for number, placeholder in enumerate(placeholders)}
            self._previous = [(placeholder, _version(placeholder)) for placeholder in placeholders]
        layer: Any = self.chain.layers[index]
        for number, hook in (*layer._forward_pre_hooks.items(), *layer._forward_hooks.items()):
            with_kwargs = number in layer._forward_pre_hooks_with_kwargs or number in layer._forward_hooks_with_kwargs
            result = (self._skipped,) if number in layer._forward_hooks else ()
            with suppress(PipelineError):  # a hook that looks at values, to print them for example
                hook(layer, args, *((kwargs,) if with_kwargs else ()), *result)
        return self._skipped

    def _placed(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Received tensors, of which parts are parts again."""
        group = self.chain.tensor_group
        if group is None or self._arrived is None:
            return tensors
        placed = list(tensors)

        def place(slot: Slot) -> None:
            if slot.split is not None:
                placed[slot.index] = SplitTensor.of(tensors[slot.index], PartLayout(slot.split, group, slot.layer))

        map_only(Slot, place, self._arrived.structure)
        return placed

    def _check(self, index: int, given: Sequence[Tensor]) -> None:
        """Raises PipelineError unless this layer is due, and takes the output of the layer before it."""
        names, previous = self._names, self._next
        is_reentrant = self._with_grad and not torch.is_grad_enabled() and _runs_in_checkpoint()
        if is_reentrant or not self._running:
            within = "within torch.utils.checkpoint, which would call it again in backward"
            where = within if self._running else "outside of the step, as torch.utils.checkpoint does in backward"
            raise PipelineError(
                f"layer {names[index]} is called {where}: leave the checkpoint around the layers out, and pass "
                "activation_checkpointing=True to the strategy"
            )
        if is_transformed(given):
            raise PipelineError(
                f"layer {names[index]} is called within a transform of torch.func (vmap, grad, jvp, ...), or with a "
                "forward-mode derivative, and a pipeline cannot transform what other stages compute: transform within "
                "one layer, or before or after the layers; or use ring_ddp"
            )
        if index != previous:
            is_past_chain = previous == len(self._names)  # on the last stage only
            if index == 0 and is_past_chain:
                raise PipelineError(
                    f"the step runs the split part {self.chain.name!r} twice, and a pipeline can run it once a step: "
                    "keep the result of the first call, or split another part with module="
                )
            raise PipelineError(
                f"the step calls {names[index]} where {'no further layer' if is_past_chain else names[previous]} was "
                f"due: the layers of {self.chain.name!r} must run one after the other, each once; name another part "
                "with module="
            )
        ids = {id(tensor) for tensor in given}
        used = [(tensor, version) for tensor, version in self._previous if id(tensor) in ids]
        if index and not used:
            raise PipelineError(
                f"the input of layer {names[index]} is not the output of layer {names[index - 1]}: something is "
                "computed between the two, such as a residual x + layer(x), and would be lost between stages; "
                f"{_OTHER_WAYS}"
            )
        if any(_version(tensor) != version for tensor, version in used):
            raise PipelineError(
                f"the output of layer {names[index - 1]} is changed in place before layer {names[index]} takes it, "
                f"which would be lost between stages; {_OTHER_WAYS}"
            )


def _put(layer: Module, entries: dict[str, Any]) -> dict[str, Any]:
    """Sets what is called of a layer; returns what was set before."""
    table = vars(layer)
    before = {name: table.pop(name) for name in _CALLS if name in table}
    table.update(entries)
    return before


def _version(tensor: Tensor) -> int:
    """The number of writes in place; 0 for tensors made in inference mode, which do not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _runs_in_checkpoint() -> bool:
    """Whether the caller runs within ``torch.utils.checkpoint``."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
