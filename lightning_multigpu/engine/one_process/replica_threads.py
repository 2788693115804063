"""Threads that run one call for each replica at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


class ReplicaThreads:
    """Runs a call for each replica at the same time: the first in the calling thread, each other in its own thread.

    torch keeps the grad mode, inference mode, autocast, hooks on saved tensors and the current GPU for each thread. A
    call gets the modes of the calling thread, its innermost hooks, and the GPU of its replica.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._threads = ThreadPoolExecutor(max(1, len(devices) - 1), "replica")

    def run(self, calls: Sequence[Callable[[], T]], what: str) -> list[T]:
        """The results of the calls, one a replica, once all of them have ended, also after Ctrl-C.

        Args:
            calls: at most as many as there are devices.
            what: the work, for the note of an error, such as "backward".

        Raises:
            BaseException: the exception of the first replica that failed, with a note that names the replica.
        """
        modes = _modes_of_this_thread(self._devices[0].type)
        own: Future[T] = Future()
        others: list[Future[T]] = []
        try:
            for call, device in zip(calls[1:], self._devices[1:], strict=False):
                others.append(self._threads.submit(_in_modes, modes, device, call))
            try:
                own.set_result(_in_modes((), self._devices[0], calls[0]))
            except Exception as error:
                own.set_exception(error)
        finally:
            wait(others)  # no thread may change the module afterwards
        for number, future in enumerate([own, *others]):
            if (failure := future.exception()) is not None:
                failure.add_note(f"in {what} of replica {number} of {len(calls)}, on {self._devices[number]}")
                raise failure
        return [future.result() for future in [own, *others]]

    def close(self) -> None:
        """Ends the threads, once their calls have ended."""
        self._threads.shutdown()


Mode = Callable[[], AbstractContextManager[object]]


def _modes_of_this_thread(device_type: str) -> list[Mode]:
    """Context managers that give another thread the modes of the calling thread."""
    grad, cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    modes: list[Mode] = []
    if torch.is_inference_mode_enabled():
        modes.append(torch.inference_mode)
    modes.append(lambda: torch.set_grad_enabled(grad))
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None:
        modes.append(partial(saved_tensors_hooks, *hooks))
    for kind in {"cpu", device_type}:
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            modes.append(partial(torch.autocast, kind, dtype=dtype, cache_enabled=cache))
    return modes


def _in_modes(modes: Iterable[Mode], device: torch.device, call: Callable[[], T]) -> T:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        return call()
