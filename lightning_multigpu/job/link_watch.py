"""The links between hosts, as the connections of a rank show them.

A guardian talks to node 0's only. The links between other hosts carry connections of ranks, whose kernels answer each
other even while the processes are busy or stopped. So each rank asks its kernel which hosts do not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_multigpu.job.guardian import Failure
from lightning_multigpu.job.guardian.host_links import silence
from lightning_multigpu.job.process_groups import CONNECTIONS

if TYPE_CHECKING:
    from lightning_multigpu.job.guardian import GuardianClient

_LOOK_S = 0.5
_SHORTEST_LIMIT_S = 1.0


class LinkWatch(threading.Thread):
    """Reports a link that breaks in a run to the guardian of this host, until the process leaves it.

    ``own`` is the name of this host in the report, ``hosts`` those of the others by address. A host may be silent for
    half of ``failure_timeout_s``.
    """

    def __init__(self, client: GuardianClient, *, own: str, hosts: Mapping[str, str], failure_timeout_s: float) -> None:
        super().__init__(name="link-watch", daemon=True)
        self._client, self._own, self._hosts = client, own, hosts
        self._limit_s = max(_SHORTEST_LIMIT_S, failure_timeout_s / 2)

    @override
    def run(self) -> None:
        while not self._client.has_left(_LOOK_S) and self._client.failure is None:
            for _, address, silent_s in [] if self._client.rests else CONNECTIONS.silent(self._limit_s):
                text = silence(self._own, self._hosts.get(address, address), silent_s)
                self._client.failed(Failure(text), age_s=silent_s)
                return
