"""Placement of a bench's ranks: those that this process starts, and the address where all hosts meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_multigpu.communication.interface import port_number

DEFAULT_DEVICES = 2


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One *agent* is one process of the command line: it starts ranks of its host. The first agent prints.

    Args:
        agent: which of the agents this is, from 0.
        num_agents: as many as the command line was started times: one a host, or one a rank under torchrun and SLURM.
        devices: ranks a host.
        local_ranks: those of this host that this agent starts.
        main_address: the first host, as the others reach it.
        main_port: where the agents meet; 0 for any free port, where there is one agent only.
        has_store: the launcher has put up torch's store there already.
    """

    agent: int = 0
    num_agents: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    devices: int
    local_ranks: tuple[int, ...]
    main_address: str = "127.0.0.1"
    main_port: int = 0
    has_store: bool = False

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices


def placement(
    devices: int | None, num_nodes: int | None = None, environment: Mapping[str, str] = os.environ
) -> Placement:
    """The placement that torchrun, SLURM or the user has put into the environment; by default one host.

    Args:
        devices: ranks a host; None for what the launcher has started, or :data:`DEFAULT_DEVICES`.
        num_nodes: hosts; None for what the launcher has started, or 1.
        environment: the variables: those of torchrun or SLURM, or MASTER_ADDR, MASTER_PORT and NODE_RANK, with
            PL_TRAINER_NUM_NODES and PL_TRAINER_DEVICES, which ``emulate`` sets.

    Raises:
        ValueError: a number differs from the launcher's, or a variable is missing.
    """
    found = _of_launcher(environment) or _of_user(devices, num_nodes, environment)
    for name, value, started in (("devices", devices, found.devices), ("num-nodes", num_nodes, found.num_nodes)):
        if value is not None and value != started:
            raise ValueError(f"--{name}={value}, and the launcher has started {started}; leave the option out")
    return found


def _of_launcher(environment: Mapping[str, str]) -> Placement | None:
    if not {"TORCHELASTIC_RUN_ID", "SLURM_PROCID"} & environment.keys():
        return None
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    kind = next((kind for kind in (TorchElasticEnvironment, SLURMEnvironment) if kind.detect()), None)
    if kind is None:
        return None
    try:
        launcher = kind()
    except RuntimeError as error:  # options of srun that Lightning refuses
        raise ValueError(str(error)) from error
    world_size = launcher.world_size()
    devices = int(environment.get("LOCAL_WORLD_SIZE", 0)) or world_size // int(environment.get("SLURM_NNODES", "1"))
    return Placement(
        agent=launcher.global_rank(),
        num_agents=world_size,
        node_rank=launcher.node_rank(),
        num_nodes=world_size // devices,
        devices=devices,
        local_ranks=(launcher.local_rank(),),
        main_address=launcher.main_address,
        main_port=launcher.main_port,
        has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _of_user(devices: int | None, num_nodes: int | None, environment: Mapping[str, str]) -> Placement:
    devices = devices or int(environment.get("PL_TRAINER_DEVICES") or DEFAULT_DEVICES)
    num_nodes = int(environment.get("PL_TRAINER_NUM_NODES") or num_nodes or 1)  # of emulate, or for Lightning
    own = Placement(devices=devices, local_ranks=tuple(range(devices)))
    if num_nodes == 1:
        return own
    node_rank = environment.get("NODE_RANK", "")
    if "MASTER_ADDR" not in environment or not node_rank.isdigit() or int(node_rank) >= num_nodes:
        raise ValueError(
            f"--num-nodes={num_nodes}: run the same command on each host, with the first one's address in MASTER_ADDR "
            f"and the host's number, 0 to {num_nodes - 1}, in NODE_RANK"
        )
    return replace(
        own,
        agent=int(node_rank),
        num_agents=num_nodes,
        node_rank=int(node_rank),
        num_nodes=num_nodes,
        main_address=environment["MASTER_ADDR"],
        main_port=port_number(environment.get("MASTER_PORT", "29500")),
    )
