"""Values that all ranks must have in common, compared with the announcement of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_multigpu.communication.checksums import checksums
from lightning_multigpu.communication.digest import disagreement, fingerprint, value_text
from lightning_multigpu.communication.tensors import marks_of
from lightning_multigpu.placement.owned_part import hooks_before

_ALWAYS, _EVERY = 10, 20
_CAUSES = (
    "Log a value that a schedule follows, as ReduceLROnPlateau does, with sync_dist=True; set learning rates, and "
    "register hooks of optimizers, alike on all ranks. A parameter that the code changes outside of the optimizer, by "
    "samples of its rank: make it a buffer, or compute the change from self.all_gather(...)"
)


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
        self._marks: list[tuple[int, int]] | None = None  # None where no batch before the next step is read
        self._batches = self._stepped_at = 0
        self._counts_hooks = False
        self._changed: dict[str, str] = {}
        self._noted: tuple[Any, ...] = ()
        self._table: dict[str, str] = {}
        self._number = 0.0

    def begin(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor], *, counts_hooks: bool) -> None:
        """Takes the optimizers of a fit, and the parameters that ranks hold in common."""
        self._optimizers, self._counts_hooks = optimizers, counts_hooks
        self._batches = self._stepped_at = 0
        self.watch(parameters)

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Takes the parameters that ranks hold in common from now on."""
        self._parameters, self._changed = parameters, {}
        self.accept()

    def accept(self) -> None:
        """Accepts the parameters as they are now: an optimizer has made its step."""
        first, before = self._batches, self._stepped_at
        last, self._stepped_at = first + max(1, first - before), first  # the next step comes as late as this one
        is_read = first <= _ALWAYS or last // _EVERY > (first - 1) // _EVERY
        self._marks = marks_of(self._parameters.values()) if is_read else None

    def look(self) -> None:
        """Notes the parameters that the user's code has changed since the last call, or since :meth:`accept`."""
        before = self._marks
        if before is None or (self._batches > _ALWAYS and self._batches % _EVERY):
            return
        self._marks = marks_of(self._parameters.values())
        marks = zip(self._parameters.items(), before, self._marks, strict=True)
        changed = dict(entry for entry, old, new in marks if old != new)
        found = checksums([parameter.detach().contiguous() for parameter in changed.values()])
        for name, checksum in zip(changed, found, strict=True):
            self._changed[name] = f"changed to checksum {checksum % 2**32:08x}"

    def number(self) -> float:
        """The number of the table as it is now, which the next announcement carries."""
        self._batches += 1
        groups = [(type(o).__name__, group) for o in self._optimizers for group in o.param_groups]
        values = [{name: _plain(v) for name, v in group.items() if name != "params"} for _, group in groups]
        hooks = {
            f"hooks before a step of {type(o).__name__}": str(sum(map(len, hooks_before(o))))
            for o in (self._optimizers if self._counts_hooks else ())
        }
        noted, self._changed = (values, hooks, self._changed), {}
        if noted != self._noted:
            self._noted = noted
            of_groups = {
                f"{name!r} of parameter group {number} ({kind})": f"{v:.9g}" if isinstance(v, float) else value_text(v)
                for number, ((kind, _), group) in enumerate(zip(groups, values, strict=True))
                for name, v in group.items()
            }
            self._table = {**of_groups, **noted[2], **hooks}
            self._number = float(int(fingerprint(self._table)[:13], 16))  # 52 bits
        return self._number

    def check(self, numbers: Iterable[float], gather: Callable[[Any], list[Any]]) -> None:
        """Compares the tables of the newest announcement if the numbers of ranks differ; a collective then.

        ``gather`` gathers an object of every rank, in rank order.

        Raises:
            RuntimeError: on all ranks, if values differ.
        """
        if len({*numbers}) == 1:
            return
        found = disagreement(dict(enumerate(gather(self._table))), "do not train with the same values")
        if found is not None:
            raise RuntimeError(f"{found}\n{_CAUSES}")


def _plain(value: Any) -> Any:
    """A number for a tensor of the host, which may change in place; None for one of a device, which would wait."""
    if not isinstance(value, Tensor):
        return value
    return value.tolist() if value.device.type == "cpu" else None
