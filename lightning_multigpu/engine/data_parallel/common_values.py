"""Comparison of what ranks have in common: settings of optimizers, and values of the parameters that they train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_multigpu.communication.checksums import checksums
from lightning_multigpu.communication.digest import disagreement, fingerprint, value_text
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.placement.owned_part import hooks_before

_CAUSES = (
    "Log a value that a schedule follows, as ReduceLROnPlateau does, with sync_dist=True; set learning rates, and "
    "register hooks of optimizers, alike on all ranks"
)


class CommonValues:
    """A table of the optimizers' settings, of which one number travels with each announcement.

    It has the values of the optimizers' groups, such as learning rates, to nine digits. With ``counts_hooks`` it also
    has the number of hooks before a step, for which ranks average gradients.
    """

    def __init__(self, optimizers: Sequence[Optimizer] = (), *, counts_hooks: bool = False) -> None:
        self._optimizers, self._counts_hooks = optimizers, counts_hooks
        self._noted: tuple[Any, ...] = ()
        self._table: dict[str, str] = {}
        self._number = 0.0

    def number(self) -> float:
        """The number of the table as it is now, which the next announcement carries."""
        groups = [(type(o).__name__, group) for o in self._optimizers for group in o.param_groups]
        values = [{name: _plain(v) for name, v in group.items() if name != "params"} for _, group in groups]
        hooks = {
            f"hooks before a step of {type(o).__name__}": str(sum(map(len, hooks_before(o))))
            for o in (self._optimizers if self._counts_hooks else ())
        }
        if (values, hooks) != self._noted:
            self._noted = values, hooks
            of_groups = {
                f"{name!r} of parameter group {number} ({kind})": f"{v:.9g}" if isinstance(v, float) else value_text(v)
                for number, ((kind, _), group) in enumerate(zip(groups, values, strict=True))
                for name, v in group.items()
            }
            self._table = {**of_groups, **hooks}
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


def check_replicas(parameters: Iterable[tuple[str, Tensor]], group: MeteredGroup) -> None:
    """Compares checksums of parameters over the ranks of a group; a collective.

    Args:
        parameters: by name, any shape; a name is compared over the ranks that have it. Sparse ones are left out.
        group: the ranks; a single rank does nothing.

    Raises:
        RuntimeError: on all ranks, if values differ in a single bit: it names the first such parameters, and the ranks.
    """
    if group.size == 1:
        return
    own = {name: parameter.detach().contiguous() for name, parameter in parameters if parameter.layout == torch.strided}
    table = {name: f"checksum {c % 2**32:08x}" for name, c in zip(own, checksums([*own.values()]), strict=True)}
    tables = dict(zip(group.ranks, group.gather_objects(table), strict=True))
    found = disagreement(tables, "do not hold the same parameters any more", absent_differs=False)
    if found is not None:
        raise RuntimeError(
            f"{found}\n"
            "Likely causes: a hook that draws random numbers, which differ from rank to rank; a parameter that is "
            "changed outside the optimizer, by the samples of its rank (make it a buffer); gradients that are set or "
            "changed on one rank. Make such changes from values that all ranks have, or broadcast them from one rank. "
            "check_replicas_every_n_steps=1 finds the step; 0 checks nothing, where ranks are meant to differ or their "
            "processors round differently"
        )
