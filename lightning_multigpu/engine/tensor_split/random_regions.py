"""Random numbers between a layer that splits activations and the one that joins them.

Outside of such a region all ranks of a tensor group have the same activations, and must draw the same random numbers:
the same dropout mask. Inside a region they have different parts, and must draw different ones. A region's numbers
follow from those outside of it, so that an activation checkpoint that computes the region again draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

_LARGEST_SEED = 2**62


class RandomRegions:
    """The random states of a rank inside and outside of regions; one for all layers of a group.

    Args:
        rank: of this process in the group.

    Attributes:
        is_off: all ranks draw the same numbers everywhere, also where a region is open.
        is_open: activations are split at this point of the step.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.is_off = False
        self.is_open = False
        self._outside: Tensor | None = None
        self._outside_on_gpu: Tensor | None = None

    def enter(self, device: torch.device) -> None:
        """From here on numbers differ between ranks; within a region it does nothing.

        Args:
            device: of the activations, whose numbers differ beside those of the CPU.
        """
        if self.is_open:
            return
        self.is_open = True
        if self.is_off:
            return
        seed = int(torch.randint(_LARGEST_SEED, ()))  # the same on all ranks
        self._outside = torch.get_rng_state()
        if device.type == "cuda":
            self._outside_on_gpu = torch.cuda.get_rng_state(device)
            torch.cuda.manual_seed(seed + 1 + self._rank)
        torch.default_generator.manual_seed(seed + 1 + self._rank)

    def restart(self, device: torch.device, *, inside: bool) -> None:
        """Forgets the region that is open; with ``inside``, numbers differ between ranks from here on."""
        self.forget()
        if inside:
            self.enter(device)

    def leave(self, device: torch.device) -> None:
        """From here on all ranks draw the same numbers; outside of a region it does nothing."""
        if self._outside is not None:
            torch.set_rng_state(self._outside)
        if self._outside_on_gpu is not None:
            torch.cuda.set_rng_state(self._outside_on_gpu, device)
        self.forget()

    def kept(self) -> Callable[[], AbstractContextManager[None]]:
        """Keeps which region is open, and returns what sets it for the time of a block."""
        state = self.is_open, self._outside, self._outside_on_gpu

        @contextmanager
        def restored() -> Iterator[None]:
            before = self.is_open, self._outside, self._outside_on_gpu
            self.is_open, self._outside, self._outside_on_gpu = state
            try:
                yield
            finally:
                self.is_open, self._outside, self._outside_on_gpu = before

        return restored

    def forget(self) -> None:
        """Ends a region whose end has not come, without a change of the random states.

        An activation checkpoint computes its part of a step no further than backward needs it.
        """
        self.is_open, self._outside, self._outside_on_gpu = False, None, None
