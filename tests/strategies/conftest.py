"""Where the tests that run for every strategy of the registry run: on ranks, or in this process."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.world import World


class OneProcess:
    """Stands for ranks where the named strategy drives all devices from this process; another one runs on the ranks."""

    def __init__(self, name: str, ranks: World) -> None:
        self._name = name
        self._ranks = ranks
        self.num_ranks = ranks.num_ranks

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """What the function returns, as the answer of each rank."""
        if self._name not in args:
            return self._ranks.run(function, *args, timeout_s=timeout_s, **kwargs)
        return [function(*args, **kwargs)] * self.num_ranks


def _of_strategy(request: pytest.FixtureRequest, ranks: World) -> World | OneProcess:
    callspec = getattr(request.node, "callspec", None)
    row = None if callspec is None else callspec.params.get("row")
    is_one_process = row is not None and not row.strategy.starts_ranks
    return OneProcess(row.name, ranks) if is_one_process else ranks


@pytest.fixture
def world2(request: pytest.FixtureRequest, ranks2: World) -> World | OneProcess:
    return _of_strategy(request, ranks2)


@pytest.fixture
def world4(request: pytest.FixtureRequest, ranks4: World) -> World | OneProcess:
    return _of_strategy(request, ranks4)
