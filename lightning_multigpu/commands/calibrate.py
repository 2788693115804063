"""``lightning-multigpu calibrate``: measures this machine, or the hosts of a job, for ``plan``.

It writes ``machine.json``: the fields of :class:`~lightning_multigpu.planning.scaling.machine.Machine` and
"schema_version". What an earlier file has of other numbers of hosts and devices stays, if it is of the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from lightning_multigpu.bench.jobs.placement import placement
from lightning_multigpu.commands.benches.bench_options import check_device
from lightning_multigpu.commands.option_parser import OptionParser, check_directories, number
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.planning.scaling.machine import QUIET, SCHEMA_VERSION, Machine, World, differences
from lightning_multigpu.report.schema import from_json
from lightning_multigpu.report.terminal import columns

FILE_NAME = "machine.json"
_DESCRIPTION = f"""\
Measure this machine for '{PROGRAM} plan', in about a minute: collectives by size, and steps of three
reference models under each strategy.

For several hosts start it on each of them by torchrun or srun, by '{PROGRAM} emulate', or with MASTER_ADDR and
NODE_RANK. Run it once on one host, and once on several: the file keeps both.
"""


def cached_path() -> Path:
    """Where a plan looks for the machine of this user."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "lightning_multigpu" / FILE_NAME


def read(path: Path) -> Machine:
    """The machine of a ``machine.json``.

    Raises:
        ValueError: it is none, or of another version; the message names the file and the field.
    """
    try:
        document = json.loads(path.read_text())
        if document.pop("schema_version") != SCHEMA_VERSION:
            raise ValueError("it is of another version")
        return from_json(Machine, document)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        message = f"{path} is no machine.json ({error}); write one with '{PROGRAM} calibrate'"
        raise ValueError(message) from error


def run(name: str, arguments: Sequence[str]) -> int:
    """Measures, writes the file and prints what was found."""
    parser = OptionParser(f"{PROGRAM} {name}", _DESCRIPTION)
    add = parser.add_argument
    add(
        "--accelerator",
        dest="device",
        type=lambda text: "cuda" if text == "gpu" else text,
        choices=("cpu", "cuda"),
        help="cpu, or gpu or cuda (default: gpu where there is one)",
    )
    add("--devices", type=number(int, 1), nargs="+", metavar="N", help="ranks of a host (2, or as many as GPUs)")
    add("--num-nodes", type=number(int, 1), metavar="N", help="hosts; run the command on each of them (default: 1)")
    add("--output", type=Path, metavar="PATH", help=f"the file (default: {FILE_NAME} in the user's cache)")
    add("--verbose", action="store_true", help="show what the ranks print")
    options = parser.parse(arguments)
    check_directories(options, "output")
    path = options.output or cached_path()
    import torch

    options.device = options.device or ("cuda" if torch.cuda.device_count() else "cpu")
    check_device(options)
    numbers = options.devices or ([torch.cuda.device_count()] if options.device == "cuda" else [None])
    machine = _known(path, options.device)
    for devices in numbers:
        machine = _measured(machine, devices, options)
    if int(os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK") or 0):
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    from lightning_multigpu.report import document

    document.write(machine.as_json(), path)
    print(*lines(machine), f"written to {path}", sep="\n")
    return 0


def _known(path: Path, device_type: str) -> Machine:
    """The machine of the file, if it is this one; else one that has not been measured."""
    now = this_machine(device_type)
    if path.is_file():
        try:
            before = read(path)
        except ValueError as error:
            print(f"{error}; it is replaced", file=sys.stderr)
            return now
        if not differences(before, now):
            return before
        print(f"{path} is of another machine or version, and is replaced", file=sys.stderr)
    return now


def this_machine(device_type: str) -> Machine:
    """This machine before it is measured."""
    from importlib.metadata import version

    import torch

    from lightning_multigpu.callbacks.probes import machine_of

    facts = machine_of(device_type)
    is_gpu = device_type == "cuda"
    devices = torch.cuda.device_count() if is_gpu else facts["usable_cores"]
    return Machine(
        name="this machine",
        device_type=device_type,
        processor=facts["gpus"][0] if is_gpu else facts["processor"],
        devices=devices,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory if is_gpu else facts["memory_bytes"],
        versions={"torch": torch.__version__, "lightning_multigpu": version("lightning-multigpu")},
    )


def _measured(machine: Machine, devices: int | None, options: argparse.Namespace) -> Machine:
    from lightning_multigpu.bench.calibration import RANK_MODULES, calibrated
    from lightning_multigpu.bench.jobs.host_agents import HostAgents

    try:
        place = placement(devices, options.num_nodes)
    except ValueError as error:
        raise UsageError(str(error)) from error
    progress = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
    with HostAgents(place, threads=1, verbose=options.verbose, modules=RANK_MODULES) as hosts, progress:
        task = progress.add_task("starting", total=None)
        return calibrated(hosts, options.device, machine, lambda what: progress.update(task, description=what))


def lines(machine: Machine) -> Iterator[str]:
    """How disturbed the calibration was, and the figures that plans use."""
    for world, share in machine.disturbed.items():
        busy = "warning: these times may be wrong, calibrate again on a quiet machine: " if share > QUIET else ""
        yield f"{busy}other processes took {100 * share:.0f} % of the processors while {world} was measured"
    yield f"{machine.processor}, {machine.devices} devices"
    for world in machine.disturbed:
        nodes, devices = map(int, world.split(" x "))
        if nodes * devices > machine.cores(World(nodes, devices)):
            yield f"{world}: ranks share cores, and plans do not predict that"
    rows = [["operation", "hosts x devices", "latency us", "GB/s"]]
    for each in sorted(machine.collectives, key=lambda row: (row.world, row.operation)):
        smallest, *_, largest = each.link.points
        shown = f"{1e6 * smallest.seconds:.0f}", f"{largest.size_bytes / largest.seconds / 1e9:.2f}"
        rows.append([each.operation, str(each.world), *shown])
    yield from columns(rows, "left", "right")
