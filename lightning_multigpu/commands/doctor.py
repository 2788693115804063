"""``lightning-multigpu doctor``: this host, or all hosts of a job, as text for a bug report.

Every process of a job runs the command. They meet as the ranks of a run do, and the first one prints::

    node 0 -- facts -->  store of rank 0  <-- facts -- node 1      each process reads all facts, and decides alike
    rank 0 <---------- all-reduce over gloo, nccl ----------> rank 1

Functions import what needs torch, so that ``--help`` does without.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from importlib.metadata import distributions, requires
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement

from lightning_multigpu._usable_cores import usable_cores
from lightning_multigpu.commands.option_parser import OptionParser, number
from lightning_multigpu.commands.topology import nvidia_smi
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.planning.numbers import size

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from lightning_multigpu.bench.jobs.host_agents import HostAgents
    from lightning_multigpu.bench.jobs.placement import Placement

Facts = dict[str, Any]
"""Name -> what JSON can write; None is "none", and names of sizes end in ``_bytes``."""

_PACKAGES = ("lightning-multigpu", "lightning", "torchmetrics", "fairscale", "nvidia-ml-py", "torchft-nightly")
_EQUAL = {"torch", "lightning", "lightning-multigpu", "nccl"}  # ranks that differ in them cannot train together
_OF_ONE_HOST = {"host", "/dev/shm free", "interfaces", "launcher variables"}
_LAUNCHER = re.compile(
    r"((LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_|GROUP_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_(RUN_ID|RESTART_COUNT|USE_AGENT_STORE)|PL_TRAINER_\w+|"
    r"OMPI_COMM_WORLD_\w+|PMI_(RANK|SIZE)|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|LIGHTNING_MULTIGPU_\w+|TORCHFT_\w+|"
    r"SLURM_(JOB_(ID|NAME|NODELIST|NUM_NODES)|LOCALID|NNODES|NODEID|NTASKS(_PER_NODE)?|PROCID))"
)
_BACK_END = re.compile(r"(TORCH_)?NCCL_\w+|GLOO_\w+")
_SECRET = re.compile("SECRET|TOKEN|PASS|KEY")
_LEAST_SHM_BYTES = 256 * 10**6
_LEAST = 1024
_LIMITS = (
    ("open_files", "open files and connections", "raise the limit: ulimit -n 4096"),
    ("processes", "processes and threads of this user", "raise the limit: ulimit -u 4096"),
)
Problem = tuple[str, str]
"""What is broken, and what to do."""
_TIMEOUT_S = 60.0
_LIGHTHOUSE_S = 5.0
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
    parser = OptionParser(f"{PROGRAM} {name}", _DESCRIPTION)
    add, default = parser.add_argument, f"(default: {_TIMEOUT_S:g})"
    add("--num-nodes", type=number(int, 1), metavar="N", help="hosts, without a launcher; run it on each (default: 1)")
    add("--timeout", type=number(float, 0, above=True), default=_TIMEOUT_S, metavar="S",
        help=f"of joining, and of each all-reduce {default}")  # fmt: skip
    options = parser.parse(arguments)
    from lightning_multigpu.bench.jobs.placement import Placement, placement
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
    text, is_good = report(hosts, place.world_size, _try_back_ends(place, hosts, options.timeout), problem)
    del store  # the ranks needed it
    if place.agent == 0:
        print("\n".join(text), flush=True)
    return int(not is_good)


def meet(place: Placement, own: Facts, timeout_s: float) -> tuple[Store, list[Facts]]:
    """Waits until all processes of the job have all facts; returns the store, and each host's facts in their order.

    Raises:
        ValueError: the port is none.
        RendezvousError: processes are missing, or two claim to be the same.
    """
    from lightning_multigpu.communication.connections import Connections
    from lightning_multigpu.communication.main_store import MainStore
    from lightning_multigpu.communication.rendezvous import Arrival, Limit, Rendezvous

    limit = Limit(time.monotonic() + timeout_s, timeout_s, lambda: None)
    store = MainStore(
        place.main_address,
        place.main_port,
        limit,
        rank=place.agent,
        is_one_host=False,
        is_kept=place.has_store,
        connections=Connections(),
    ).open()
    arrival = Arrival(place.agent, own["host"], place.node_rank, os.getpid(), place.num_agents, offer=own)
    attempt = f"doctor-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    rendezvous = Rendezvous(store, arrival, limit, attempt=attempt)
    rendezvous.check_in()
    facts = {each.node_rank: each.offer for each in rendezvous.wait_for()}
    return store, [facts[node] for node in range(place.num_nodes)]


def _try_back_ends(place: Placement, hosts: Sequence[Facts], timeout_s: float) -> dict[str, str]:
    """The result of an all-reduce of all ranks on each back end: "ok", "not tried: ..." or what is wrong."""
    from lightning_multigpu.bench.jobs.host_agents import HostAgents

    no_nccl = next((facts["no_nccl_because"] for facts in hosts if facts["no_nccl_because"]), None)
    with HostAgents(place, threads=1, verbose="NCCL_DEBUG" in os.environ) as agents:
        gloo = _try_all_reduce(agents, "gloo", timeout_s)
        return {
            "gloo": gloo,
            "nccl": f"not tried: {no_nccl}" if no_nccl else _try_all_reduce(agents, "nccl", timeout_s),
        }


def _try_all_reduce(agents: HostAgents, backend: str, timeout_s: float) -> str:
    """The ranks are processes of their own, which may crash or hang."""
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
        return f"failed: {error}".partition("\n")[0]
    if row.wrong:
        return f"failed: {row.wrong} of {row.numel * agents.placement.world_size} elements of the sums are wrong"
    return "ok" if row.status == "ok" else f"failed: {row.reason}"


def report(
    hosts: Sequence[Facts], ranks: int, tried: dict[str, str], problem: Problem | None
) -> tuple[list[str], bool]:
    """The lines that are printed, and whether there are no problems; ``problem`` is one of the meeting.

    What is equal on all hosts stands once, then what differs, the back ends, and the problems.
    """
    names = [facts["host"] if len(hosts) == 1 else f"node {node} ({facts['host']})" for node, facts in enumerate(hosts)]
    found: dict[Problem, list[str]] = {problem: names} if problem else {}
    values: dict[str, dict[str, list[str]]] = {}  # of each label, with the hosts that have them
    for host, facts in zip(names, hosts, strict=True):
        for problem in problems_of(facts):
            found.setdefault(problem, []).append(host)
        for fact, value in facts.items():
            label = fact.removesuffix("_bytes").replace("shm", "/dev/shm").replace("_", " ")
            values.setdefault(label, {}).setdefault(_text(fact, value), []).append(host)
    different = {label: each for label, each in values.items() if len(each) > 1 and label not in _OF_ONE_HOST}
    for label in sorted(_EQUAL & different.keys()):
        what = f"{label} differs between hosts: {', '.join(different[label])}"
        found[what, "install the same version on all hosts"] = names
    rows = {label: next(iter(each)) for label, each in values.items() if label not in different}
    for backend, result in tried.items():
        rows[f"all-reduce of {ranks} over {backend}"] = result
        if not result.startswith(("ok", "not tried")):
            found[f"an all-reduce of {ranks} ranks over {backend} {result}", _FIXES[backend]] = names
    width = max(map(len, rows))
    text = [f"{label:<{width}}  {value}" for label, value in rows.items()]
    if len(hosts) > 1:
        what = "They differ in:" if different else "No differences were found."
        text += ["", f"{len(hosts)} hosts; the facts above are those of {names[0]}. {what}"]
        for label, each in different.items():
            text += [f"{label:<{width}}  {value}: {', '.join(where)}" for value, where in each.items()]
    text.append("")
    for (what, fix), where in found.items():
        text += [f"PROBLEM on {', '.join(where)}: {what}", f"  fix: {fix}"]
    return text if found else [*text, "No problem was found."], not found


def facts_of_host(main_address: str, num_ranks: int) -> Facts:
    """The facts about this host with ``num_ranks`` ranks; ``main_address`` is that of rank 0."""
    import torch

    from lightning_multigpu.communication.interface import interface_towards
    from lightning_multigpu.communication.rendezvous import own_host

    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "host": own_host(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **dict.fromkeys(_PACKAGES),
        **{found.name: found.version for found in distributions() if found.name in _PACKAGES},
        "cuda": torch.version.cuda,
        **_gpus(),
        "gpus_seen_by_torch": torch.cuda.device_count(),
        **_nccl(num_ranks),
        "shm_bytes": shm and shm.total,
        "shm_free_bytes": shm and shm.free,
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "locked_memory_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "processes": _limit(resource.RLIMIT_NPROC),
        "interfaces": {name: addresses[0].address for name, addresses in psutil.net_if_addrs().items()},
        "main_address": main_address,
        "process_groups_through": os.environ.get("GLOO_SOCKET_IFNAME") or interface_towards(main_address),
        **_lighthouse(os.environ.get("TORCHFT_LIGHTHOUSE")),
        "back_end_variables": shown_variables(os.environ, _BACK_END),
        "launcher_variables": shown_variables(os.environ, _LAUNCHER),
    }


def problems_of(facts: Facts) -> list[Problem]:
    """What is broken on a host."""
    launcher, gpus, cuda = facts["launcher_variables"], facts["gpus"], facts["cuda"]
    found: list[Problem] = []
    for need in map(Requirement, requires("lightning-multigpu") or ()):
        if need.name in ("torch", "lightning") and not need.specifier.contains(facts[need.name], prereleases=True):
            what = f"{need.name} {facts[need.name]} is outside of what was run with this package: {need}"
            found.append((what, f"pip install '{need}'"))
    if (free := facts["shm_free_bytes"]) is not None and free < _LEAST_SHM_BYTES:
        what = f"{size(free)} are free in /dev/shm, too little for the gradients of ranks, NCCL and data loaders"
        found.append((what, "allow the container more (docker run --shm-size=8g), or remove files of ended jobs there"))
    for name, what, fix in _LIMITS:
        if isinstance(facts[name], int) and facts[name] < _LEAST:
            found.append((f"only {facts[name]} {what} are allowed; ranks and data loaders need more", fix))
    if facts["process_groups_through"] is None:
        what = f"there is no route to {facts['main_address']}"
        found.append((what, "set MASTER_ADDR to an address of rank 0's host"))
    if facts["lighthouse_fails"] is not None:
        what = f"the lighthouse of ft_ddp at {facts['lighthouse']} does not answer: {facts['lighthouse_fails']}"
        fix = "start torchft_lighthouse there and open its port, or unset TORCHFT_LIGHTHOUSE: the first host starts one"
        found.append((what, fix))
    if gpus and not facts["gpus_seen_by_torch"] and "CUDA_VISIBLE_DEVICES" not in launcher:
        fix = f"install a driver for CUDA {cuda}, or a torch that is built for this driver"
        fix = fix if cuda else "install a torch that is built with CUDA"
        found.append((f"torch sees none of {len(gpus)} GPUs (driver {facts['driver']})", fix))
    is_launched = not launcher.keys().isdisjoint({"TORCHELASTIC_RUN_ID", "SLURM_PROCID"})
    if (ranks := launcher.get("WORLD_SIZE", "1")) != "1" and not is_launched:
        what = f"WORLD_SIZE={ranks}, but neither torchrun nor srun has started this process; Lightning ignores it"
        found.append((what, "start it by torchrun, or on each host with MASTER_ADDR, NODE_RANK and num_nodes"))
    return found


def shown_variables(environment: Mapping[str, str], names: re.Pattern[str] = _LAUNCHER) -> dict[str, str]:
    """The variables of these names that are set; "set" in place of a secret."""
    found = {name: value for name, value in sorted(environment.items()) if names.fullmatch(name)}
    return {name: "set" if _SECRET.search(name) else value for name, value in found.items()}


def _limit(kind: int) -> int | str:
    limit = resource.getrlimit(kind)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else limit


def _nccl(num_ranks: int) -> Facts:
    """NCCL's version, and the reason why ranks of this host cannot meet over it, if any."""
    import torch

    from lightning_multigpu.job.shared_gpus import SHARING_VARIABLE, sharing_backend

    if not torch.cuda.device_count():
        return {"nccl": None, "no_nccl_because": "torch sees no GPU"}
    if not torch.distributed.is_nccl_available():
        return {"nccl": None, "no_nccl_because": "torch is built without it"}
    must_share = num_ranks > torch.cuda.device_count() and sharing_backend() != "nccl"
    reason = f"fewer GPUs than ranks; NCCL shares them from 2.31 on, with {SHARING_VARIABLE}=1" if must_share else None
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return {"nccl": ".".join(map(str, version)), "no_nccl_because": reason}


def _lighthouse(given: str | None) -> Facts:
    """The lighthouse that ft_ddp is told to use, and why it does not answer, if it does not."""
    reason = None
    try:
        if given is not None:
            where = urlsplit(given if "://" in given else f"http://{given}")
            connection = HTTPConnection(where.hostname or "", where.port, timeout=_LIGHTHOUSE_S)
            connection.request("GET", "/status")
            status = connection.getresponse().status
            connection.close()
            reason = None if status == HTTPStatus.OK else f"HTTP status {status}"
    except (OSError, ValueError, HTTPException) as error:
        reason = str(error) or type(error).__name__
    return {"lighthouse": given, "lighthouse_fails": reason}


def _gpus() -> Facts:
    """GPUs and driver, by nvidia-smi."""
    table, reason = nvidia_smi("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    gpus = [line.rpartition(", ") for line in table.splitlines()]
    return {"gpus": [name for name, _, _ in gpus], "driver": gpus[0][2] if gpus else f"unknown: {reason}"}


def _text(name: str, value: Any) -> str:
    if isinstance(value, int):
        return size(value) if name.endswith("_bytes") else f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key}={shlex.quote(text)}" for key, text in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(f"{value.count(kind)} x {kind}" for kind in dict.fromkeys(value)) or "none"
    return "none" if value is None else str(value)
