"""A rank without torch: ``python -I -S rank_script.py REPOSITORY RANK STATEMENTS``.

The statements find ``client`` (a GuardianClient), ``Failure``, ``os``, ``sys``, ``time``, and ``told``, an event that
is set when a failure is told. "ready" is printed once the client is connected; the statements run when a line comes
from standard input.
"""

import os
import sys
import threading
import time
from types import ModuleType

package = ModuleType("lightning_multigpu")
package.__path__ = [os.path.join(sys.argv[1], "lightning_multigpu")]
sys.modules["lightning_multigpu"] = package

from lightning_multigpu.job.guardian import Failure, GuardianClient  # noqa: E402
from lightning_multigpu.job.guardian.start import ADDRESS  # noqa: E402

told = threading.Event()


def on_failure(failure: Failure) -> None:
    print("told:", failure.describe(), flush=True)
    told.set()


rank = int(sys.argv[2])
client = GuardianClient(os.environ[ADDRESS], rank=rank, on_failure=on_failure)
print("ready", flush=True)
sys.stdin.readline()
exec(sys.argv[3], {"Failure": Failure, "client": client, "told": told, "os": os, "sys": sys, "time": time})
