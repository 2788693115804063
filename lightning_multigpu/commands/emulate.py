"""``lightning-multigpu emulate``: a command on several emulated hosts of this machine.

Every host is a network namespace with an address and a bandwidth of its own. The command runs once on each, as one
would start it on real hosts, with MASTER_ADDR, MASTER_PORT and NODE_RANK set, and PL_TRAINER_NUM_NODES and
PL_TRAINER_DEVICES, from which a ``Trainer`` takes the arguments that it was not given.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from lightning_multigpu.commands.option_parser import OptionParser
from lightning_multigpu.commands.usage import COMMAND, PROGRAM, UsageError
from lightning_multigpu.emulation import EmulatedHosts, HostsUnavailable
from lightning_multigpu.emulation.job import HostsJob
from lightning_multigpu.emulation.namespaces import become_root_of_a_user_namespace

_DESCRIPTION = f"""\
Run a command on several emulated hosts of this machine, to see num_nodes=2 at home:

  {PROGRAM} emulate --nodes 2 --devices 2 --bandwidth 1gbit -- python train.py

Each host is a network namespace; what one sends is limited to the bandwidth. The command is started once a host, with
MASTER_ADDR, MASTER_PORT and NODE_RANK set, so that Trainer(strategy="ring_ddp", num_nodes=2, devices=2) finds the
other hosts. A Trainer without num_nodes and devices takes them from --nodes and --devices, and so does
"{PROGRAM} fit". Hosts share this machine's processors, memory and files, and reach nothing outside.
It needs root, or a kernel that lets users make user namespaces.
"""


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs the command to its end on all hosts; what each has sent and received follows on standard error.

    Returns:
        0 if it has ended well everywhere, else the exit status of the host that failed first.
    """
    options = _parser(name).parse(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("there is no command to run; it follows after --, as in -- python train.py")
    if options.devices < 1:
        raise UsageError(f"--devices {options.devices}: a host needs 1 device or more")
    try:
        hosts = EmulatedHosts(
            options.nodes,
            bandwidth=None if options.bandwidth == "unlimited" else options.bandwidth,
            burst=options.burst,
        )
        if os.geteuid() != 0:
            become_root_of_a_user_namespace([*COMMAND, name, *arguments])
        return _emulate(hosts, command, options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except HostsUnavailable as error:
        raise UsageError(f"hosts cannot be emulated here: {error}") from error


def _emulate(hosts: EmulatedHosts, command: Sequence[str], options: argparse.Namespace) -> int:
    env = {"PL_TRAINER_NUM_NODES": str(options.nodes), "PL_TRAINER_DEVICES": str(options.devices)}
    ended: list[signal.Signals] = []
    jobs: list[HostsJob] = []

    def end(number: int, frame: FrameType | None) -> None:
        ended.append(signal.Signals(number))
        for job in jobs:
            job.send_signal(signal.Signals(number))

    # Set before the command starts: who sees it start may send SIGTERM at once.
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, end)}
    try:
        with hosts, HostsJob(hosts, command, env=env) as job:
            # Ctrl-C reaches the command from the terminal itself. This process waits for the command's end.
            before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
            jobs.append(job)
            if ended:
                job.send_signal(ended[0])
            status = job.wait()
            traffic = {host.name: host.counters() for host in hosts}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for host, counters in traffic.items():
        sent_mb, received_mb = counters.sent_bytes / 1e6, counters.received_bytes / 1e6  # without frames' checksums
        print(f"{host}: sent {sent_mb:.1f} MB, received {received_mb:.1f} MB", file=sys.stderr)
    return status or (128 + ended[0] if ended else 0)


def _parser(name: str) -> OptionParser:
    usage = f"{PROGRAM} {name} [options] -- command [arguments]"
    parser = OptionParser(f"{PROGRAM} {name}", _DESCRIPTION, usage=usage)
    add = parser.add_argument
    add("--nodes", type=int, default=2, metavar="N", help="hosts (2)")
    add("--devices", type=int, default=1, metavar="N", help="devices, that is ranks, on each host (1)")
    add("--bandwidth", default="1gbit", metavar="RATE", help="of what a host sends, as 200mbit, or unlimited (1gbit)")
    add("--burst", default="256kb", metavar="SIZE", help="what may pass at once before that limits (256kb)")
    add("command", nargs=argparse.REMAINDER, help="what to run on each host")
    return parser
