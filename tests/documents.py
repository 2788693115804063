"""Code in documents: blocks of Markdown, and the cells of a notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path


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
