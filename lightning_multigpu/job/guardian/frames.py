"""Lines of Python stacks: the library of each, the most useful one, and the collective in which a stack ends."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import takewhile
from types import FrameType
from typing import NamedTuple

_TORCH = re.compile(r"/(site|dist)-packages/(torch|lightning_utilities)/|/torch/(nn|autograd|distributed|optim|utils)/")
_LIGHTNING = re.compile(
    r"/(site|dist)-packages/(lightning|torchmetrics)/|/lightning/(pytorch|fabric)/|/lightning_multigpu/|/lightning-multigpu$"
)
_STANDARD = re.compile(r"/lib/python3[^/]*/(?!site-packages|dist-packages)|^<(frozen|string)")
PYTHON = "Python"
_TRAINER = re.compile(r"/lightning/pytorch/trainer/")
_C10D = "torch/distributed/distributed_c10d.py"
_AROUND_C10D = re.compile(r"/torch/distributed/|/contextlib\.py$|/torch/utils/_contextlib\.py$")


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """ "my_module.py:42 in training_step", with a part of the path."""
        return f"{_short(self.file)}:{self.line} in {self.function}"

    @property
    def is_users(self) -> bool:
        """True if the file is neither a library that this pack knows nor Python's own."""
        return not self.library and not self.file.startswith("<string")  # of dataclasses

    @property
    def library(self) -> str:
        """The library of the file, PYTHON for Python's own, empty for the user's code and other packages."""
        if _TORCH.search(self.file):
            return "torch"
        if _LIGHTNING.search(self.file):
            is_own = _short(self.file).startswith("lightning_multigpu/") or self.file.endswith("/lightning-multigpu")
            return "lightning_multigpu" if is_own else "lightning"
        # Code of `python -c` is the user's.
        return PYTHON if _STANDARD.search(self.file) and not self.file.startswith("<string") else ""


def place(frames: Sequence[Frame]) -> str:
    """The user's innermost line within the training, in a stack (most recent call first).

    Without one, the innermost line of Lightning, torchmetrics or this pack, or else the innermost line.
    """
    if not frames:
        return "an unknown line"
    outermost = max((index for index, frame in enumerate(frames) if _TRAINER.search(frame.file)), default=len(frames))
    inside = frames[: outermost + 1]
    users = next((frame for frame in inside if frame.is_users), None)
    if users is not None:
        return users.text
    return next((frame for frame in inside if _LIGHTNING.search(frame.file)), frames[0]).text


def own_collective(frames: Sequence[Frame]) -> str:
    """The collective of torch in which a stack (most recent call first) ends: ``broadcast_object_list``; or empty."""
    inside = takewhile(lambda frame: _AROUND_C10D.search(frame.file), frames)
    named = [frame.function for frame in inside if frame.file.endswith(_C10D)]
    return named[-1].lstrip("_") if named else ""


def stack_of(frame: FrameType | None) -> list[Frame]:
    """The stack of a thread of this process, most recent call first."""
    frames = []
    while frame is not None:
        frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def _short(path: str) -> str:
    """The path within its package or, elsewhere, its last two parts."""
    for root in ("/site-packages/", "/dist-packages/"):
        if root in path:
            return path.rpartition(root)[2]
    if "/lightning_multigpu/" in path:
        return "lightning_multigpu/" + path.rpartition("/lightning_multigpu/")[2]
    parts = path.split(os.sep)
    return os.sep.join(parts[-2:]) if len(parts) > 2 else path
