"""Replicas: checks that ranks hold the same parameters and values, and averages of gradients that user code has set."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_multigpu.communication.checksums import checksums
from lightning_multigpu.communication.digest import disagreement, fingerprint, value_text
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.tensors import marks_of
from lightning_multigpu.placement.owned_part import hooks_before

_ABSENT, _AS_AVERAGED = -1, -2
_ALWAYS, _EVERY = 10, 20


def check_replicas(parameters: Iterable[tuple[str, Tensor]], group: MeteredGroup) -> None:
    """Compares checksums of parameters over the ranks of a group; a collective.

    Args:
        parameters: by name, any shape; a name is compared over the ranks that have it. Sparse ones are left out.
        group: the ranks; a single rank does nothing.

    Raises:
        RuntimeError: on all ranks, if values differ in a single bit: it names the first such parameters with their
            norms, and the ranks.
    """
    if group.size == 1:
        return
    own = {name: parameter.detach() for name, parameter in parameters if parameter.layout == torch.strided}
    numbers = dict(zip(own, checksums([value.contiguous() for value in own.values()]), strict=True))
    found: dict[str, set[int]] = {}
    for table in group.gather_objects(numbers):
        for name, checksum in table.items():
            found.setdefault(name, set()).add(checksum)
    differing = [name for name, values in found.items() if len(values) > 1]
    if not differing:
        return
    tables = group.gather_objects({name: _described(own[name], numbers[name]) for name in differing if name in own})
    by_rank: Mapping[int, Mapping[str, str]] = dict(zip(group.ranks, tables, strict=True))
    raise RuntimeError(
        f"{disagreement(by_rank, 'do not hold the same parameters any more', absent_differs=False)}\n"
        "Likely causes: a hook that draws random numbers, which differ from rank to rank; a parameter that is changed "
        "outside the optimizer, by values of one rank; gradients that are set or changed on one rank. Make such "
        "changes from values that all ranks have, or broadcast them from one rank. check_replicas_every_n_steps=1 "
        "finds the step; 0 checks nothing, where ranks are meant to differ or their processors round differently"
    )


def _described(value: Tensor, checksum: int) -> str:
    norm = torch.linalg.vector_norm(value if value.is_floating_point() or value.is_complex() else value.double())
    return f"norm {float(norm):.9g}, checksum {checksum % 2**32:08x},"


class CommonValues:
    """A table of values that all ranks must have in common, of which one number travels with each announcement.

    The table has the values of the optimizers' groups, such as learning rates, to nine digits, and checksums of
    parameters that the user's code has changed outside of the optimizers' steps, as their versions and addresses tell.
    Parameters are read at the first ten batches and at every twentieth. With ``counts_hooks`` it has the number of
    hooks before a step as well, where ranks average gradients for them.
    """

    def __init__(self) -> None:
        self._optimizers: Sequence[Optimizer] = ()
        self._parameters: Mapping[str, Tensor] = {}
        self._marks: list[tuple[int, int]] = []
        self._batches, self._counts_hooks = 0, False
        self._changed: dict[str, str] = {}
        self._values: list[dict[str, Any]] | None = None
        self._of_groups: dict[str, str] = {}
        self._table: dict[str, str] = {}
        self._number = 0.0

    def begin(
        self, optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor], *, counts_hooks: bool = False
    ) -> None:
        """Takes the optimizers of a fit, and the parameters that ranks hold in common."""
        self._optimizers, self._batches, self._counts_hooks = optimizers, 0, counts_hooks
        self.watch(parameters)

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Takes the parameters that ranks hold in common from now on."""
        self._parameters = parameters
        self._changed = {}
        self.accept()

    def accept(self) -> None:
        """Accepts the parameters as they are now: an optimizer has made its step."""
        self._marks = marks_of(self._parameters.values())

    def look(self) -> None:
        """Notes the parameters that the user's code has changed since the last call, or since :meth:`accept`."""
        before = self._marks
        self.accept()
        if before == self._marks or (self._batches > _ALWAYS and self._batches % _EVERY):
            return
        marks = zip(self._parameters.items(), before, self._marks, strict=True)
        changed = dict(entry for entry, old, new in marks if old != new)
        found = checksums([parameter.detach().contiguous() for parameter in changed.values()])
        for name, checksum in zip(changed, found, strict=True):
            self._changed[name] = f"changed to checksum {checksum % 2**32:08x}"

    def number(self) -> float:
        """The number of the table as it is now, which the next announcement carries."""
        self._batches += 1
        groups = [(o, group) for o in self._optimizers for group in o.param_groups]
        values = [{name: _plain(v) for name, v in group.items() if name != "params"} for _, group in groups]
        if values != self._values:
            self._values = values
            self._of_groups = {
                f"{name!r} of parameter group {number} ({type(optimizer).__name__})": _text(value)
                for number, ((optimizer, _), group) in enumerate(zip(groups, values, strict=True))
                for name, value in group.items()
            }
        table, self._changed = {**self._of_groups, **self._changed}, {}
        if self._counts_hooks:
            for optimizer in self._optimizers:
                number = sum(map(len, hooks_before(optimizer)))
                table[f"hooks before a step of {type(optimizer).__name__}"] = str(number)
        if table != self._table:
            self._table, self._number = table, float(int(fingerprint(table)[:13], 16))  # 52 bits
        return self._number

    def check(self, numbers: Iterable[float], gather: Callable[[Any], list[Any]], causes: Callable[[], str]) -> None:
        """Compares the tables of the newest announcement if their numbers differ; a collective then.

        Args:
            numbers: of all ranks.
            gather: gathers an object of every rank, in rank order.
            causes: returns the likely causes, for the message.

        Raises:
            RuntimeError: on all ranks, if values differ.
        """
        if len({*numbers}) == 1:
            return
        found = disagreement(dict(enumerate(gather(self._table))), "do not train with the same values")
        if found is not None:
            raise RuntimeError(f"{found}\n{causes()}")


def _plain(value: Any) -> Any:
    """A number for a tensor of the host, which may change in place; None for one of a device, which would wait."""
    if not isinstance(value, Tensor):
        return value
    return value.tolist() if value.device.type == "cpu" else None


def _text(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else value_text(value)


class GivenGradients:
    """Gradients that do not come from backward, as ``torch.autograd.grad`` gives them, averaged before a step.

    Lightning's ``ddp`` leaves this to the user's code, and ranks then step with gradients of their own. Code that has
    made the average itself has the same gradients on all ranks, and nothing more is sent. ``weight`` returns the weight
    of this rank's batch; the weights of all ranks add up to their number.
    """

    def __init__(self, group: MeteredGroup, weight: Callable[[], float]) -> None:
        self._group = group
        self._weight = weight
        self._averaged: dict[Tensor, tuple[weakref.ref[Tensor], list[tuple[int, int]]]] = {}

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Notes that the gradients of now are averages."""
        with torch._C.DisableTorchFunctionSubclass():  # of split parameters these are the parts
            found = [(parameter, parameter.grad) for parameter in parameters]
            self._averaged.update((p, (weakref.ref(grad), marks_of([grad]))) for p, grad in found if grad is not None)

    @torch.no_grad()
    def average(self, parameters: Iterable[Tensor]) -> None:
        """Averages the gradients that some rank has set or changed, unless all ranks have the same; a collective."""
        listed = list(parameters)
        with torch._C.DisableTorchFunctionSubclass():
            given = {n: p.grad for n, p in enumerate(listed) if p.grad is not None and not self._is_averaged(p)}
            marks = [_ABSENT if parameter.grad is None else _AS_AVERAGED for parameter in listed]
            dense = [gradient.to_dense().contiguous() for gradient in given.values()]
            for number, checksum in zip(given, checksums(dense), strict=True):
                marks[number] = checksum % 2**62
            by_parameter = self._group.all_gather(torch.tensor(marks)).T.tolist()
            for parameter, found in zip(listed, by_parameter, strict=True):
                if max(found) < 0 or len({*found}) == 1:
                    continue
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                average = self._group.all_reduce(gradient.to_dense() * self._weight(), "mean")
                parameter.grad = average.to_sparse(1) if gradient.is_sparse else average
            self.note(listed)

    def _is_averaged(self, parameter: Tensor) -> bool:
        gradient, marks = self._averaged.get(parameter, (lambda: None, []))
        return gradient() is parameter.grad and parameter.grad is not None and marks_of([parameter.grad]) == marks
