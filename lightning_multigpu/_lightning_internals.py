"""Every name of Lightning that is not public and that we cannot do without, with the reason.

When Lightning moves one of them, ``tests/test_lightning_internals.py`` names it.
"""

from lightning.fabric.utilities.distributed import (
    # What Lightning does to intra-op threads before a rank starts; without it ranks share all cores and crawl.
    _set_num_threads_if_needed as set_num_threads_if_needed,
)
from lightning.fabric.utilities.imports import (
    # Lightning's own test for notebooks and REPLs: our launcher must agree with the check in Trainer.
    _IS_INTERACTIVE as IS_INTERACTIVE,
)
from lightning.pytorch.strategies.launchers import (
    # Starts one copy of the script a rank; the command line of the copies (modules, hydra) is not public elsewhere.
    # Trainer also checks for this class by name when it ends children after Ctrl-C.
    _MultiProcessingLauncher as MultiProcessingLauncher,
)
from lightning.pytorch.strategies.launchers import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)

__all__ = ["IS_INTERACTIVE", "MultiProcessingLauncher", "SubprocessScriptLauncher", "set_num_threads_if_needed"]
