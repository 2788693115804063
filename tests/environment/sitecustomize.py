"""Hides packages from torchmetrics that it would import if it found them, in each process that the tests start.

With transformers, scipy and matplotlib at hand, ``import lightning`` takes 8 s of processor time, without them 5 s.
Code that imports them by name finds them as ever.
"""

from __future__ import annotations

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


try:
    import lightning_utilities.core.imports as optional_packages
except ImportError:
    pass  # an interpreter without Lightning
else:
    optional_packages._version = _version
    optional_packages.find_spec = _find_spec
