"""Values that all ranks must have in common at each batch: of the optimizers' groups, and of changed parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_multigpu.communication.checksums import checksums
from lightning_multigpu.communication.digest import disagreement, fingerprint, value_text

_version = attrgetter("_version")
_ALWAYS, _EVERY = 10, 20


class CommonValues:
    """A table of values that all ranks must have in common, of which one number travels with each announcement.

    The table has the values of the optimizers' groups, such as learning rates, to nine digits, and checksums of
    parameters that the user's code has changed outside of the optimizers' steps, as torch's version counters tell.
    Parameters are read at the first ten batches and at every twentieth.
    """

    def __init__(self) -> None:
        self._optimizers: Sequence[Optimizer] = ()
        self._parameters: Mapping[str, Tensor] = {}
        self._versions: list[int] = []
        self._batches = 0
        self._changed: dict[str, str] = {}
        self._values: list[dict[str, Any]] | None = None
        self._of_groups: dict[str, str] = {}
        self._table: dict[str, str] = {}
        self._number = 0.0

    def begin(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> None:
        """Takes the optimizers of a fit, and the parameters that ranks hold in common."""
        self._optimizers, self._batches = optimizers, 0
        self.watch(parameters)

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Takes the parameters that ranks hold in common from now on."""
        self._parameters = parameters
        self._changed = {}
        self.accept()

    def accept(self) -> None:
        """Accepts the parameters as they are now: an optimizer has made its step."""
        self._versions = [*map(_version, self._parameters.values())]

    def look(self) -> None:
        """Notes the parameters that the user's code has changed since the last call, or since :meth:`accept`."""
        before = self._versions
        self.accept()
        if before == self._versions or (self._batches > _ALWAYS and self._batches % _EVERY):
            return
        marks = zip(self._parameters.items(), before, self._versions, strict=True)
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
