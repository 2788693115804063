"""Threads that run one call for each replica at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

T = TypeVar("T")


class ReplicaThreads:
    """Runs a call for each replica at the same time: the first in the calling thread, each other in its own thread.

    torch keeps the grad mode, inference mode, autocast, hooks on saved tensors and the current GPU for each thread. A
    call gets the modes of the calling thread, its innermost hooks, and the GPU of its replica.

    Args:
        devices: the device of each replica.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._threads = [_ReplicaThread(f"replica_{number}") for number in range(1, len(devices))]
        for thread in self._threads:
            thread.start()

    def run(self, calls: Sequence[Callable[[], T]], what: str) -> list[T]:
        """The results of the calls, one a replica, once all of them have ended.

        Args:
            calls: at most as many as there are devices.
            what: the work, for the note of an error, such as "backward".

        Raises:
            BaseException: the exception of the first replica that failed, with a note that names the replica.
        """
        modes = _modes_of_this_thread(self._devices[0].type)
        outcomes: list[Any] = [None] * len(calls)

        def make_call(number: int, modes: Sequence[Mode]) -> None:
            try:
                outcomes[number] = _in_modes(modes, self._devices[number], calls[number])
            except BaseException as error:
                outcomes[number] = error

        try:
            try:
                for number, thread in enumerate(self._threads[: len(calls) - 1], 1):
                    thread.give(partial(make_call, number, modes))
                make_call(0, ())
            finally:
                self._await_calls()
        except KeyboardInterrupt:  # it may have come at the end; no thread may change the module afterwards
            self._await_calls()
            raise
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                if isinstance(outcome, Exception):
                    outcome.add_note(f"in {what} of replica {number} of {len(calls)}, on {self._devices[number]}")
                raise outcome
        return outcomes

    def _await_calls(self) -> None:
        for thread in self._threads:
            thread.await_call()

    def close(self) -> None:
        """Ends the threads."""
        for thread in self._threads:
            thread.end()


class _ReplicaThread(threading.Thread):
    """A thread that makes one call at a time. Ctrl-C in the main thread loses neither the thread nor its call.

    Ctrl-C may interrupt the main thread between any two of its lines. A ThreadPoolExecutor loses a thread that it has
    just started then, and a ``threading.Event`` its lock; a ``SimpleQueue`` does not stop in its middle.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._call: Callable[[], None] | None = None
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._ends_of_calls: SimpleQueue[None] = SimpleQueue()
        self._is_ending = False

    def give(self, call: Callable[[], None]) -> None:
        """Makes the thread make a call, which raises nothing."""
        while not self._ends_of_calls.empty():  # of a call that ended before anybody waited for it
            self._ends_of_calls.get()
        self._call = call
        self._wakes.put(None)

    def await_call(self) -> None:
        """Waits until the thread has made its call, if it has one."""
        if self._call is not None:
            self._wakes.put(None)  # Ctrl-C may have come before
        while self._call is not None:
            self._ends_of_calls.get()

    def end(self) -> None:
        """Ends the thread after its call."""
        self._is_ending = True
        self._wakes.put(None)
        self.join()

    @override
    def run(self) -> None:
        while not self._is_ending:
            self._wakes.get()
            if self._call is not None:
                self._call()
                self._call = None
                self._ends_of_calls.put(None)


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
            modes.append(_autocast(kind, torch.get_autocast_dtype(kind), cache))
    return modes


def _autocast(kind: str, dtype: torch.dtype, cache: bool) -> Mode:
    return lambda: torch.autocast(kind, dtype=dtype, cache_enabled=cache)


def _in_modes(modes: Sequence[Mode], device: torch.device, call: Callable[[], T]) -> T:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        return _on_device(device, call)


def _on_device(device: torch.device, call: Callable[[], T]) -> T:
    if device.type != "cuda":
        return call()
    with torch.cuda.device(device):
        return call()
