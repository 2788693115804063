"""Scripts that start processes which would run the script again."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightning_multigpu.job.launchers.spawn_launcher import _check_script

UNGUARDED = "logger = __name__\ndef main():\n    check()\nmain()\n"
GUARDED = "def main():\n    check()\nif 'x' and __name__ == '__main__':\n    main()\n"


def run_script(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(text)
    script = ModuleType("__main__")
    vars(script).update(__file__=str(path), check=_check_script)
    monkeypatch.setitem(sys.modules, "__main__", script)
    exec(compile(text, path, "exec"), vars(script))


def test_a_script_without_a_main_guard_is_refused_before_processes_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each spawned process printed a traceback of its own, with advice to use Lightning's ddp."""
    with pytest.raises(RuntimeError, match=r"train\.py has no `if __name__ == \"__main__\":`.*'ring_ddp'"):
        run_script(tmp_path / "train.py", UNGUARDED, monkeypatch)
    run_script(tmp_path / "train.py", GUARDED, monkeypatch)
    _check_script()  # of a test, or in a console, no script's own lines run
