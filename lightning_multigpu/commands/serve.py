"""``lightning-multigpu serve``: a parameter server that is started by hand, on a machine of its own."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence

import torch

from lightning_multigpu._suggest import did_you_mean
from lightning_multigpu.commands.option_parser import OptionParser
from lightning_multigpu.commands.settings.sources import load
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.communication.job_secret import JOB_SECRET, job_secret
from lightning_multigpu.engine.parameter_server.server import Server

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
        UsageError: an option or a setting is unknown or out of its range, the address cannot be listened at, or there
            is no secret.
        SystemExit: for ``--help``.
    """
    options = _options(_parser(name), arguments)
    try:
        secret = job_secret(os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if secret is None:
        raise UsageError(
            f"{JOB_SECRET} is not set: make one with 'openssl rand -hex 32', and set it for the servers and the workers"
        )
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        server = Server(options.host, options.port, bytes.fromhex(secret))
    except OSError as error:
        raise UsageError(f"cannot listen on {options.host} port {options.port}: {error.strerror or error}") from error
    print(f"Listening on {options.host} port {server.port}, for the workers of one job", flush=True)
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
    return options


def _parser(name: str) -> OptionParser:
    parser = OptionParser(f"{PROGRAM} {name}", _DESCRIPTION)
    parser.add_argument("--config", metavar="FILE", help="settings, as 'port: 7000' and 'threads: 4' in YAML")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address of this machine to listen at (%(default)s)"
    )
    parser.add_argument("--port", type=int, default=7000, metavar="N", help="0 for a free one (%(default)s)")
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="cores to average and update with (all that it may use)"
    )
    return parser
