"""Main memory: what is in use, and the limit of the host or of a container."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil


class MainMemory(NamedTuple):
    """Main memory in use by all processes, and its limit, in bytes.

    ``place`` is "host", or "container" where the control group of this process has a lower limit.
    """

    place: str
    used_bytes: int
    limit_bytes: int


def host_memory(proc: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> MainMemory:
    """The memory of the host, or of a container with a lower limit; files that the kernel can drop are not in use.

    A container's limit is that of version 2 of control groups.
    """
    memory = psutil.virtual_memory()
    found = MainMemory("host", memory.total - memory.available, memory.total)
    try:
        paths = [line.removeprefix("0::") for line in proc.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        return found
    for own in (groups / path.strip("/") for path in paths):
        for folder in (own, *own.parents):  # a group has the limits of those that it is in; not all can be seen
            if not folder.is_relative_to(groups):
                break
            try:
                limit_bytes = int((folder / "memory.max").read_text())
                if limit_bytes < found.limit_bytes:
                    counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    used_bytes = int((folder / "memory.current").read_text()) - int(counts["inactive_file"])
                    found = MainMemory("container", used_bytes, limit_bytes)
            except (OSError, ValueError, KeyError):  # there is none, or "max"
                continue
    return found
