"""The command line: ``python -m lightning_multigpu``, or this file by its path, as the package itself starts it."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # The working folder, or this one: files there would come before installed packages.
    del sys.path[0]
if not __package__ and "lightning_multigpu" not in sys.modules:  # by path: this very package, also beside another one
    from importlib.util import module_from_spec, spec_from_file_location

    _file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__init__.py")
    _spec = spec_from_file_location("lightning_multigpu", _file)
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["lightning_multigpu"] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["lightning_multigpu"])

from lightning_multigpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
