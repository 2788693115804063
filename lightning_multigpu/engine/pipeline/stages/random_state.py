"""One random state for each part of each micro-batch, the same on all stages whatever the split.

What runs before the split part runs on every stage: were its random numbers drawn from each rank's own state, stages
would train on different noise. So the state is set, from a seed that all stages share, before a micro-batch begins,
before each layer, and behind the last layer.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(*parts: int) -> int:
    """A seed of 63 bits that depends on all parts and their order."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def set_random_state(seed: int, device: torch.device) -> None:
    """Seeds Python's random numbers, torch's on the CPU and, where ``device`` is a GPU, those there."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restores the random states at the end of the block: what a pipeline draws is none of the caller's business."""
    python_state = random.getstate()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
