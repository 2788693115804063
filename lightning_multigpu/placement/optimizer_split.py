"""How the parameters of an optimizer can be divided between processes, for an update that stays the same."""

from __future__ import annotations

from typing import Literal

from torch import optim
from torch.optim import Optimizer

Split = Literal["elements", "tensors", "nothing"]

# An element's new value depends on the history of that element alone.
_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)
# An element's new value depends on the whole tensor: its rows and columns, its norm, which of its rows have gradients.
_TENSORWISE = (optim.Adafactor, optim.Muon, optim.SparseAdam)


def split_of(optimizer: Optimizer) -> Split:
    """How the parameters of ``optimizer`` can be divided so that its update stays the same.

    Only torch's own classes are known. Another class, or a subclass, may relate any two parameters.
    """
    if type(optimizer) in _ELEMENTWISE:
        return "elements"
    return "tensors" if type(optimizer) in _TENSORWISE else "nothing"
