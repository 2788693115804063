"""``lightning-multigpu doctor``: this host, or all hosts of a job, as text for a bug report.

Every process of a job runs the command. They meet as the ranks of a run do, and the first one prints::

    node 0 -- facts -->  store of rank 0  <-- facts -- node 1      each process reads all facts, and decides alike
    rank 0 <---------- all-reduce over gloo, nccl ----------> rank 1

With ``--json`` one object is printed. Its keys are stable: a change of their meaning raises ``schema_version``; new
keys do not. ::

    {
      "schema_version": 1,
      "hosts": {name: facts},                                         see host_facts.facts_of_host
      "differences": {label: {value: [name of a host]}},
      "all_reduce": [{"backend": str, "ranks": int, "status": "ok", "failed", "timed out" or "not tried",
                      "reason": str or null}],
      "problems": [{"hosts": [name], "problem": str, "fix": str}]
    }

Functions import what needs torch, so that ``--help`` and a refusal do without.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_multigpu.commands.option_parser import OptionParser, number
from lightning_multigpu.commands.usage import PROGRAM, UsageError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from lightning_multigpu.bench.jobs.host_agents import HostAgents
    from lightning_multigpu.bench.jobs.placement import Placement
    from lightning_multigpu.commands.host_facts import Facts, Problem

SCHEMA_VERSION = 1
_TIMEOUT_S = 60.0
_SIZE = 4096
_FIXES = {
    "gloo": "check routes and firewalls between the ranks, or name another interface by GLOO_SOCKET_IFNAME",
    "nccl": f"run NCCL_DEBUG=INFO {PROGRAM} doctor, and see what NCCL says",
}
_DESCRIPTION = f"""\
Print what a bug report needs: versions, GPUs, /dev/shm, limits, network interfaces, the launcher's variables, and
whether an all-reduce works on each back end. Problems follow at the end, each with its fix.

On several hosts, start it as you start a run; the first process also prints what differs between the hosts:

  torchrun --nnodes=2 --nproc-per-node=2 ... -m lightning_multigpu doctor
  srun {PROGRAM} doctor

Exit status: 0 without problems, 1 with problems, 2 for a wrong command line.
"""


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the report on the first process of a job; returns 1 where something is broken."""
    options = _parser(name).parse(arguments)
    from lightning_multigpu.bench.jobs.placement import Placement, placement
    from lightning_multigpu.commands.host_facts import facts_of_host
    from lightning_multigpu.communication.rendezvous import RendezvousError

    here, problem, store = Placement(devices=2, local_ranks=(0, 1)), None, None
    try:
        place = placement(None, options.num_nodes)
        is_alone = place.num_agents == 1
        address = os.environ.get("MASTER_ADDR", here.main_address) if is_alone else place.main_address
        if place.num_agents == place.num_nodes:
            place = here if is_alone else replace(place, devices=1, local_ranks=(0,))
        hosts = [facts_of_host(address, place.devices)]
        if not is_alone:
            store, hosts = meet(place, hosts[0], options.timeout)
            place = replace(place, has_store=True)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except RendezvousError as error:
        what, _, fix = str(error).replace("join_timeout_s", "--timeout").rpartition(". ")
        if place.agent:
            print(f"{PROGRAM} {name}: {what}. {fix}", file=sys.stderr)
            return 1
        place, problem = here, (what, fix)
    document = _document(hosts, _try_back_ends(place, hosts, options.timeout), problem)
    del store  # the ranks needed it
    if place.agent == 0:
        print(json.dumps(document, indent=2) if options.json else "\n".join(lines(document)), flush=True)
    return int(bool(document["problems"]))


def meet(place: Placement, own: Facts, timeout_s: float) -> tuple[Store, list[Facts]]:
    """Waits until all processes of the job have all facts; returns the store, and each host's facts in their order.

    Raises:
        ValueError: the port is none.
        RendezvousError: processes are missing, or two claim to be the same.
    """
    from lightning_multigpu.communication.connections import Connections
    from lightning_multigpu.communication.main_store import MainStore
    from lightning_multigpu.communication.rendezvous import Arrival, Rendezvous

    limits: dict[str, Any] = {"timeout_s": timeout_s, "deadline_s": time.monotonic() + timeout_s, "check": lambda: None}
    store = MainStore(
        place.main_address,
        place.main_port,
        rank=place.agent,
        is_one_host=False,
        is_kept=place.has_store,
        connections=Connections(),
        **limits,
    ).open()
    arrival = Arrival(place.agent, own["host"], place.node_rank, os.getpid(), place.num_agents)
    rendezvous = Rendezvous(
        store, arrival, attempt=f"doctor-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", **limits
    )
    if place.local_ranks[0] == 0:
        rendezvous.offer(f"facts of node {place.node_rank}", own)
    rendezvous.check_in()
    rendezvous.wait_for_all()
    hosts = [rendezvous.wait_for(f"facts of node {node}") for node in range(place.num_nodes)]
    rendezvous.offer(f"end of rank {place.agent}", True)
    for agent in range(place.num_agents) if place.agent == 0 else ():  # the store may be in this process
        rendezvous.wait_for(f"end of rank {agent}")
    return store, hosts


def _try_back_ends(place: Placement, hosts: Sequence[Facts], timeout_s: float) -> list[dict[str, Any]]:
    """The rows ``all_reduce`` of the report."""
    from lightning_multigpu.bench.jobs.host_agents import HostAgents

    no_nccl = next((facts["no_nccl_because"] for facts in hosts if facts["no_nccl_because"]), None)
    with HostAgents(place, threads=1, verbose="NCCL_DEBUG" in os.environ) as agents:
        gloo = {"backend": "gloo", "ranks": place.world_size, **_try_all_reduce(agents, "gloo", timeout_s)}
        nccl = {"status": "not tried", "reason": no_nccl} if no_nccl else _try_all_reduce(agents, "nccl", timeout_s)
    return [gloo, {**gloo, "backend": "nccl", **nccl}]


def _try_all_reduce(agents: HostAgents, backend: str, timeout_s: float) -> dict[str, str | None]:
    """The status of an all-reduce of all ranks, in processes of their own, which may crash or hang, and the reason."""
    from lightning_multigpu.bench.collectives.collective_run import CollectivePlan, measure
    from lightning_multigpu.bench.collectives.implementations import IMPLEMENTATIONS
    from lightning_multigpu.bench.collectives.operations import BY_NAME

    plan = CollectivePlan(
        operations=[BY_NAME["all_reduce"]],
        implementations=[row for row in IMPLEMENTATIONS if row.name == backend],
        sizes=[_SIZE],
        device_type="cuda" if backend == "nccl" else "cpu",
        timeout_s=timeout_s,
        join_s=0.0,
    )
    try:
        [row] = measure(agents, plan)
    except (RuntimeError, OSError) as error:  # of the store
        return {"status": "failed", "reason": str(error).partition("\n")[0]}
    if row.wrong:
        numel = row.numel * agents.placement.world_size
        return {"status": "failed", "reason": f"{row.wrong} of {numel} elements of the sums are wrong"}
    return {"status": row.status if row.status in ("ok", "timed out") else "failed", "reason": row.reason}


def _document(hosts: Sequence[Facts], tried: list[dict[str, Any]], problem: Problem | None) -> dict[str, Any]:
    """What ``--json`` prints."""
    from lightning_multigpu.commands.host_facts import differences, problems_of, problems_of_differences

    names = [facts["host"] if len(hosts) == 1 else f"node {node} ({facts['host']})" for node, facts in enumerate(hosts)]
    named = dict(zip(names, hosts, strict=True))
    different = differences(named)
    found: dict[Problem, list[str]] = {problem: names} if problem else {}
    for host, facts in named.items():
        for problem in problems_of(facts):
            found.setdefault(problem, []).append(host)
    found |= dict.fromkeys(problems_of_differences(different), names)
    for row in tried:
        if row["status"] in ("failed", "timed out"):
            what = f"an all-reduce of {row['ranks']} ranks over {row['backend']} {row['status']}: {row['reason']}"
            found[what, _FIXES[row["backend"]]] = names
    return {
        "schema_version": SCHEMA_VERSION,
        "hosts": named,
        "differences": different,
        "all_reduce": tried,
        "problems": [{"hosts": where, "problem": what, "fix": fix} for (what, fix), where in found.items()],
    }


def lines(document: dict[str, Any]) -> list[str]:
    """The report as text: what is equal on all hosts once, then what differs, the back ends, and the problems."""
    from lightning_multigpu.commands.host_facts import rows_of

    hosts, differences, found = document["hosts"], document["differences"], document["problems"]
    shown = {name: value for name, value in next(iter(hosts.values())).items() if name != "no_nccl_because"}
    rows = {label: value for label, value in rows_of(shown).items() if label not in differences}
    for row in document["all_reduce"]:
        label = f"all-reduce of {row['ranks']} over {row['backend']}"
        rows[label] = row["status"] + (f": {row['reason']}" if row["reason"] else "")
    width = max(map(len, rows))
    text = [f"{label:<{width}}  {value}" for label, value in rows.items()]
    if len(hosts) > 1:
        what = "They differ in:" if differences else "No differences were found."
        text += ["", f"{len(hosts)} hosts; the facts above are those of {next(iter(hosts))}. {what}"]
        for label, values in differences.items():
            text += [f"{label:<{width}}  {value}: {', '.join(names)}" for value, names in values.items()]
    text.append("")
    for row in found:
        text += [f"PROBLEM on {', '.join(row['hosts'])}: {row['problem']}", f"  fix: {row['fix']}"]
    return text if found else [*text, "No problem was found."]


def _parser(name: str) -> OptionParser:
    parser = OptionParser(f"{PROGRAM} {name}", _DESCRIPTION)
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object with stable keys")
    add_meeting_options(parser, "of joining, and of each all-reduce")
    return parser


def add_meeting_options(parser: OptionParser, timeout: str = "of joining") -> None:
    """Adds ``--num-nodes`` and ``--timeout``, with what the timeout is of."""
    add = parser.add_argument
    add("--num-nodes", type=number(int, 1), metavar="N", help="hosts, without a launcher; run it on each (default: 1)")
    add(
        "--timeout",
        type=number(float, 0, above=True),
        default=_TIMEOUT_S,
        metavar="S",
        help=f"{timeout} (default: {_TIMEOUT_S:g})",
    )
