"""``lightning-multigpu serve``: a parameter server that is started by hand, on a machine of its own."""

from __future__ import annotations

import argparse
import errno
import os
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_multigpu._suggest import did_you_mean
from lightning_multigpu.commands.option_parser import OptionParser
from lightning_multigpu.commands.settings.sources import load
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.communication.job_secret import JOB_SECRET, job_secret
from lightning_multigpu.engine.parameter_server.server import Server

_MARK = "lightning_multigpu_server"
_EVERY_S = 60.0
_LONGEST_S = 604_800

_DESCRIPTION = f"""\
Run a parameter server on this machine, for workers that name it:

  export {JOB_SECRET}=...    # openssl rand -hex 32, once; the same for the workers
  {PROGRAM} serve --host 10.0.0.5 --port 7000
  Trainer(strategy=ParameterServerStrategy(servers=["10.0.0.5:7000"]), devices=4)    # elsewhere

The same from a file, whose settings are the options below; options on the command line win over it:

  {PROGRAM} serve --config server.yaml

It waits for the workers of one job, holds its shard of their model and steps their optimizers, and ends with the job.
Classes of optimizers of your own have to be importable from the current directory, as for the workers.
"""


def run(name: str, arguments: Sequence[str]) -> int:
    """Serves one job; returns 0 if it has ended well, else 1.

    Raises:
        UsageError: an option or a setting is unknown or out of its range, the address cannot be listened at, the
            snapshot cannot be written, or there is no secret.
        SystemExit: for ``--help``.
    """
    options = _options(_parser(name), arguments)
    if options.snapshot is None and options.snapshot_every_s != _EVERY_S:
        raise UsageError(
            f"--snapshot-every-s {options.snapshot_every_s:g} does nothing without --snapshot FILE; name a file, or "
            "leave it out"
        )
    try:
        secret = job_secret(os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if secret is None:
        raise UsageError(
            f"{JOB_SECRET} is not set: make one with 'openssl rand -hex 32', and set it for the servers and the workers"
        )
    saved = _loaded(options.resume)
    _check_can_write(options.snapshot)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        server = Server(options.host, options.port, bytes.fromhex(secret), saved=saved)
    except OSError as error:
        raise UsageError(f"cannot listen on {options.host} port {options.port}: {error.strerror or error}") from error
    print(f"Listening on {options.host} port {server.port}, for the workers of one job", flush=True)
    with _saving(server, options.snapshot, options.snapshot_every_s):
        try:
            problem = server.serve()
        except KeyboardInterrupt:
            server.end("the server was interrupted")
            server.serve()
            return 130
    print(f"The job has failed: {problem}" if problem else "The job has ended", flush=True)
    return 1 if problem else 0


def _options(parser: OptionParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, and those of the file that it names."""
    options = _checked(parser.parse(arguments))
    if options.config is None:
        return options
    flags = _flags(options.config, vars(options).keys() - {"config"})
    try:
        _checked(parser.parse(flags))
    except UsageError as error:
        raise UsageError(f"{options.config}: {error}") from error
    return _checked(parser.parse([*flags, *arguments]))


def _flags(path: str, known: Collection[str]) -> list[str]:
    """The settings of a file as options; null leaves one at its default."""
    flags = []
    for key, value in load(path, example="port: 7000").items():
        if key not in known:
            hint = did_you_mean(str(key), known) or f"Known: {', '.join(sorted(known))}"
            raise UsageError(f"{path}: {key} is not a setting. {hint}")
        if isinstance(value, bool) or not isinstance(value, str | int | float | None):
            raise UsageError(f"{path}: {key}={value!r} is neither a number nor a text")
        if value is not None:
            flags.append(f"--{key.replace('_', '-')}={value}")
    return flags


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    for option, value, largest in (("--port", options.port, 65_535), ("--threads", options.threads, 1_024)):
        if not 0 <= value <= largest:
            raise UsageError(f"{option} {value} is not between 0 and {largest}")
    if not 0 < options.snapshot_every_s <= _LONGEST_S:
        raise UsageError(
            f"--snapshot-every-s {options.snapshot_every_s} is out of range; give a number above 0 and of {_LONGEST_S} "
            "(a week) at most"
        )
    return options


def _loaded(path: str | None) -> dict[int, Any] | None:
    """The snapshot of a server.

    Raises:
        UsageError: the file cannot be read, or is none.
    """
    if path is None:
        return None
    try:
        loaded = torch.load(path, weights_only=True)
    except Exception as error:
        raise UsageError(f"--resume {path}: it cannot be read as a snapshot ({error})") from error
    if not isinstance(loaded, dict) or loaded.keys() != {_MARK} or not loaded[_MARK]:
        raise UsageError(f"--resume {path}: it is no snapshot that '{PROGRAM} serve --snapshot' has written")
    return dict(loaded[_MARK])


def _check_can_write(path: str | None) -> None:
    """Makes the directory of a file, and a file without a name in it.

    Raises:
        UsageError: the system refuses that.
    """
    if path is None:
        return
    directory = os.path.dirname(os.path.abspath(path))
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.path.exists(directory):
            os.makedirs(directory)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"--snapshot {path}: no file can be written there ({error.strerror}); name a file in a directory in which "
            "this user may write"
        ) from error


@contextmanager
def _saving(server: Server, path: str | None, every_s: float) -> Iterator[None]:
    """Writes the weights and state of a server to a file from time to time, and once more at the end."""
    if path is None:
        yield
        return
    from lightning_multigpu.runtime.checkpoint_files.whole_checkpoint_io import WholeCheckpointIO

    io, has_ended = WholeCheckpointIO(), threading.Event()

    def save() -> None:
        found = server.snapshot()
        if not found:
            return
        try:
            io.save_checkpoint({_MARK: found}, path)
        except OSError as error:
            print(f"The snapshot {path} was not written: {error}", flush=True)

    def save_again_and_again() -> None:
        while not has_ended.wait(every_s):
            save()

    thread = threading.Thread(target=save_again_and_again, name="snapshots", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        save()


def _parser(name: str) -> OptionParser:
    parser = OptionParser(f"{PROGRAM} {name}", _DESCRIPTION)
    parser.add_argument("--config", metavar="FILE", help="settings, as 'port: 7000' and 'snapshot_every_s: 30' in YAML")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address of this machine to listen at (%(default)s)"
    )
    parser.add_argument("--port", type=int, default=7000, metavar="N", help="0 for a free one (%(default)s)")
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="cores to average and update with (all that it may use)"
    )
    parser.add_argument(
        "--snapshot", metavar="FILE", help="where to write its weights and state, from time to time and at the end"
    )
    parser.add_argument(
        "--snapshot-every-s",
        type=float,
        default=_EVERY_S,
        metavar="SECONDS",
        help="between two snapshots (%(default)g)",
    )
    parser.add_argument("--resume", metavar="FILE", help="go on from a snapshot, with its weights and not the workers'")
    return parser
