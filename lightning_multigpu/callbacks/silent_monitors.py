"""Base of callbacks that report: their monitors, silent ones for those that the Trainer does not have; their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_multigpu.callbacks.monitor import Monitor
from lightning_multigpu.report import document

_Monitor = TypeVar("_Monitor", bound=Monitor)


class SilentMonitors(Callback):
    """Base of reports. Their figures come from monitors, so that nothing is measured twice."""

    def __init__(self) -> None:
        self._own: list[Monitor] = []

    def monitor(self, trainer: Trainer, kind: type[_Monitor]) -> _Monitor:
        """The Trainer's monitor of this kind, else a silent one, which is the Trainer's until the end of the fit.

        Call it in ``on_fit_start``.
        """
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # Lightning attaches it without an annotation
        for callback in callbacks:
            if isinstance(callback, kind):
                return callback
        made = kind(log=False)
        self._own.append(made)
        further = range(callbacks.index(self) + 1, len(callbacks))
        # Lightning puts checkpoints last, so that a step ends before its checkpoint is written.
        callbacks.insert(next((i for i in further if isinstance(callbacks[i], Checkpoint)), len(callbacks)), made)
        return made

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_monitors(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove_monitors(trainer)

    def _remove_monitors(self, trainer: Trainer) -> None:
        for monitor in self._own:
            monitor.end()
            trainer.callbacks.remove(monitor)  # type: ignore[attr-defined]
        self._own = []

    def write_files(self, what: str, directory: str, files: Mapping[str, bytes], *, prints: bool) -> list[Path]:
        """Writes files by name; returns their paths, after a failure none.

        A failure is a warning: training has succeeded by now; a full disk must not make it look as if it had not.
        """
        folder = Path(directory)
        try:
            if "://" in directory:
                raise OSError(
                    "the folder is not on this machine; set a local default_root_dir or logger of the Trainer"
                )
            for name, contents in files.items():
                document.write_bytes(contents, folder / name)
        except OSError as error:
            rank_zero_warn(f"the {what} was not written to {directory}: {error}")
            return []
        paths = [folder / name for name in files]
        if prints:
            print("written to " + "\nand ".join(map(str, paths)))
        return paths
