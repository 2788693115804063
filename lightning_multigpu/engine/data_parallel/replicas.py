"""Replicas: the check that ranks which train the same parameters hold the same values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_multigpu.communication.checksums import checksums
from lightning_multigpu.communication.digest import disagreement
from lightning_multigpu.communication.metered_group import MeteredGroup


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
