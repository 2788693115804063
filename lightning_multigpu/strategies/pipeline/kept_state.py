"""Kept state: values that steps keep in the module for later steps, and whether a pipeline's stages read old ones.

::

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.layers(batch * self.scale))  # every stage reads self.scale
        self.scale = 0.9 * self.scale + 0.1 * loss.detach()  # only the last stage runs this
        return loss
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from lightning_multigpu._lightning_internals import attributes_of_lightning
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.stages.layer_interception import Region
from lightning_multigpu.strategies.pipeline.last_stage_outputs import mark

Place = tuple[str, str]
"""The name of a submodule and that of its attribute or buffer."""

Changes = dict[Place, set[Region]]
Reads = dict[Place, dict[Region, str]]


class KeptState:
    """Notes which attributes and buffers the steps of this rank change, and which of them later steps read.

    Statistics of BatchNorm and states of torchmetrics are left out: losses in training do not depend on them.

    Args:
        module: the user's module.
        chain: its layers.

    Attributes:
        changes: the places that steps have changed, with the known regions of these changes.
        reads: the places among them that watched steps have read, with the regions and the first line of each.
    """

    def __init__(self, module: pl.LightningModule, chain: Chain) -> None:
        self.changes: Changes = {}
        self.reads: Reads = {}
        self._ignored = {*attributes_of_lightning(), "forward"}
        self._parts: dict[str, Any] = {}
        self._layers: dict[str, Module] = {}
        inside = chain.modules()
        for name, part in module.named_modules():
            if isinstance(part, _BatchNorm | Metric):
                continue
            helpers = {n: value for n, value in vars(part).items() if n not in self._ignored and _is_helper(value)}
            found = {name: part, **{".".join(filter(None, (name, entry))): helpers[entry] for entry in helpers}}
            self._parts |= found
            if part in inside:
                self._layers |= dict.fromkeys(found, part)
        # An object that a model and its layers share gets the name of the outermost module.
        self._names = {id(part): name for name, part in reversed(self._parts.items())}
        # No module of torch keeps a value for its own later use.
        self._outside = [n for n, part in self._parts.items() if n not in self._layers and _library(part) != "torch"]
        self._forget()

    def _forget(self) -> None:
        self._region = Region.BEFORE
        self._scanned: Sequence[str] = ()
        self._before: dict[Place, Any] | None = None  # outside of training steps
        self._fresh: set[Place] = set()

    # What changes

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Adds to ``changes`` the places outside of the layers that change within the block."""
        before = self._marks(self._outside)
        yield
        for place, found in self._marks(self._outside).items():
            if place not in before or before[place] != found:
                self.changes.setdefault(place, set())

    @contextmanager
    def step(self, *, scan: bool = False) -> Iterator[None]:
        """Adds to ``changes`` the regions of the step within the block that change something.

        Args:
            scan: compare all places, and not only those that are known to change.
        """
        self._scanned = list(self._parts) if scan else ()
        self._before = self._marks(self._scanned)
        try:
            yield
        finally:
            self.enter(Region.BEFORE)
            self._forget()

    def enter(self, region: Region) -> None:
        """Called when the running step enters another region; does nothing outside of training steps."""
        if self._before is None:
            return
        now = self._marks(self._scanned)
        for place, found in now.items():
            if place not in self._before or self._before[place] != found:
                self.changes.setdefault(place, set()).add(self._region)
        self._region, self._before = region, now

    def learn(self, places: Iterable[Place]) -> None:
        """Adds places that other ranks have found to change."""
        for place in places:
            self.changes.setdefault(place, set())

    def _marks(self, names: Sequence[str]) -> dict[Place, Any]:
        """Marks of all places in the modules of these names, and of places that are known to change."""
        marks = {place: _mark(self._value(*place)) for place in self.changes}
        for name in names:
            own = vars(self._parts[name])
            for table in (own, own.get("_buffers", {})):
                marks.update(
                    ((name, entry), _mark(value)) for entry, value in table.items() if entry not in self._ignored
                )
        return marks

    def _value(self, name: str, entry: str) -> Any:
        own = vars(self._parts[name])
        return own.get(entry, own.get("_buffers", {}).get(entry))

    # What is read

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Adds to ``reads`` the places in ``changes`` that steps within the block read."""
        with ExitStack() as undo:
            watched = {(type(self._parts[name]), attribute) for name, attribute in self.changes}
            for kind, attribute in watched:
                _watch(kind, attribute, self, undo)
            yield

    def read(self, part: Any, attribute: str) -> None:
        """Notes that a step reads an attribute; called by watched classes."""
        place = (self._names.get(id(part), ""), attribute)
        if place in self.changes and place not in self._fresh:
            found = self.reads.setdefault(place, {})
            if self._region not in found:
                frame = sys._getframe(2)
                file = PurePath(frame.f_code.co_filename).name
                found[self._region] = f"{frame.f_code.co_name}, line {frame.f_lineno} of {file}"

    def assigned(self, part: Any, attribute: str) -> None:
        """Notes that a step assigns an attribute; called by watched classes."""
        if self._region == Region.BEFORE:  # on all stages: a later read in this step is not old
            self._fresh.add((self._names.get(id(part), ""), attribute))

    # What is wrong with it

    def old_value(self, changes: Changes, reads: Reads, held: Collection[Module]) -> str | None:
        """The message that a rank has read an old value of a place that another rank has changed; None if it has not.

        Args:
            changes: the changes of the last stage's rank.
            reads: the reads of the rank.
            held: the modules in the layers of the rank.
        """
        for place, found in reads.items():
            if place[0] in self._layers:
                if self._layers[place[0]] not in held:
                    return (
                        f"{called(place)} changes where its layer runs, and another stage of the pipeline reads an "
                        f"old value ({next(iter(found.values()))}): let the layer return the new value with its "
                        "output, and the later layers pass it on, as in x, own = layer(x, own)"
                    )
                continue
            changed = changes.get(place, set())
            line = found.get(Region.BEFORE) if changed - {Region.BEFORE} else None
            line = line or (found.get(Region.WITHIN) if Region.AFTER in changed else None)
            if line is not None:
                return (
                    f"training_step changes {called(place)} where only the last stage of a pipeline runs, and every "
                    f"stage reads it ({line}), so that the other stages would use an old value. Change it in "
                    "on_train_batch_end(outputs, batch, batch_idx), which every stage calls once a batch, with the "
                    "loss of the whole batch; a value that only one layer uses can also be kept in that layer"
                )
        return None

    def suspects(self, reads: Sequence[Reads]) -> str:
        """The places that steps change and read, for messages."""
        found = dict.fromkeys(place for own in reads for place in own)
        return ", ".join(called(place) for place in found) or "an object that is no module, such as a generator"

    def all_are_buffers(self, reads: Sequence[Reads]) -> bool:
        """Whether all places that steps change and read are buffers, which :func:`.check_gradients` reports."""
        found = [place for own in reads for place in own]
        return bool(found) and all(n in vars(self._parts[name]).get("_buffers", ()) for name, n in found)

    def changes_within(self, modules: Collection[Module]) -> bool:
        """Whether steps of this rank change a place in one of the modules."""
        return any(regions and self._layers.get(place[0]) in modules for place, regions in self.changes.items())


def called(place: Place) -> str:
    """A place as users write it, ``self.head.scale``."""
    return ".".join(("self", *filter(None, place)))


def _mark(value: Any) -> Any:
    return mark(vars(value) if type(value) is SimpleNamespace else value)


def _library(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _is_helper(value: object) -> bool:
    """Whether the value of a module's attribute is an object of a user's class, whose attributes may be kept state."""
    libraries = ("torch", "torchmetrics", "lightning", "builtins", "collections", "types", "functools")
    return hasattr(value, "__dict__") and not isinstance(value, type | Module) and _library(value) not in libraries


class _Watched:
    """A descriptor that replaces a class's attribute: it reports reads and assignments of its instances' attribute."""

    def __init__(self, attribute: str, default: Any, kept: KeptState) -> None:
        self._attribute, self._default, self._kept = attribute, default, kept

    def __get__(self, part: Any, kind: type | None = None) -> Any:
        if part is not None:
            self._kept.read(part, self._attribute)
            if self._attribute in vars(part):
                return vars(part)[self._attribute]
        if self._default is _NOTHING:
            raise AttributeError(self._attribute)  # for a buffer torch goes on to look elsewhere
        return self._default

    def __set__(self, part: Any, value: Any) -> None:
        self._kept.assigned(part, self._attribute)
        vars(part)[self._attribute] = value

    def __delete__(self, part: Any) -> None:
        if self._attribute not in vars(part):
            raise AttributeError(self._attribute)
        del vars(part)[self._attribute]


_NOTHING = object()
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _watch(kind: type, attribute: str, kept: KeptState, undo: ExitStack) -> None:
    default = getattr(kind, attribute, _NOTHING)
    if hasattr(type(default), "__set__") or not kind.__flags__ & _HEAP_TYPE:  # a property; a class written in C
        return
    if attribute in vars(kind):
        undo.callback(setattr, kind, attribute, vars(kind)[attribute])
    else:
        undo.callback(delattr, kind, attribute)
    setattr(kind, attribute, _Watched(attribute, default, kept))
