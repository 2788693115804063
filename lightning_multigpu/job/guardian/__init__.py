"""The guardian: a process on every host that watches the host's ranks through the kernel.

A rank that is killed or stopped cannot report it, and a thread stops together with its process. So the first rank of a
host starts a guardian: a plain Python interpreter without any third-party package. Only the kernel's states of the
ranks' processes count for it, so a rank that computes for a minute without an answer has not failed.
::

      first rank ---- starts ----> guardian <---- TCP, alive once a second ----> guardian of node 0
          |                        ^      |
          |   UNIX socket, memory  |      |  pidfd, /proc/PID/stat, SIGKILL
          +------------------------+      v
                                   ranks of the host
"""

from lightning_multigpu.job.guardian.client import GuardianClient
from lightning_multigpu.job.guardian.failure import Failure, RankFailedError
from lightning_multigpu.job.guardian.protocol import ProtocolError
from lightning_multigpu.job.guardian.start import Guardian, GuardianError

__all__ = ["Failure", "Guardian", "GuardianClient", "GuardianError", "ProtocolError", "RankFailedError"]
