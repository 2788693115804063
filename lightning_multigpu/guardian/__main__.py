"""Runs the guardian; started by :meth:`lightning_multigpu.guardian.Guardian.start`, as a file, with ``-I -S``.

The packages above this one import torch and Lightning, and would make a small process a large and slow one. Their
names are therefore taken by empty modules that only know where to look for this package's files.
"""

import sys
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent
for _name, _path in (("lightning_multigpu", _HERE.parent), ("lightning_multigpu.guardian", _HERE)):
    _module = ModuleType(_name)
    _module.__path__ = [str(_path)]
    sys.modules[_name] = _module

from lightning_multigpu.guardian.process import main  # noqa: E402

main()
