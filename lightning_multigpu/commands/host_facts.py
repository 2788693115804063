"""Facts about a host for a bug report, the problems that they show, and the differences between hosts."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shlex
import shutil
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from lightning_multigpu._usable_cores import usable_cores
from lightning_multigpu.commands.topology_report import gpus_and_pairs, read_nvml
from lightning_multigpu.communication.interface import interface_towards
from lightning_multigpu.communication.rendezvous import own_host
from lightning_multigpu.job.shared_gpus import SHARING_NCCL, nccl_version
from lightning_multigpu.planning.numbers import size
from lightning_multigpu.planning.topology import grouped

Facts = dict[str, Any]
"""Name -> what JSON can write; None is "none", and names of sizes end in ``_bytes``."""

_PACKAGES = ("lightning-multigpu", "lightning", "torchmetrics", "fairscale", "nvidia-ml-py")
_EQUAL = ("torch", "lightning", "lightning-multigpu", "nccl")  # ranks that differ in them cannot train together
_OF_ONE_HOST = {"host", "shm_free_bytes", "interfaces", "launcher_variables"}
_LAUNCHER = re.compile(
    r"((LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_|GROUP_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_(RUN_ID|RESTART_COUNT|USE_AGENT_STORE)|PL_TRAINER_\w+|"
    r"OMPI_COMM_WORLD_\w+|PMI_(RANK|SIZE)|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|LIGHTNING_MULTIGPU_\w+|"
    r"SLURM_(JOB_(ID|NAME|NODELIST|NUM_NODES)|LOCALID|NNODES|NODEID|NTASKS(_PER_NODE)?|PROCID))"
)
_BACK_END = re.compile(r"(TORCH_)?NCCL_\w+|GLOO_\w+")
_SECRET = re.compile("SECRET|TOKEN|PASS|KEY")
_LEAST_SHM_BYTES = 256 * 10**6
_LEAST = 1024
_LIMITS = (
    ("open_files", "open files and connections", "raise the limit: ulimit -n 4096"),
    ("processes", "processes and threads of this user", "raise the limit: ulimit -u 4096"),
    ("pids_max", "processes and threads of this container", "raise pids.max: docker run --pids-limit=-1"),
)


Problem = tuple[str, str]
"""What is broken, and what to do."""


def facts_of_host(main_address: str, num_ranks: int) -> Facts:
    """The facts about this host with ``num_ranks`` ranks; ``main_address`` is that of rank 0."""
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    back_end, launcher = (shown_variables(os.environ, names) for names in (_BACK_END, _LAUNCHER))
    return {
        "host": own_host(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: _version(package) for package in _PACKAGES},
        "cuda": torch.version.cuda,
        **_gpus(),
        "gpus_seen_by_torch": torch.cuda.device_count(),
        **_nccl(num_ranks),
        "shm_bytes": shm and shm.total,
        "shm_free_bytes": shm and shm.free,
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "locked_memory_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "processes": _limit(resource.RLIMIT_NPROC),
        "pids_max": pids_max(),
        "interfaces": {
            name: " ".join(a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
            for name, addresses in psutil.net_if_addrs().items()
        },
        "main_address": main_address,
        "process_groups_through": os.environ.get("GLOO_SOCKET_IFNAME") or interface_towards(main_address),
        "back_end_variables": back_end,
        "launcher_variables": launcher,
    }


def rows_of(facts: Facts) -> dict[str, str]:
    """The facts as text: label -> value."""
    labels = {name: name.removesuffix("_bytes").replace("shm", "/dev/shm").replace("_", " ") for name in facts}
    return {labels[name]: _text(name, value) for name, value in facts.items()}


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
    if gpus and not facts["gpus_seen_by_torch"] and "CUDA_VISIBLE_DEVICES" not in launcher:
        fix = f"install a driver for CUDA {cuda}, or a torch that is built for this driver"
        fix = fix if cuda else "install a torch that is built with CUDA"
        found.append((f"torch sees none of {len(gpus)} GPUs (driver {facts['driver']})", fix))
    is_launched = not launcher.keys().isdisjoint({"TORCHELASTIC_RUN_ID", "SLURM_PROCID"})
    if (ranks := launcher.get("WORLD_SIZE", "1")) != "1" and not is_launched:
        what = f"WORLD_SIZE={ranks}, but neither torchrun nor srun has started this process; Lightning ignores it"
        found.append((what, "start it by torchrun, or on each host with MASTER_ADDR, NODE_RANK and num_nodes"))
    return found


def differences(hosts: Mapping[str, Facts]) -> dict[str, dict[str, list[str]]]:
    """What differs between hosts: label -> value as text -> names of hosts; what always differs is left out."""
    found: dict[str, dict[str, list[str]]] = {}
    for host, facts in hosts.items():
        compared = {name: value for name, value in facts.items() if name not in _OF_ONE_HOST}
        for label, value in rows_of(compared).items():
            found.setdefault(label, {}).setdefault(value, []).append(host)
    return {label: values for label, values in found.items() if len(values) > 1}


def problems_of_differences(found: Mapping[str, Mapping[str, list[str]]]) -> list[Problem]:
    """The versions that keep ranks from training together."""
    fix = "install the same version on all hosts"
    return [(f"{label} differs between hosts: {', '.join(found[label])}", fix) for label in _EQUAL if label in found]


def shown_variables(environment: Mapping[str, str], names: re.Pattern[str] = _LAUNCHER) -> dict[str, str]:
    """The variables of these names that are set; "set" in place of a secret."""
    return {
        name: "set" if _SECRET.search(name) else environment[name]
        for name in sorted(environment)
        if names.fullmatch(name)
    }


def pids_max(proc: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int | str:
    """The lowest limit of processes in the control groups of this process, or "unlimited"."""
    limits = []
    with contextlib.suppress(OSError):
        for _, controllers, path in (line.split(":", 2) for line in proc.read_text().splitlines()):
            own = groups / controllers / path.strip("/")
            for folder in (own, *own.parents) if controllers in ("", "pids") else ():
                with contextlib.suppress(OSError, ValueError):  # there is no file, or "max" in it
                    limits.append(int((folder / "pids.max").read_text()))
    return min(limits, default="unlimited")


def _limit(kind: int) -> int | str:
    limit = resource.getrlimit(kind)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else limit


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _nccl(num_ranks: int) -> Facts:
    """NCCL's version, as loaded, and the reason why ranks of this host cannot meet over it, if any."""
    if not torch.cuda.device_count():
        return {"nccl": None, "no_nccl_because": "torch sees no GPU"}
    if not dist.is_nccl_available():
        return {"nccl": None, "no_nccl_because": "torch is built without it"}
    found = nccl_version()
    must_share = num_ranks > torch.cuda.device_count() and found < SHARING_NCCL
    reason = "there are fewer GPUs than ranks, which can share one from NCCL 2.31 on" if must_share else None
    return {"nccl": ".".join(map(str, found)), "no_nccl_because": reason}


def _gpus() -> Facts:
    """GPUs, driver, and what joins the GPUs, by NVML; without it the names that torch knows."""

    def read(nvml: Any, handles: list[Any]) -> Facts:
        return {
            "gpus": [f"{nvml.nvmlDeviceGetName(h)} ({size(nvml.nvmlDeviceGetMemoryInfo(h).total)})" for h in handles],
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "gpus_joined_by": grouped(gpus_and_pairs(nvml, handles)[1], "link") or None,
            "nvml": "there",
        }

    found, reason = read_nvml(read)
    if found:
        return found
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"gpus": names, "driver": None, "gpus_joined_by": None, "nvml": reason}


def _text(name: str, value: Any) -> str:
    if isinstance(value, int):
        return size(value) if name.endswith("_bytes") else f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key}={shlex.quote(text)}" for key, text in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(f"{value.count(kind)} x {kind}" for kind in dict.fromkeys(value)) or "none"
    return "none" if value is None else str(value)
