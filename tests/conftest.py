"""Fixtures of all tests: the worlds of ranks, and a test that leaves something behind fails under its own name."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# One intra-op thread a rank, in this process and in all that tests start: ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from lightning_multigpu.emulation import EmulatedHosts
from tests.hosts import require_hosts
from tests.leaks import ProcessState, abandoned_shared_memory, leaks_since, shared_memory_entries
from tests.world import World, live_rank_pids

# A shell that starts the tests in the background makes them, and all that they start, deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _session_world(num_ranks: int) -> Iterator[World]:
    world = World(num_ranks)
    try:
        yield world
    finally:
        world.close()


@pytest.fixture(scope="session")
def world2() -> Iterator[World]:
    """Two ranks."""
    yield from _session_world(2)


@pytest.fixture(scope="session")
def world4() -> Iterator[World]:
    """Four ranks."""
    yield from _session_world(4)


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def world(request: pytest.FixtureRequest) -> World:
    """The test runs on two ranks and on four."""
    found = request.getfixturevalue(f"world{request.param}")
    assert isinstance(found, World)
    return found


@pytest.fixture
def hosts() -> Iterator[EmulatedHosts]:
    """Two emulated hosts joined by 1 Gbit/s each way, burst 512 KiB, MTU 1500; see also the marker ``hosts``."""
    require_hosts()
    with EmulatedHosts(2, bandwidth="1gbit", burst="512kb", mtu=1500) as found:
        yield found


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _leaves_nothing(_seeds: None) -> Iterator[None]:
    """Fails the test that leaves threads, processes, variables, process groups, shared memory or files behind."""
    segments = shared_memory_entries()
    files = _names_here()
    before = ProcessState.take(ignored_children=live_rank_pids, with_files=False)
    yield
    leaks = leaks_since(before, ignored_children=live_rank_pids, with_files=False)
    before.restore()
    leaks += [f"shared memory left: /dev/shm/{name}" for name in abandoned_shared_memory(segments)]
    leaks += [f"file left in {Path.cwd()}: {name}" for name in sorted(_names_here() - files)]
    if leaks:
        pytest.fail("the test left behind:\n" + "\n".join(f"  {leak}" for leak in leaks), pytrace=False)


def _names_here() -> set[str]:
    return {name for name in os.listdir() if not name.startswith((".", "__pycache__"))}
