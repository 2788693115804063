"""Base of callbacks that report: the Trainer's monitors, and silent ones for those that it does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lightning.pytorch import Callback, Trainer

from lightning_multigpu.callbacks.monitor import Monitor

_Monitor = TypeVar("_Monitor", bound=Monitor)


def _of_monitors(hook: str) -> Callable[..., None]:
    """A hook that calls the same hook of the silent monitors."""

    def call(self: SilentMonitors, *args: Any, **kwargs: Any) -> None:
        for monitor in self._own:
            getattr(monitor, hook)(*args, **kwargs)

    return call


class SilentMonitors(Callback):
    """Base of reports. Their figures come from monitors, so that nothing is measured twice."""

    def __init__(self) -> None:
        self._own: list[Monitor] = []

    def monitor(self, trainer: Trainer, kind: type[_Monitor]) -> _Monitor:
        """The Trainer's monitor of this kind, else that of another report, else a silent one of this report.

        Call it in ``on_fit_start``. The hooks of a silent monitor are called with those of its report.
        """
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning attaches it without an annotation
            for monitor in (callback, *(callback._own if isinstance(callback, SilentMonitors) else ())):
                if isinstance(monitor, kind):
                    return monitor
        made = kind(log=False)
        self._own.append(made)
        return made

    on_train_start = _of_monitors("on_train_start")
    on_train_batch_start = _of_monitors("on_train_batch_start")
    on_train_batch_end = _of_monitors("on_train_batch_end")
    on_validation_start = _of_monitors("on_validation_start")
    on_train_epoch_end = _of_monitors("on_train_epoch_end")
    on_train_end = _of_monitors("on_train_end")
    on_exception = _of_monitors("on_exception")

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        for monitor in self._own:
            monitor.teardown(*args, **kwargs)
        self._own = []
