"""What ranks tell each other one batch ahead; the exchange itself runs on real ranks in the strategies' tests."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.data_parallel.agreement import (
    AgreedLoader,
    Announcement,
    Announcer,
    counted_samples,
    loss_scale,
)
from lightning_multigpu.job.process_groups import metered_group
from tests.world import World, init_group, rank


def announcement(*samples: int, weights: tuple[float, ...] | None = None) -> Announcement:
    return Announcement(samples, weights or tuple(float(max(n, 0)) for n in samples), flags=0)


def test_gradients_count_by_weight() -> None:
    uneven = announcement(3, 1)
    assert [loss_scale(uneven, r, "mean") for r in range(2)] == [1.5, 0.5]
    assert [loss_scale(announcement(4, 4), r, "mean") for r in range(2)] == [1.0, 1.0]
    assert [loss_scale(announcement(4, -1), r, "mean") for r in range(2)] == [2.0, 0.0]
    assert [loss_scale(announcement(4, 1, weights=(1.0, 1.0)), r, "sum") for r in range(2)] == [2.0, 2.0]
    assert loss_scale(announcement(0, 0), 0, "mean") == 1.0


@pytest.mark.parametrize(
    ("batch", "limit", "size"),
    [
        (torch.zeros(3, 2), 4, 3),
        ({"name": "x", "data": [torch.zeros(2), torch.zeros(5)]}, 4, 2),
        ((torch.zeros(9, 2),), 4, 1),  # time first, not samples first: it counts like any other batch
        (torch.tensor(1.0), 4, 1),
        (torch.zeros(3), None, 1),
        ("no tensor", 4, 1),
    ],
)
def test_samples_of_a_batch_that_no_sampler_of_ours_has_drawn(batch: Any, limit: int | None, size: int) -> None:
    assert counted_samples(batch, limit=limit) == size


def of_two_stages() -> Any:
    init_group()
    group = metered_group(dist.new_group(backend="gloo"), Meter(), "control", torch.device("cpu"))
    announcer = Announcer(group, ranks_a_batch=2, flags=lambda: 4 if rank() == 3 else 0)
    found = []
    for stops in (None, False, True):
        samples = [8, 8, 6, -1][rank()]  # the loader of the fourth has come to its end before that of the third
        announcer.announce(samples, float(rank()))
        vote = None if stops is None else announcer.agree(stops and rank() == 1)
        assert announcer.is_due == (stops is None)
        heard = announcer.collect()
        found.append((heard.samples, heard.weights, heard.flags, vote))
    return found


def test_ranks_that_train_on_the_same_batch_speak_as_one(world4: World) -> None:
    """With a vote after a batch, or before the first one, which no vote precedes."""
    assert world4.run(of_two_stages) == [[((8, -1), (0.0, 2.0), 4, vote) for vote in (None, False, True)]] * 4


def test_attributes_are_those_of_the_loader() -> None:
    """Lightning seeds the workers of a loader by setting its ``worker_init_fn``."""
    loader = DataLoader(torch.arange(4), batch_size=2)  # type: ignore[arg-type, var-annotated]
    agreed = AgreedLoader(loader, SimpleNamespace(), length=2)  # type: ignore[arg-type]
    agreed.worker_init_fn = len  # type: ignore[attr-defined]
    assert (loader.worker_init_fn, agreed.batch_size, len(agreed)) == (len, 2, 2)
