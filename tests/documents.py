"""Code in documents and examples: blocks of Markdown, the cells of a notebook, and running them as a user would."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests import preforked

ROOT = Path(__file__).parents[1]


def run(directory: Path, *arguments: str, forked: bool = True, **environment: str) -> str:
    """Standard output of ``python ...`` in ``directory``; all output is shown when it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path, "COLUMNS": "120", **environment}
    command = [sys.executable, *arguments]
    if forked:
        ended = preforked.run(command, cwd=directory, env=variables, timeout=400)
    else:
        ended = subprocess.run(command, cwd=directory, env=variables, timeout=400, capture_output=True, text=True)
    assert ended.returncode == 0, f"{arguments}: exit status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def blocks(path: Path, language: str = "") -> list[str]:
    """The fenced blocks of a page that are marked with this language, in their order; by default the unmarked ones."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [text for marked, text in found if marked == language]


def as_typed(path: Path) -> str:
    """A program that runs a notebook's code cells one after the other, as a kernel does.

    Its ``__main__`` has no file, and Lightning sees an interactive interpreter.
    """
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return "\n".join(
        [
            "import sys",
            "sys.ps1 = 'In: '",
            f"for number, cell in enumerate({[''.join(cell['source']) for cell in cells]!r}):",
            "    exec(compile(cell, f'<cell {number}>', 'exec'), sys.modules['__main__'].__dict__)",
        ]
    )
