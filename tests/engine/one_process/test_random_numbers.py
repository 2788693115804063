"""Random numbers of replicas: threads read and set torch's generator one at a time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from lightning_multigpu.engine.one_process.random_numbers import same_generator


def test_threads_read_and_set_the_generator_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``torch.utils.checkpoint`` does in backward. Once they waited for each other for ever."""
    inside, most = 0, 0

    def slow(function: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1
            return function(*args)

        return call

    def work() -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)

    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch, name, slow(getattr(torch, name)))
    functions = torch.get_rng_state, torch.set_rng_state
    state = torch.get_rng_state()
    with same_generator():
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert most == 1
    assert (torch.get_rng_state, torch.set_rng_state) == functions
    assert torch.equal(torch.get_rng_state(), state)
