"""Messages of Lightning and torch that do not concern users, or that each rank would repeat."""

from __future__ import annotations

import warnings

_LIBRARIES = r"(lightning|torch|torchmetrics)(\.|$)"
_LEAF_SPEC = r"`isinstance\(treespec, LeafSpec\)` is deprecated"  # Lightning 2.6 uses it, torch 2.13 deprecates it
_REPEATS = "Using `DistributedSampler` with the dataloaders"  # this pack's samplers repeat no sample
_ONE_CYCLE = "Warning: Profiler clears events at the end of each cycle"  # of torch 2.11, also where there is one cycle


def silence_deprecations(rank: int) -> None:
    """Ignores warnings that libraries cause by themselves; on other ranks than the first, all of their deprecations.

    Warnings about the user's own code stay on every rank, except one with the same text on all of them.
    """
    warnings.filterwarnings("ignore", _LEAF_SPEC, FutureWarning)
    warnings.filterwarnings("ignore", _ONE_CYCLE, UserWarning)
    warnings.filterwarnings("ignore", _REPEATS, UserWarning)
    if rank != 0:
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=_LIBRARIES)
        warnings.filterwarnings("ignore", "The dirpath has changed from", UserWarning)  # of a resumed ModelCheckpoint
