"""Fixtures of all tests: the worlds of ranks, and a test that leaves something behind fails under its own name."""

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import preforked
from tests.environment import sitecustomize  # noqa: F401 - for this process too
from tests.hosts import require_hosts
from tests.leaks import OWN_PROCESSES, ProcessState, abandoned_shared_memory, leaks_since, shared_memory_entries
from tests.world import World

# One intra-op thread a rank, in this process and in all that tests start: ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_ENVIRONMENT = str(Path(__file__).with_name("environment"))
if _ENVIRONMENT not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join([_ENVIRONMENT, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

# A shell that starts the tests in the background makes them, and all that they start, deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


_ROOMS_THAT_WAIT = ("launch", "tests", "guardian", "callbacks")
_LONGEST_ROOM = Path(__file__).with_name("strategies")
_IMPORT_TRANSFORMERS = (
    "import transformers",
    "from transformers import",
    "from tests.strategies.tensor_parallel.test_tensor_split import",
)


def _has_ranks_with_transformers(path: Path) -> bool:
    return _LONGEST_ROOM in path.parents and any(name in path.read_text() for name in _IMPORT_TRANSFORMERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The groups of tests that pytest-xdist deals out to its workers, each to one of them.

    A file is a group: its tests share fixtures. All files whose ranks import transformers, 1.5 s of processor time for
    each rank, are one group: they share ranks. (The group marks of pytest-xdist 3.8 have no effect in pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    tests = Path(__file__).parent.rglob("test_*.py")
    shared = {str(path.relative_to(config.rootpath)) for path in tests if _has_ranks_with_transformers(path)}

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, _ = nodeid.partition("::")
            return "transformers" if file in shared else file

    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order in which pytest-xdist deals out the groups.

    Tests of jobs, guardians and callbacks mostly wait, and so do those of the examples and of the package beside this
    file: their files come in turn with those of tests that compute, long ones first, so that a core has work while a
    job is waited for, and no long file is left for the end. The longest group is that of transformers.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    waiting, computing = [], []
    for path in dict.fromkeys(item.path for item in items):
        (waiting if path.parent.name in _ROOMS_THAT_WAIT else computing).append(path)
    waiting.sort(key=lambda path: _ROOMS_THAT_WAIT.index(path.parent.name))
    computing.sort(key=lambda path: (not _has_ranks_with_transformers(path), _LONGEST_ROOM not in path.parents))
    place = {path: index for paths in (waiting, computing) for index, path in enumerate(paths)}
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """What has been imported and collected is not garbage: collections during tests stay cheap."""
    gc.collect()
    gc.freeze()


def _session_world(num_ranks: int) -> Iterator[World]:
    world = World(num_ranks)
    try:
        yield world
    finally:
        world.close()


@pytest.fixture(scope="session")
def ranks2() -> Iterator[World]:
    """Two ranks; for fixtures of a module. Tests take ``world2``."""
    yield from _session_world(2)


@pytest.fixture(scope="session")
def ranks4() -> Iterator[World]:
    """Four ranks; for fixtures of a module. Tests take ``world4``."""
    yield from _session_world(4)


@pytest.fixture
def world2(ranks2: World) -> World:
    return ranks2


@pytest.fixture
def world4(ranks4: World) -> World:
    return ranks4


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def world(request: pytest.FixtureRequest) -> World:
    """The test runs on two ranks and on four."""
    found = request.getfixturevalue(f"world{request.param}")
    assert isinstance(found, World)
    return found


@pytest.fixture
def hosts() -> Iterator[Any]:
    """Two emulated hosts joined by 1 Gbit/s each way, burst 512 KiB, MTU 1500; see also the marker ``hosts``."""
    require_hosts()
    from lightning_multigpu.emulation import EmulatedHosts

    with EmulatedHosts(2, bandwidth="1gbit", burst="512kb") as found:
        yield found


@pytest.fixture
def fake_gpu() -> Iterator[Any]:
    """A stand-in for a GPU, in the process of pytest; see :mod:`tests.fake_gpu`."""
    from tests.fake_gpu import installed

    with installed() as found:
        yield found


@pytest.fixture(scope="session", autouse=True)
def _server_of_processes() -> Iterator[None]:
    """The server of :mod:`tests.preforked` starts with the first process that is asked for, and ends here."""
    yield
    preforked.close()


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
    before = ProcessState.take(ignored_children=OWN_PROCESSES, with_files=False)
    yield
    if watch := sys.modules.get("lightning_multigpu.job.failure_watch"):  # a guardian stays until its process exits
        watch.leave_guardian()
    leaks = leaks_since(before, ignored_children=OWN_PROCESSES, with_files=False)
    before.restore()
    leaks += [f"shared memory left: /dev/shm/{name}" for name in abandoned_shared_memory(segments)]
    leaks += [f"file left in {Path.cwd()}: {name}" for name in sorted(_names_here() - files)]
    if leaks:
        pytest.fail("the test left behind:\n" + "\n".join(f"  {leak}" for leak in leaks), pytrace=False)


def _names_here() -> set[str]:
    return {name for name in os.listdir() if not name.startswith((".", "__pycache__"))}
