"""The place and time of a fault, and the faults that can be planted there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning_multigpu.faults.callback import PlantedFault
from lightning_multigpu.faults.fault import PLACES, Fault, Where, hang, raise_error, send_signal
from lightning_multigpu.strategies.option_checks import check_choice

_LARGEST_STATUS = 255


def at(*, rank: int, step: int = 0, where: Where = "training") -> Spot:
    """The place and time of a fault; a method of the result plants a fault there.

    The values of ``where``:

    - "joining": before the rank joins its process group, while the others wait for it. It takes no ``step``.
    - "data": while a training batch is put together, in a worker of the DataLoader if it has workers, else in the rank.
    - "training": at the start of a training batch.
    - "backward": in the backward pass, when the gradient of the module's first parameter has been computed.
    - "validation": at the start of a validation batch, those of the sanity check included.
    - "saving": while all ranks gather a checkpoint, before anything of it has been written.
    - "end of fit": after the last batch, before the strategy's teardown.

    Args:
        rank: the global rank with the fault.
        step: number of optimizer steps before the fault, which comes once, at the first occasion from then on. For
            "data" it is the number of steps before the batch is trained on: batches may be put together earlier.
        where: the place of the fault.

    Raises:
        ValueError: a value is out of its range. A rank that the job does not have raises when the run starts; at the
            end of a run, a warning names a fault that never came.
    """
    _check_whole("rank", rank, "0 is the first rank")
    _check_whole("step", step, "0 is the first occasion")
    check_choice("where", where, PLACES)
    if where == "joining" and step:
        raise ValueError(f"step={step} with where='joining': no step is done before the ranks join; leave step out")
    return Spot(rank, step, where)


@dataclass(frozen=True)
class Spot:
    """A rank, a step and a place at which a fault can be planted; made by :func:`at`.

    Every method returns a callback for ``Trainer(callbacks=[...])``. The fault happens in the rank, or with ``"data"``
    in a worker of its DataLoader.
    """

    rank: int
    step: int
    where: Where

    def kill(self) -> PlantedFault:
        """The process is killed at once (SIGKILL), as the kernel does when memory runs out."""
        return self._signal(signal.SIGKILL)

    def stop(self) -> PlantedFault:
        """The process stops with all its threads and keeps its connections (SIGSTOP)."""
        return self._signal(signal.SIGSTOP)

    def interrupt(self) -> PlantedFault:
        """The process receives SIGINT, as at Ctrl-C."""
        return self._signal(signal.SIGINT)

    def terminate(self) -> PlantedFault:
        """The process receives SIGTERM, as from a scheduler."""
        return self._signal(signal.SIGTERM)

    def hang(self) -> PlantedFault:
        """The main thread waits for ever; the process's other threads go on."""
        return self._planted("hangs", hang)

    def exit(self, status: int) -> PlantedFault:
        """The process ends with an exit status, 0 to 255, and without cleaning up; see ``raise_`` for ``SystemExit``.

        Raises:
            ValueError: there is no such exit status.
        """
        _check_whole("status", status, "pass 1 for an ordinary failure")
        if status > _LARGEST_STATUS:
            raise ValueError(f"status={status} is above {_LARGEST_STATUS}, the largest exit status; pass a smaller one")
        return self._planted(f"exits with status {status}", partial(os._exit, status))

    def raise_(self, error: BaseException) -> PlantedFault:
        """``error`` is raised; with a spawning launcher it has to be picklable.

        Raises:
            ValueError: ``error`` is no exception, or a class of exceptions.
        """
        if not isinstance(error, BaseException):
            raise ValueError(f"error={error!r} is not an exception; pass one, RuntimeError('planted') for example")
        return self._planted(f"raises {error!r}", partial(raise_error, error))

    def call(self, function: Callable[[], None]) -> PlantedFault:
        """``function`` is called: a fault of one's own. With a spawning launcher it has to be picklable."""
        return self._planted(f"calls {getattr(function, '__name__', function)!s}", function)

    def _signal(self, number: signal.Signals) -> PlantedFault:
        return self._planted(f"receives {number.name}", partial(send_signal, number))

    def _planted(self, what: str, action: Callable[[], None]) -> PlantedFault:
        return PlantedFault(Fault(self.rank, self.step, self.where, what, action))


def _check_whole(name: str, value: object, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r} is not a whole number of 0 or more; {hint}")
