"""Whether the host runs ahead of a GPU, from the launches and kernels of a step."""

import pytest

from lightning_multigpu.report.rank_figures import LaunchQueue


def test_a_host_that_is_ahead_fills_the_queue() -> None:
    """Launches take 10 us and kernels 100 us."""
    kernels = [(1e-5 * i, 1e-4 * (i + 1), 1e-4 * (i + 2)) for i in range(101)]
    found = LaunchQueue.of(kernels)
    assert found is not None
    assert (found.kernels, found.busy_s) == (101, pytest.approx(101e-4))
    assert found.queued == 45  # 50 were launched before the middle one, and 5 of them have begun


@pytest.mark.parametrize("kernel_s", [1e-6, 9e-6])
def test_a_host_that_is_behind_finds_it_empty(kernel_s: float) -> None:
    """Each kernel ends before the next is launched."""
    found = LaunchQueue.of([(1e-5 * i, 1e-5 * i + 5e-7, 1e-5 * i + 5e-7 + kernel_s) for i in range(100)])
    assert found is not None
    assert (found.queued, found.busy_s) == (0, pytest.approx(100 * kernel_s))


def test_kernels_of_several_streams_at_once_count_once() -> None:
    found = LaunchQueue.of([(0.0, 1.0, 3.0), (0.1, 2.0, 5.0), (0.2, 7.0, 8.0)])
    assert found == LaunchQueue(kernels=3, busy_s=5.0, queued=1)


def test_without_kernels() -> None:
    assert LaunchQueue.of([]) is None
