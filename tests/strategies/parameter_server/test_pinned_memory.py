"""The host's memory under cpu_ps on GPUs, with a stand-in for CUDA's runtime."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_multigpu.strategies.parameter_server.cpu_parameter_server import CPUParameterServerStrategy


class _CUDA:
    """Locks each range of memory, or refuses; an error stays until a launch finds it."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.locked: list[int] = []
        self.left_error = False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  # the name in CUDA
        self.left_error = self.status != 0
        self.locked += [] if self.status else [address]
        return self.status

    def launch(self, *_: Any, **__: Any) -> Any:
        if self.left_error:
            self.left_error = False
            raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")
        return torch.zeros(())


def _strategy(cuda: _CUDA, monkeypatch: pytest.MonkeyPatch, *, moves: bool) -> Any:
    strategy: Any = CPUParameterServerStrategy(parallel_devices=[torch.device("cuda", 0)] * 2)
    strategy.cluster_environment = SimpleNamespace(local_rank=lambda: 0, global_rank=lambda: 0, node_rank=lambda: 0)
    strategy._ranks = SimpleNamespace(world_size=2, move=lambda flat, key: None, has_moved=lambda flat: moves)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
    monkeypatch.setattr(torch, "ones", cuda.launch)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    return strategy


def test_only_memory_that_ranks_share_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other memory is torch's own: two small tensors of the heap lie in one page, which CUDA locks once."""
    cuda = _CUDA(0)
    shared = _strategy(cuda, monkeypatch, moves=True)._reserve(8, torch.float32)
    assert cuda.locked == [shared.data_ptr()]
    _strategy(cuda, monkeypatch, moves=False)._reserve(8, torch.float32)
    assert cuda.locked == [shared.data_ptr()]


def test_memory_that_cannot_be_locked_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _CUDA(712)
    strategy = _strategy(cuda, monkeypatch, moves=True)
    with pytest.warns(UserWarning, match=r"cannot be locked \(ulimit -l\)"):
        strategy._reserve(8, torch.float32)
    assert not cuda.left_error, "the next kernel of the user's step would have raised it"
    strategy._undo.close()  # there is nothing to unlock
