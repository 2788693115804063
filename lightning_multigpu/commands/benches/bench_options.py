"""The common options of all benches, their start, and the header and the document of their results."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_multigpu.bench.jobs.placement import DEFAULT_DEVICES, Placement
from lightning_multigpu.commands.option_parser import OptionParser, number
from lightning_multigpu.commands.usage import PROGRAM, UsageError

if TYPE_CHECKING:
    from lightning_multigpu.bench.jobs.host_agents import HostAgents


def add_common_options(parser: OptionParser, *, timed: str, timeout_s: float) -> None:
    """Adds the options of the ranks, of the turns and of the output; ``timed`` is the repeated work, as "calls"."""
    add, count, more = parser.add_argument, number(int, 1), number(float, 0, above=True)
    add(
        *("--accelerator", "--device"),
        dest="device",
        type=lambda name: "cuda" if name == "gpu" else name,
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the tensors are: cpu (default), or gpu or cuda",
    )
    add("--devices", type=count, metavar="N", help=f"ranks on each host (default: {DEFAULT_DEVICES})")
    add("--num-nodes", type=count, metavar="N", help="hosts; run the command on each of them (default: 1)")
    add("--threads", type=count, default=1, metavar="N", help="intra-op threads a rank (default: 1)")
    add("--repetitions", type=count, default=10, metavar="N", help="turns each (default: 10)")
    add("--warm-up", type=number(int, 0), default=2, metavar="N", help=f"untimed {timed} in each turn (default: 2)")
    add("--timeout", type=more, default=timeout_s, metavar="S", help=f"of a turn (default: {timeout_s:g})")
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
        UsageError: hosts have been started with different commands.
    """
    from lightning_multigpu.bench.jobs.host_agents import HostAgents

    text = shlex.join([PROGRAM, *command])
    with ExitStack() as stack:
        hosts = stack.enter_context(HostAgents(place, threads=options.threads, verbose=options.verbose))
        try:
            hosts.check_command(text)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if not hosts.prints:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            options.json = None
        head = header(place, threads=options.threads, device_type=options.device, command=text)
        print("\n".join(header_lines(head)), flush=True)
        yield hosts, head


def header(placement: Placement, *, threads: int, device_type: str, command: str) -> dict[str, Any]:
    """The first host and the job, as JSON."""
    import torch

    from lightning_multigpu.callbacks.probes import machine_of
    from lightning_multigpu.callbacks.run_report import versions_of
    from lightning_multigpu.job.shared_gpus import sharing_note

    machine = machine_of(device_type)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command,
        "machine": machine,
        "versions": versions_of(torch.device(device_type)),
        "ranks": placement.world_size,
        "nodes": placement.num_nodes,
        "ranks_per_node": placement.devices,
        "threads_per_rank": threads,
        "device": device_type,
        "note": sharing_note(placement.devices, len(machine["gpus"])) if device_type == "cuda" else None,
    }


def header_lines(header: Mapping[str, Any]) -> list[str]:
    """The header for people, as comment lines."""
    machine = header["machine"]
    gpus = f", {', '.join(sorted(set(machine['gpus'])))} x {len(machine['gpus'])}" if machine["gpus"] else ""
    return [
        f"# {header['date']}: {header['command']}",
        f"# {machine['processor']}, {machine['usable_cores']} of {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB{gpus}, {machine['system']}",
        "# " + ", ".join(f"{name} {number}" for name, number in header["versions"].items()),
        f"# {header['ranks']} ranks ({header['nodes']} x {header['ranks_per_node']}), "
        f"{header['threads_per_rank']} intra-op thread(s) a rank, {header['device']} tensors",
        *([f"# {header['note']}"] if header["note"] else []),
    ]


def write_json(
    path: Path | None, head: Mapping[str, Any], settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> None:
    """Writes the document of ``--json`` if there is a path for it."""
    if path is not None:
        document = {"schema_version": 1, **head, "settings": settings, "results": results}
        path.write_text(json.dumps(document, indent=2) + "\n")
        print(f"# written to {path}", flush=True)
