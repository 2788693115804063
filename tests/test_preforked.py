"""Processes that a forked process starts are what they would be as new interpreters."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests import preforked

CHILD = """
import json, os, sys
os.write(int(sys.argv[1]), b"through the descriptor")
print(json.dumps({
    "arguments": sys.argv, "environment": dict(os.environ), "directory": os.getcwd(), "parent": os.getppid(),
    "leads a session": os.getsid(0) == os.getpid(), "imported": "lightning.pytorch" in sys.modules,
    "shown": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"), "descriptors": os.listdir("/proc/self/fd"),
    "blocked": open("/proc/self/status").read().partition("SigBlk:")[2].split()[0],
}))
sys.exit(7)
"""
PARENT = f"""
import json, multiprocessing, os, subprocess, sys
CHILD = {CHILD!r}
reader, writer = os.pipe()
command = [sys.executable, *sys.argv[2:], "-c", CHILD, str(writer)]
child = subprocess.Popen(command, env={{"GIVEN": "1", "LOCAL_RANK": "1"}}, cwd=sys.argv[1], pass_fds=[writer],
                         stdout=subprocess.PIPE, start_new_session=True)
told = json.loads(child.communicate()[0])
spawned = multiprocessing.get_context("spawn").Process(target=os._exit, args=(8,))
spawned.start()
spawned.join()
print(json.dumps({{**told, "status": child.returncode, "command": command, "written": os.read(reader, 100).decode(),
                  "is a child": told["parent"] == os.getpid(), "spawned": spawned.exitcode}}))
"""


def told(directory: Path, *options: str) -> dict[str, Any]:
    ended = preforked.run([sys.executable, "-c", PARENT, str(directory), *options], timeout=60)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_a_started_process_has_what_it_was_given(tmp_path: Path) -> None:
    found = told(tmp_path)
    writer = found["command"][-1]
    assert found["imported"], "it was started anew"
    assert found["is a child"]
    assert found["leads a session"]
    assert (found["arguments"], found["shown"]) == (["-c", writer], found["command"])
    assert found["environment"] == {"GIVEN": "1", "LOCAL_RANK": "1"}
    assert found["directory"] == str(tmp_path)
    assert {"0", "1", "2", writer} < {*found["descriptors"]}
    assert len(found["descriptors"]) == 6, "one lists them, and one is that of the process's own server"
    assert (found["written"], found["status"], found["spawned"]) == ("through the descriptor", 7, 8)
    assert int(found["blocked"], 16) == 0


def test_an_interpreter_with_options_of_its_own_is_started(tmp_path: Path) -> None:
    assert not told(tmp_path, "-S")["imported"]
