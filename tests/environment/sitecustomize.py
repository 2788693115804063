"""What each process that the tests start does first: it spares processor time that says nothing of this package.

Packages are hidden from torchmetrics, which would import them if it found them: with transformers, scipy and matplotlib
at hand, ``import lightning`` takes 8 s of processor time, without them 5 s. Code that imports them by name finds them
as ever. And each Trainer asks for the entry points of all packages that are installed, which takes 20 ms: once will do.
"""

import functools
import importlib.metadata
import importlib.util
from importlib.machinery import ModuleSpec

HIDDEN = ("transformers", "scipy", "matplotlib")


def _version(package: str) -> str:
    if package in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(package)
    return importlib.metadata.version(package)


def _find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
    return None if name in HIDDEN else importlib.util.find_spec(name, package)


importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)

try:
    import lightning_utilities.core.imports as optional_packages
except ImportError:
    pass  # an interpreter without Lightning
else:
    optional_packages._version = _version
    optional_packages.find_spec = _find_spec
