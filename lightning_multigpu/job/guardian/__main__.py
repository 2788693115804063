"""Runs the guardian; started by :meth:`lightning_multigpu.job.guardian.Guardian.start`, as a file, with ``-I -S``.

The packages above this one import torch and Lightning, which would make the process large and slow. So empty modules
take their names, which only hold the path of this package's files.
"""

import json
import os
import signal
import sys
from types import ModuleType

_path = os.path.dirname(os.path.abspath(__file__))
for _name in ("lightning_multigpu.job.guardian", "lightning_multigpu.job", "lightning_multigpu"):
    _module = ModuleType(_name)
    _module.__path__ = [_path]
    sys.modules[_name] = _module
    _path = os.path.dirname(_path)

from lightning_multigpu.job.guardian.watchdog import Watchdog  # noqa: E402

# The guardian is in the ranks' process group, so that it receives Ctrl-C. It ignores other signals that a terminal or a
# supervisor sends to the group, such as Ctrl-Z.
_IGNORED = [
    signal.Signals[f"SIG{name}"] for name in ("INT", "TERM", "HUP", "QUIT", "TSTP", "TTIN", "TTOU", "USR1", "USR2")
]


def main() -> None:
    """Reads the settings, leaves its parent, and watches."""
    settings = json.loads(sys.stdin.readline())
    if pid := os.fork():
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        os._exit(0)
    # A signal that ends the ranks must not end the guardian before all of them have ended.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    Watchdog(settings).run()


if __name__ == "__main__":
    main()
