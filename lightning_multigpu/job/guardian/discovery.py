"""Discovery of a host's guardian by ranks that this pack has not started.

torchrun, srun or a shell start each rank separately, so that no rank inherits variables of another one. The ranks and
their guardian meet at a UNIX address that is computed from the job. The kernel knows the user and the PID namespace of
each process: only processes with the same ones trust each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Mapping

from lightning_multigpu.job.guardian.client import GuardianClient, NoGuardianError, OnFailure
from lightning_multigpu.job.guardian.failure import host_name
from lightning_multigpu.job.guardian.proc import read_stat
from lightning_multigpu.job.guardian.protocol import foreign, peer_of
from lightning_multigpu.job.guardian.start import AddressTakenError, Guardian, GuardianError

# Variables that differ between jobs of a scheduler, or restarts of a job, at the same address and port.
_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)
_SHORTEST_POLL_S, _POLL_S = 0.005, 0.1


def address_of_job(
    main_address: str, main_port: int, *, node_rank: int, attempt: int, variables: Mapping[str, str]
) -> str:
    """The address of a host's guardian; equal for the ranks of the job on one host, and only for them.

    ``attempt`` is how often the processes have joined at the main address before. Of ``variables`` those count by which
    torchrun and SLURM name the job and count its restarts.
    """
    job = [variables.get(name, "") for name in _JOB_VARIABLES]
    parts = [str(os.getuid()), main_address, str(main_port), str(node_rank), str(attempt), *job]
    return f"lightning-multigpu-job-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}"


def start_at(
    address: str, *, num_ranks: int, failure_timeout_s: float, join_timeout_s: float, hang_report_s: float | None = None
) -> Guardian | None:
    """Starts the guardian at the job's address; None if a living process has done so already.

    The guardian of a job that has just failed may still run: it has time to end.

    Raises:
        GuardianError: the guardian does not start, an earlier job's guardian does not end, or a process of another user
            or container has taken the address.
    """
    began_s = time.monotonic()
    while True:
        try:
            return Guardian.start(
                num_ranks=num_ranks,
                failure_timeout_s=failure_timeout_s,
                join_timeout_s=join_timeout_s,
                hang_report_s=hang_report_s,
                address=address,
            )
        except AddressTakenError:
            pid, why = _owner(address) or (0, "")
            if why:
                raise GuardianError(f"the guardian's address belongs to {why}; choose another MASTER_PORT") from None
            if pid and (stat := read_stat(pid)) is not None and stat.state not in "ZX":
                return None
            if time.monotonic() - began_s > failure_timeout_s + 1:
                raise
        time.sleep(_POLL_S)


def find(address: str, *, rank: int, on_failure: OnFailure, timeout_s: float) -> GuardianClient:
    """Waits up to ``timeout_s`` for the guardian at the job's address to start, and connects to it.

    Raises:
        GuardianError: it does not start in time, refuses this rank, or is another user's.
    """
    deadline_s = time.monotonic() + timeout_s
    pause_s = _SHORTEST_POLL_S
    while True:
        try:
            return GuardianClient(address, rank=rank, on_failure=on_failure)
        except NoGuardianError as error:
            if time.monotonic() > deadline_s:
                raise GuardianError(
                    f"rank {rank} has found no guardian on {host_name()} within {timeout_s:g} s: the first rank of "
                    "this host, which starts it, has not come. Are MASTER_ADDR, MASTER_PORT and NODE_RANK the same "
                    "for all ranks of the host, and has one of them LOCAL_RANK=0? Do all belong to one user, and to "
                    "one container?"
                ) from error
        time.sleep(pause_s)
        pause_s = min(_POLL_S, 1.5 * pause_s)


def _owner(address: str) -> tuple[int, str] | None:
    """The pid of the process that listens at an address, and why it is not of this job; None if no process answers."""
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.settimeout(1)
        sock.connect("\0" + address)
        return peer_of(sock)[0], foreign(sock)
    return None
