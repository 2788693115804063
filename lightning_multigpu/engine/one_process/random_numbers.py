"""Random numbers of replicas on CPUs, whose threads draw from one generator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_multigpu.engine.activation_checkpointing import runs_in_checkpoint
from lightning_multigpu.engine.replaced_attributes import replaced

_DRAWS_NOTHING_ON_CPUS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # runs without dropout only


class NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around the backward pass of a replica: refuses random numbers in layers that run again.

    Such a layer would draw other numbers than in its forward pass. ``torch.utils.checkpoint`` sets the generator to its
    state at the beginning of that pass, but the threads of other replicas draw from the same generator.

    Raises:
        RuntimeError: at the first draw.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            torch.Tag.nondeterministic_seeded in func.tags
            and func is not _DRAWS_NOTHING_ON_CPUS
            and kwargs.get("generator") is None
            and runs_in_checkpoint()
        ):
            raise RuntimeError(
                f"a layer that backward computes again draws random numbers ({func}): under dp on CPUs all replicas "
                "draw from one generator, so that it would draw others than in its forward pass, and gradients would "
                "be wrong. Leave the checkpoint around layers with dropout out, set dropout to 0, or use "
                "strategy='ring_ddp'"
            )
        return func(*args, **kwargs)


@contextmanager
def same_generator() -> Iterator[None]:
    """Restores torch's generator at the end of the block, within which threads read and set it one at a time.

    In ``torch.utils.checkpoint`` several threads set and restore the generator, and may leave a state from before the
    forward pass: the next step would then draw the same numbers again. Two threads have also been seen to wait for each
    other for ever, one reading the state and one setting it.
    """
    state, turn = torch.get_rng_state(), threading.Lock()

    def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with turn:
                return function(*args)

        return call

    try:
        with replaced(torch, get_rng_state=in_turn(torch.get_rng_state), set_rng_state=in_turn(torch.set_rng_state)):
            yield
    finally:
        torch.set_rng_state(state)
