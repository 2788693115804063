"""The check that ranks which train the same parameters still hold the same values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
