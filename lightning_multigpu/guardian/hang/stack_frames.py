"""Where a thread is, in the words of whoever has to look there: the user's own line, not a library's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import NamedTuple

_C10D = "torch/distributed/distributed_c10d.py"
# Python files of torch whose innermost call waits for other ranks.
_WAITS_IN_C = (
    _C10D,
    *(f"torch/distributed/{name}.py" for name in ("rendezvous", "utils", "_functional_collectives", "nn/functional")),
    "torch/nn/parallel/distributed.py",
)
_WRAPPERS = ("torch/distributed/c10d_logger.py", "/contextlib.py", "torch/utils/_contextlib.py")
_TORCH = re.compile(r"/(site|dist)-packages/(torch|lightning_utilities)/|/torch/(nn|autograd|distributed|optim|utils)/")
_LIGHTNING = re.compile(
    r"/(site|dist)-packages/(lightning|torchmetrics)/|/lightning/(pytorch|fabric)/|/lightning_multigpu/"
)
_STANDARD = re.compile(r"/lib/python3[^/]*/(?!site-packages|dist-packages)|^<(frozen|string)")
_TRAINER = re.compile(r"/lightning/pytorch/trainer/")


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """ "my_module.py:42 in training_step", with as much of the path as tells where that is."""
        return f"{_short(self.file)}:{self.line} in {self.function}"

    @property
    def is_users(self) -> bool:
        """Whether the file is neither a library that this pack knows nor Python's own."""
        return not any(kind.search(self.file) for kind in (_TORCH, _LIGHTNING, _STANDARD))


class CollectiveCall(NamedTuple):
    """A collective that a stack shows."""

    operation: str
    place: str


def place(frames: Iterable[Frame]) -> str:
    """The line of a stack (most recent call first) that tells most.

    The user's innermost line within the training; where there is none, the innermost of Lightning, torchmetrics or this
    pack; in a thread without either, the innermost of all.
    """
    frames = list(frames)
    if not frames:
        return "unknown"
    outermost = max((index for index, frame in enumerate(frames) if _TRAINER.search(frame.file)), default=len(frames))
    inside = frames[: outermost + 1]
    users = next((frame for frame in inside if frame.is_users), None)
    if users is not None:
        return users.text
    return next((frame for frame in inside if _LIGHTNING.search(frame.file)), frames[0]).text


def collective_call(frames: Iterable[Frame]) -> CollectiveCall | None:
    """The collective in which a stack (most recent call first) ends, or None if it ends in something else.

    Its name is that of torch's function which was called from elsewhere: ``broadcast_object_list`` rather than the
    ``broadcast`` within.
    """
    frames = list(frames)
    if not frames or not frames[0].file.endswith((*_WAITS_IN_C, *_WRAPPERS)):
        return None
    depth = 0
    while depth < len(frames) and frames[depth].file.endswith((*_WAITS_IN_C, *_WRAPPERS)):
        depth += 1
    inner = [frame for frame in frames[:depth] if not frame.file.endswith(_WRAPPERS)]
    if not inner:
        return None
    named = [frame for frame in inner if frame.file.endswith(_C10D)] or inner
    return CollectiveCall(named[-1].function.lstrip("_"), place(frames[depth:]))


def place_of_frame(frame: FrameType) -> str:
    """:func:`place` of a thread of this process."""
    return place(_walk(frame))


def _walk(frame: FrameType | None) -> Iterator[Frame]:
    while frame is not None:
        yield Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def _short(path: str) -> str:
    """The path within its package or, elsewhere, its last two parts."""
    for root in ("/site-packages/", "/dist-packages/"):
        if root in path:
            return path.rpartition(root)[2]
    if "/lightning_multigpu/" in path:
        return "lightning_multigpu/" + path.rpartition("/lightning_multigpu/")[2]
    parts = path.split(os.sep)
    return os.sep.join(parts[-2:]) if len(parts) > 2 else path
