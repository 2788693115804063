"""The secret that a job's launcher gives to all of the job's processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

JOB_SECRET = "LIGHTNING_MULTIGPU_JOB_SECRET"
_SHORTEST_SECRET = 32


def job_secret(variables: Mapping[str, str]) -> str | None:
    """The secret that the job's launcher has set on all hosts, as 64 hexadecimal digits, or None.

    Raises:
        ValueError: it is short enough to be guessed.
    """
    given = variables.get(JOB_SECRET, "")
    if given and len(given) < _SHORTEST_SECRET:
        raise ValueError(
            f"{JOB_SECRET} has {len(given)} characters; it must have {_SHORTEST_SECRET} or more: on the host that "
            f"starts the job, export {JOB_SECRET}=$(openssl rand -hex 32)"
        )
    return hashlib.sha256(given.encode(errors="surrogateescape")).hexdigest() if given else None
