"""Checkpoint files that are complete or absent, never half-written."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from contextlib import ExitStack
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from typing_extensions import override

from lightning_multigpu._lightning_internals import LOADS_WEIGHTS_ONLY

_PARTIAL = ".partial"
_IDLE_S = 3600.0  # a save that goes on writes more often


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's format; a process that dies during a save leaves the previous file unchanged.

    Lightning writes to the directory for temporary files and moves the result. To another file system that is a copy,
    which can end half-way. Here the data goes to a hidden file in the directory of the checkpoint, which gets its name
    when it is complete and on the disk; a save an hour later removes it if its process was killed. The directory is on
    the disk, too, before a save returns: then an older checkpoint may be removed.

    If the system refuses to write, a save raises OSError with the path and the reason, for a full disk with the free
    space. The previous file stays.

    Attributes:
        maps_files: map a loaded file into memory, so that only tensors in use are read from it. Tensors that stay in
            use keep the file's space on the disk.
    """

    maps_files = False

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        directory, name = os.path.split(os.path.abspath(path))
        partial = os.path.join(directory, f".{name}.{os.getpid()}{_PARTIAL}")
        try:
            os.makedirs(directory, exist_ok=True)
            _remove_left(directory)
            with ExitStack() as undo, open(partial, "wb") as file:
                folder = os.open(directory, os.O_RDONLY)
                undo.callback(os.close, folder)
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(partial, path)  # from here on the new file is there: no error may say otherwise
                with contextlib.suppress(OSError):  # the file system cannot
                    os.fsync(folder)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            if reason := _reason(error, directory):
                raise OSError(reason[0], f"the checkpoint was not saved: {reason[1]}", str(path)) from error
            raise

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.maps_files and os.path.isfile(path):
            with contextlib.suppress(RuntimeError):  # torch's old format, or a file system that cannot map
                return self._mapped(path, *args, **kwargs)
        return super().load_checkpoint(path, *args, **kwargs)

    @staticmethod
    def _mapped(
        path: Any, map_location: Any = lambda storage, location: storage, weights_only: bool | None = LOADS_WEIGHTS_ONLY
    ) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=weights_only, mmap=True)
        return loaded


def whole_io(io: CheckpointIO | None) -> CheckpointIO:
    """The user's plugin ``io``; a :class:`WholeCheckpointIO` in place of none, and of Lightning's own within it."""
    if io is None:
        return WholeCheckpointIO()
    if type(getattr(io, "checkpoint_io", ...)) in (TorchCheckpointIO, type(None)):
        io.checkpoint_io = WholeCheckpointIO()  # type: ignore[attr-defined]  # it wraps another
    return io


def map_files(io: CheckpointIO) -> None:
    """Lets ``io``, or the plugin that it wraps, map files, if it is a :class:`WholeCheckpointIO`."""
    found = getattr(io, "checkpoint_io", io)
    if isinstance(found, WholeCheckpointIO):
        found.maps_files = True


def _remove_left(directory: str) -> None:
    """Removes files of saves that were killed."""
    for entry in os.scandir(directory):
        if entry.name.startswith(".") and entry.name.endswith(_PARTIAL) and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat().st_mtime > _IDLE_S:
                    os.unlink(entry.path)


def _reason(error: BaseException | None, directory: str) -> tuple[int, str] | None:
    """The number and text of a system error, also within an error of torch; None for other errors."""
    while error is not None and not (isinstance(error, OSError) and error.errno):
        error = error.__cause__ or error.__context__
    if not isinstance(error, OSError) or error.errno is None:
        return None
    text = os.strerror(error.errno)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with contextlib.suppress(OSError):
            text += f" ({shutil.disk_usage(directory).free / 1e6:.1f} MB are free there)"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        text += " (raise the limit: ulimit -n)"
    return error.errno, f"{text}; a previous file of that name is unchanged"
