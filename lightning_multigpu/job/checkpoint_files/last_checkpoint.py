"""The newest complete checkpoint, to resume from."""

from __future__ import annotations

import contextlib
import os
import pickletools
import zipfile
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import psutil
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from lightning.pytorch.utilities import rank_zero_warn

from lightning_multigpu.job.guardian.blocking import done_within

if TYPE_CHECKING:
    import lightning.pytorch as pl

_SUFFIX = ".ckpt"
_NEEDED = ("epoch", "global_step", "optimizer_states")  # the last is missing in a file of weights alone
_LOOK_S = 3.0


class CheckpointFile(NamedTuple):
    """A checkpoint that a run can resume from: its path or URL, and when it was saved and written (since 1970)."""

    path: str
    global_step: int
    epoch: int
    modified_s: float

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0] if "://" in self.path else os.path.dirname(self.path)

    def __str__(self) -> str:
        return f"{short(self.path)} (epoch {self.epoch}, step {self.global_step})"


@overload
def find_last_checkpoint(directory: str | os.PathLike[str], *, missing_ok: Literal[False] = False) -> str: ...
@overload
def find_last_checkpoint(directory: str | os.PathLike[str], *, missing_ok: bool) -> str | None: ...


def find_last_checkpoint(directory: str | os.PathLike[str], *, missing_ok: bool = False) -> str | None:
    """The path of the newest complete checkpoint in a directory or below it, for ``fit(ckpt_path=...)``.

    ::

        trainer.fit(model, ckpt_path=find_last_checkpoint("runs/digits"))

    The checkpoints of one folder are compared by their global step, then their epoch, then their time, and not by their
    names. If several folders hold checkpoints, as after several runs, the folder with the newest file counts. Temporary
    files, files with only weights, and what is no plain file, are left out. A damaged file is skipped with a warning.
    Only a small part of each file is read, and no code in it is run.

    Args:
        directory: a run's directory, or one that holds several runs; or a URL that fsspec knows.
        missing_ok: return None if there is no checkpoint: for a job that its scheduler starts repeatedly with the same
            command, and that begins anew the first time.

    Raises:
        FileNotFoundError: there is no complete checkpoint, and ``missing_ok`` is False.
    """
    found = newest(complete_checkpoints(directory))
    if found is None and not missing_ok:
        raise FileNotFoundError(
            f"there is no complete checkpoint in {str(directory)!r} or below it; pass the directory of a run that has "
            "saved one, or missing_ok=True to begin anew without one"
        )
    return None if found is None else found.path


def last_checkpoint_of(trainer: pl.Trainer) -> str | None:
    """The newest complete checkpoint that a Trainer has written in this process or resumed from; None without one.

    It looks where the Trainer's ``ModelCheckpoint`` callbacks save, ignores files of earlier programs, and does not
    communicate. It is for the last line of a run that has failed: None if the folder cannot be read, also within 3 s.
    """
    found: list[str | None] = [None]

    def look() -> None:
        with contextlib.suppress(Exception):
            begun_s = psutil.Process().create_time()
            folders = {str(getattr(each, "dirpath", None) or "") for each in trainer.checkpoint_callbacks} - {""}
            files = (file for folder in folders for file in complete_checkpoints(folder))
            written = newest(file for file in files if file.modified_s >= begun_s)
            resumed = None if trainer.ckpt_path is None else str(trainer.ckpt_path)
            found.append(resumed if written is None else written.path)

    done_within(_LOOK_S, look)
    return found[-1]


def complete_checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointFile]:
    """All checkpoints in ``directory`` or below it that a run can resume from, in any order."""
    system, root = url_to_fs(os.fspath(directory))
    found = []
    for path in system.find(root):
        if not path.endswith(_SUFFIX) or PurePath(path).name.startswith(".") or not system.isfile(path):
            continue
        shown = system.unstrip_protocol(path) if "://" in str(directory) else path
        try:
            with system.open(path, "rb") as file:
                held = _held(file)
            modified_s = system.modified(path).timestamp()
        except FileNotFoundError:  # removed meanwhile, or a link to a removed file
            continue
        except Exception as error:  # zipfile and pickletools raise a dozen classes at a changed byte
            rank_zero_warn(f"{shown} is skipped: it is damaged, or no checkpoint ({error!r})")
            continue
        if held.keys() == set(_NEEDED):
            found.append(CheckpointFile(shown, int(held["global_step"]), int(held["epoch"]), modified_s))
    return found


def newest(files: Iterable[CheckpointFile]) -> CheckpointFile | None:
    """The file with the highest step in the folder with the newest file; None without files."""
    files = list(files)
    if not files:
        return None
    folder = max(files, key=lambda file: file.modified_s).folder
    return max((file for file in files if file.folder == folder), key=lambda file: file[1:])


def short(path: str) -> str:
    """``path`` relative to the current directory, if it is below that."""
    if "://" in path:
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _held(file: Any) -> dict[str, Any]:
    """The values of the keys :data:`_NEEDED` in a file of ``torch.save``, without missing keys.

    The archive's table of contents is written last, so it exists only if the file is complete. The pickle in the
    archive is read as a list of operations: Lightning's dictionary begins with the epoch and the step.
    """
    held: dict[str, Any] = {}
    key = None
    with zipfile.ZipFile(file) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if name is None:
            raise ValueError("it holds no data.pkl")
        with archive.open(name) as pickled:
            for operation, value, _ in pickletools.genops(pickled):
                if isinstance(value, str) and "UNICODE" in operation.name:
                    key = value if value in _NEEDED and value not in held else None
                    if key == "optimizer_states":
                        held[key] = True
                elif key is not None and "INT" in operation.name:
                    held[key], key = value, None
                if len(held) == len(_NEEDED):
                    break
    return held
