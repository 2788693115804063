"""``lightning-multigpu new DIR``: a small project that trains at once.

The files are those of ``lightning_multigpu/new_project``, checked like the rest of the package.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from lightning_multigpu.commands.option_parser import OptionParser
from lightning_multigpu.commands.usage import PROGRAM, UsageError

FILES = ("README.md", "config.yaml", "data.py", "model.py")


def run(name: str, arguments: Sequence[str]) -> int:
    """Writes the project, and prints the command that trains it."""
    parser = OptionParser(
        f"{PROGRAM} {name}",
        "Write a small project that trains at once: a module, its data, a configuration and a README with the next "
        "commands. It needs no network, and no package that this one does not need.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the project's directory: a new or an empty one")
    directory: Path = parser.parse(arguments).directory
    write(directory)
    print(f"{directory} has {', '.join(FILES[:-1])} and {FILES[-1]}. It trains on two processes with:")
    print(f"  cd {shlex.quote(str(directory))} && {PROGRAM} fit --config config.yaml")
    return 0


def write(directory: Path) -> None:
    """Writes the project's files into a directory, which is made if there is none.

    Raises:
        UsageError: the directory has files already, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if found := sorted(path.name for path in directory.iterdir()):
            names = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise UsageError(f"{directory} is not empty ({names}); pass a new directory, or an empty one")
        for name in FILES:
            (directory / name).write_bytes(files("lightning_multigpu.new_project").joinpath(name).read_bytes())
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; pass a directory that can be written") from error
