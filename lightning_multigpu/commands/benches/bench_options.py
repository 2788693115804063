"""The common options and the start of all benches."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_multigpu.bench.jobs.placement import DEFAULT_DEVICES, Placement
from lightning_multigpu.commands.option_parser import OptionParser, number
from lightning_multigpu.commands.usage import UsageError

if TYPE_CHECKING:
    from lightning_multigpu.bench.jobs.host_agents import HostAgents

SCHEMA_VERSION = 1
_OWN = ("json", "verbose")  # options that hosts may be given differently


def add_common_options(parser: OptionParser, *, timed: str, timeout_s: float) -> None:
    """Adds the options of the ranks, of the turns and of the output; ``timed`` is the repeated work, as "calls"."""
    add = parser.add_argument
    add(
        *("--accelerator", "--device"),
        dest="device",
        type=lambda name: "cuda" if name == "gpu" else name,
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the tensors are: cpu (default), or gpu or cuda",
    )
    add("--devices", type=number(int, 1), metavar="N", help=f"ranks on each host (default: {DEFAULT_DEVICES})")
    add("--num-nodes", type=number(int, 1), metavar="N", help="hosts; run the command on each of them (default: 1)")
    add("--threads", type=number(int, 1), default=1, metavar="N", help="intra-op threads a rank (default: 1)")
    add("--repetitions", type=number(int, 1), default=10, metavar="N", help="turns each (default: 10)")
    add("--warm-up", type=number(int, 0), default=2, metavar="N", help=f"untimed {timed} in each turn (default: 2)")
    add(
        "--timeout",
        type=number(float, 0, above=True),
        default=timeout_s,
        metavar="S",
        help=f"of a turn (default: {timeout_s:g})",
    )
    add("--verbose", action="store_true", help="show what the ranks print, such as the tracebacks of failures")
    add("--json", type=Path, metavar="PATH", help="write the results there too")


def check_device(options: argparse.Namespace) -> None:
    """Checks that there is a GPU where one is asked for; the bench's ranks may share it. Raises ``UsageError``."""
    if options.device == "cuda":
        import torch

        if not torch.cuda.device_count():
            raise UsageError("--device=cuda: this machine has no GPU; pass --device=cpu")


@contextmanager
def started(
    place: Placement, options: argparse.Namespace, command: Sequence[str]
) -> Iterator[tuple[HostAgents, dict[str, Any]]]:
    """The hosts of a bench and the header of its results; only the first agent prints until the bench has ended.

    Raises:
        UsageError: hosts have been started with different options.
    """
    from lightning_multigpu.bench.jobs.host_agents import HostAgents
    from lightning_multigpu.bench.machine import header, header_lines

    with ExitStack() as stack:
        hosts = stack.enter_context(HostAgents(place, threads=options.threads, verbose=options.verbose))
        try:
            hosts.check_settings({f"--{n}": str(value) for n, value in vars(options).items() if n not in _OWN})
        except ValueError as error:
            raise UsageError(str(error)) from error
        if not hosts.prints:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            options.json = None
        head = header(place, threads=options.threads, device_type=options.device, command=command)
        print("\n".join(header_lines(head)), flush=True)
        yield hosts, head


def write_json(
    path: Path | None, head: Mapping[str, Any], settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> None:
    """Writes the document of ``--json`` if there is a path for it."""
    if path is not None:
        document = {"schema_version": SCHEMA_VERSION, **head, "settings": settings, "results": results}
        path.write_text(json.dumps(document, indent=2) + "\n")
        print(f"# written to {path}", flush=True)
