"""One rank of the tests' persistent world: a process that waits for functions, runs them and reports.

Protocol over the connection, one round a call; every message is a tuple that starts with a word:

    world                                        rank
    ("call", payload, Call)              ---->   unpickles and runs the function
                                         <----   ("result", bytes) or ("raised", time, exception or None, text, is exit)
    ("clean up",)  once all have answered ---->  destroys process groups, looks for leaks
                                         <----   ("clean", list of leaks)
    ("close",)                           ---->   ends
"""

import ctypes
import faulthandler
import functools
import gc
import io
import os
import pickle
import random
import reprlib
import signal
import socket
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from lightning_multigpu.job.guardian import RankFailedError
from tests.leaks import ProcessState, leaks_since

STACKS_SIGNAL = signal.SIGRTMIN + 7
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Call:
    """The circumstances of one call."""

    directory: str
    master_port: int
    python_path: list[str]
    warning_filters: list[tuple[Any, ...]] = field(repr=False)
    may_raise: bool = False
    may_leak: bool = False


def rank() -> int:
    """The rank of this process in the tests' world."""
    return int(os.environ["LOCAL_RANK"])


def world_size() -> int:
    """How many ranks the tests' world has."""
    return int(os.environ["TESTS_WORLD_SIZE"])


def init_group(timeout_s: float = 30.0) -> None:
    """Makes the default process group of this call over Gloo; again within a call it does nothing."""
    from datetime import timedelta

    import torch.distributed as dist

    if not dist.is_initialized():
        while rank() and not _is_listening(int(os.environ["MASTER_PORT"])):
            time.sleep(0.002)  # torch tries again after 0.5 s and more
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", rank=rank(), world_size=world_size(), timeout=timeout)


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main(file_descriptor: int) -> None:
    """Serves calls until the world closes the connection or dies."""
    # A killed test session must not leave ranks behind, even those that hang in a collective.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    connection = Connection(file_descriptor)
    import lightning.pytorch  # noqa: F401
    import torch
    from torch.distributed import TCPStore

    import lightning_multigpu  # noqa: F401

    torch.set_num_threads(1)
    # The first store of a process opens a pipe for good (libuv's lock for signals): no leak of the first call.
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gc.collect()
    _freeze_imports()
    connection.send(("ready",))
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        if message[0] == "close":
            sys.stdout.flush()
            os._exit(0)  # taking the interpreter down takes seconds, and is no part of any test
        _serve(connection, *message[1:])


def _serve(connection: Connection, payload: bytes, call: Call) -> None:
    _answer_with_stacks()
    _prepare(call)
    try:
        if b"ft_ddp" in payload:
            _open_torchft()
        function, args, kwargs = pickle.loads(payload)
        before = ProcessState.take()
        with warnings.catch_warnings():
            warnings.resetwarnings()
            warnings.filters.extend(call.warning_filters)  # type: ignore[attr-defined]
            result = _dumps(function(*args, **kwargs))
    except BaseException as error:
        follows = isinstance(error, SystemExit | KeyboardInterrupt | RankFailedError)  # another rank knows the cause
        answer = ("raised", time.monotonic(), _portable(error), _describe(error), follows)
        if not call.may_raise:
            connection.send(answer)
            return
    else:
        answer = ("result", result)
        del result
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    del function, args, kwargs
    connection.send(answer)
    del answer
    if connection.recv()[0] == "clean up":
        _answer_with_stacks()
        connection.send(("clean", _clean_up(before, may_leak=call.may_leak)))


@functools.cache
def _open_torchft() -> None:
    """The first server of torchft opens a pair of sockets for good (its runtime's, for signals): no leak of a call."""
    from lightning_multigpu._torchft import torchft

    torchft("coordination").LighthouseServer(bind="[::]:0", min_replicas=1).shutdown()


def _answer_with_stacks() -> None:
    """Again for each call: Lightning's Trainer takes away the handlers that Python does not know of."""
    faulthandler.unregister(STACKS_SIGNAL)
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def _prepare(call: Call) -> None:
    sys.path[:] = [*dict.fromkeys([*call.python_path, *sys.path])]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(call.master_port), NODE_RANK="0", WORLD_SIZE=str(world_size())
    )
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)
    os.chdir(call.directory)
    _seed(1000 + rank())


def _seed(seed: int) -> None:
    """Another seed on every rank: equal weights must come from the code under test, not from equal seeds."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _clean_up(before: ProcessState, *, may_leak: bool) -> list[str]:
    import torch.distributed as dist
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    from lightning_multigpu.job.failure_watch import leave_guardian
    from lightning_multigpu.job.joining import LAST_STORE

    LAST_STORE.clear()
    gc.collect()
    leave_guardian()
    if dist.is_initialized():
        dist.destroy_process_group()
    rank_zero_only.rank = rank()
    leaks = [] if may_leak else leaks_since(before)
    before.restore()
    _freeze_imports()
    return leaks


_frozen_modules = 0


def _freeze_imports() -> None:
    """What calls have imported is not garbage: collections between calls and in tests stay cheap."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules:
        gc.freeze()
        _frozen_modules = len(sys.modules)


def _dumps(value: Any) -> bytes:
    import cloudpickle

    buffer = io.BytesIO()
    cloudpickle.dump(value, buffer)
    return buffer.getvalue()


def _portable(error: BaseException) -> bytes | None:
    """The exception pickled, or None where it would not arrive: its text still does."""
    try:
        data = _dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _describe(error: BaseException) -> str:
    """The traceback, and the local variables of the frame that raised: assertions are not rewritten in ranks."""
    lines = traceback.format_exception(error)
    frames = list(traceback.walk_tb(error.__traceback__))
    if isinstance(error, AssertionError) and frames:
        short = reprlib.Repr()
        short.maxstring = short.maxother = 200
        lines.append("where\n")
        lines += [f"    {name} = {short.repr(value)}\n" for name, value in frames[-1][0].f_locals.items()]
    return "".join(lines)
