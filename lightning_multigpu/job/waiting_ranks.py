"""Ranks of the command line that import Lightning while the first rank does, and not after it.

::

    first rank    starts the others | imports Lightning | parses, checks | launches | trains
    other ranks                     | imports Lightning | wait           | parse    | train

A waiting rank has its local rank from its start, and gets the rest of its environment at the launch. One that is not
needed after all, because a setting is wrong for example, is killed, or ends by itself when its pipe closes; it has
printed nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence

from lightning_multigpu.job.guardian.proc import note_refusal

_PIPE = "LIGHTNING_MULTIGPU_WAITING_RANK"
_waiting: dict[int, tuple[subprocess.Popen[bytes], int]] = {}  # by local rank; the end of its pipe to write to
_command: list[str] = []


@contextlib.contextmanager
def ranks_started(local_ranks: Sequence[int], command: Sequence[str]) -> Iterator[None]:
    """Within the block ranks of this host wait; those that :func:`launch_rank` has not taken at its end are killed."""
    _command[:] = command
    try:
        for local_rank in local_ranks:
            reader, writer = os.pipe()
            environment = os.environ | {"LOCAL_RANK": str(local_rank), _PIPE: str(reader)}
            try:
                _waiting[local_rank] = subprocess.Popen(_command, env=environment, pass_fds=[reader]), writer
            except BaseException as error:
                os.close(writer)
                note_refusal(error, f"rank {local_rank} of {len(local_ranks) + 1} on this host cannot start")
                raise
            finally:
                os.close(reader)
        yield
    finally:
        while _waiting:
            _, (process, writer) = _waiting.popitem()
            process.kill()
            os.close(writer)
            process.wait()


def are_waiting() -> bool:
    """True if ranks wait for their launch."""
    return bool(_waiting)


def launch_rank(local_rank: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Lets a waiting rank begin with this environment; starts a new process where none waits under that number."""
    if local_rank not in _waiting:
        return subprocess.Popen(_command, env=environment)
    process, writer = _waiting.pop(local_rank)
    with contextlib.suppress(BrokenPipeError), open(writer, "w") as pipe:  # else its exit status tells what it was
        json.dump(dict(environment), pipe)
    return process


def wait_if_started_early(prepare: Callable[[], object]) -> None:
    """In a waiting rank: prepares, and returns at its launch, or ends the process if there is none."""
    descriptor = os.environ.pop(_PIPE, None)
    if descriptor is None:
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends silently until it is a rank
    prepare()
    with open(int(descriptor)) as pipe:
        text = pipe.read()
    if not text.endswith("}"):
        os._exit(0)
    signal.signal(signal.SIGINT, handler)
    os.environ.clear()
    os.environ.update(json.loads(text))
