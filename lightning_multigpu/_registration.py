"""Registration of the strategies as soon as Lightning is imported, before or after this package.

Lightning has no entry point for strategies: a name exists once its class is in Lightning's registry, and the classes
need Lightning. Importing this package does not import Lightning, so that ``lightning_multigpu.communication`` and the
command line's help do without.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_LIGHTNING = "lightning.pytorch"
_OTHER_ROOT = "pytorch_lightning"
# Modules with the strategies, and that import Lightning: they cannot be registered in the middle of their import.
_ADAPTERS = tuple(f"lightning_multigpu.{name}" for name in ("_lightning_internals", "job.", "strategies"))
_NO_ADAPTERS = tuple(f"lightning_multigpu.job.{name}" for name in ("guardian", "waiting_ranks", "shared_gpus"))


def register_with_lightning() -> None:
    """Registers the strategies now if Lightning has been imported, else at the end of its import."""
    if _LIGHTNING in sys.modules:
        _register()
        return
    if _OTHER_ROOT in sys.modules:
        _warn_of_other_root()
    sys.meta_path.insert(0, _ImportWatch())


def _register() -> None:
    import_module("lightning_multigpu.registry").register_all()


def _warn_of_other_root() -> None:
    """Warns a program that trains with ``pytorch_lightning``, which has a strategy registry of its own."""
    warnings.warn(
        "lightning_multigpu registers its strategies with `lightning`, and this program uses `pytorch_lightning`, "
        "whose Trainer does not know them. To change over, replace `import pytorch_lightning as pl` by "
        "`import lightning.pytorch as pl`, and `from pytorch_lightning import ...` by "
        "`from lightning.pytorch import ...`; the rest of the program stays as it is.",
        stacklevel=2,
    )


class _ImportWatch(MetaPathFinder):
    """Acts at the first import of Lightning, under either of its names, or of a module that registering imports."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(_ADAPTERS) and not fullname.startswith(_NO_ADAPTERS):
            sys.meta_path.remove(self)
            import_module(_LIGHTNING)
        elif fullname not in (_LIGHTNING, _OTHER_ROOT):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _NotifyingLoader(spec.loader, self)
        return spec

    def imported(self, name: str) -> None:
        """Called at the end of the import of ``name``."""
        if name == _OTHER_ROOT:
            if _LIGHTNING not in sys.modules:
                _warn_of_other_root()
            return
        if name == _LIGHTNING:
            sys.meta_path.remove(self)
        _register()


class _NotifyingLoader(Loader):
    """Loads as ``loader`` does, and tells ``watch`` when the module has been executed."""

    def __init__(self, loader: Loader, watch: _ImportWatch) -> None:
        self._loader = loader
        self._watch = watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._watch.imported(spec.name)
