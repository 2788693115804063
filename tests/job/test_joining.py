"""Ranks that cannot train together say so as soon as they meet, on every one of them and with the same message."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_multigpu import ParameterServerStrategy, RingDDPStrategy
from lightning_multigpu.communication.job_secret import JOB_SECRET, job_secret
from lightning_multigpu.communication.main_store import MainStore
from lightning_multigpu.communication.rendezvous import Arrival, Rendezvous, RendezvousError
from lightning_multigpu.job import joining
from lightning_multigpu.job.failure_watch import FailureWatch, _is_connection_loss
from lightning_multigpu.job.joining import Joining
from lightning_multigpu.job.run_signals import RunSignals
from tests.job.test_failure_watch import RUN
from tests.strategies.tasks import Case, Classifier, fit_module
from tests.world import World, rank


class OwnModel(L.LightningModule):
    """As wide as it is told to be."""

    def __init__(self, width: int, *, in_setup: bool) -> None:
        super().__init__()
        self.width = width
        self.layer: nn.Module | None = None if in_setup else nn.Linear(width, 1)

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = nn.Linear(self.width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.layer is not None
        loss: Tensor = self.layer(torch.ones(2, self.width)).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_and_fail(module: L.LightningModule, **options: Any) -> str:
    """The message of the error that this rank gets."""
    case = Case(num_samples=16, precision="32-true")
    with pytest.raises(RuntimeError) as caught:
        fit_module(module, RingDDPStrategy(join_timeout_s=30, failure_timeout_s=10, **options), 2, case)
    return f"{type(caught.value).__name__}: {caught.value}"


def assert_said_everywhere(messages: Sequence[str], text: str) -> None:
    for message in messages:
        assert message.startswith(RendezvousError.__name__)
        assert text in message


def test_different_options_and_a_run_after_that(world2: World) -> None:
    def run() -> tuple[str, int]:
        message = fit_and_fail(Classifier(), uneven_inputs="join" if rank() == 1 else "stop")
        strategy = RingDDPStrategy(join_timeout_s=60)
        return message, fit_module(Classifier(), strategy, 2, Case(num_samples=16)).global_step

    messages, (first, second) = zip(*world2.run(run, timeout_s=150), strict=True)
    assert_said_everywhere(messages, "option uneven_inputs: 'stop' on rank 0; 'join' on rank 1")
    assert first == second > 0


@pytest.mark.parametrize("in_setup", [False, True])
def test_different_models(world2: World, in_setup: bool) -> None:
    def run() -> str:
        return fit_and_fail(OwnModel(3 + rank(), in_setup=in_setup))

    assert_said_everywhere(
        world2.run(run), "tensor 0: layer.weight float32 (1, 3) on rank 0; layer.weight float32 (1, 4) on rank 1"
    )


def test_a_rank_that_meets_the_store_of_the_last_run(world2: World) -> None:
    """It had "lost the connection" where rank 0 let go of that store before it opened the next one."""

    def run() -> int:
        def fit() -> int:
            strategy = ParameterServerStrategy(mode="async", join_timeout_s=60)
            return fit_module(Classifier(), strategy, 2, case).global_step

        def open_late(store: MainStore) -> Any:
            time.sleep(0.5)  # rank 1 is connected to what listens there
            gc.collect()
            return open_store(store)

        case, open_store = Case(num_samples=16, trainer={"max_epochs": 1}), MainStore.open
        gc.disable()
        try:
            fit()
            if rank() == 0:
                MainStore.open = open_late  # type: ignore[method-assign]
            return fit()
        finally:
            MainStore.open = open_store  # type: ignore[method-assign]
            gc.enable()

    assert min(world2.run(run, timeout_s=150)) > 0


def as_hosts(secret: str) -> pytest.MonkeyPatch:
    """Each rank takes itself for a host of its own, with the job's secret that its launcher has set."""
    patch = pytest.MonkeyPatch()
    for name, value in {
        "LOCAL_RANK": "0",
        "NODE_RANK": str(rank()),
        **({JOB_SECRET: secret} if secret else {}),
    }.items():
        patch.setenv(name, value)
    return patch


def invitations(secret: str) -> list[Any]:
    """What rank 0 has left in the store for the guardians of other hosts, and whether it is there in training."""
    seen: list[Any] = []
    offer = Rendezvous.offer

    def observed(self: Rendezvous, name: str, value: Any) -> None:
        offer(self, name, value)
        seen.extend([value["secret"], lambda: self._store.check([f"offer/{name}"])])

    class Looks(Classifier):
        def on_train_start(self) -> None:
            seen[1:] = [look() for look in seen[1:]]

    patch = as_hosts(secret)
    patch.setattr(Rendezvous, "offer", observed)
    try:
        case = Case(num_samples=16, trainer={"num_nodes": 2})
        fit_module(Looks(), RingDDPStrategy(join_timeout_s=60), 1, case)
    finally:
        patch.undo()
    return seen


@pytest.mark.parametrize("secret", ["", "0123456789abcdef" * 2])
def test_the_secret_of_the_hosts_does_not_stay_in_the_store(world2: World, secret: str) -> None:
    """It did, for the whole run: whoever read it came as a further host. A launcher's does not get there at all."""
    (offered, stays), others = world2.run(invitations, secret)
    assert others == []
    assert (offered is None) == bool(secret)
    assert secret not in str(offered) or not secret
    assert not stays


@pytest.mark.parametrize(("secret", "shown"), [("", "not set"), ("0123456789abcdef" * 2, "set (digest d583e898)")])
def test_what_hosts_compare(secret: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if secret:
        monkeypatch.setenv(JOB_SECRET, secret)
    run = replace(RUN, num_nodes=2)
    table = joining.table_of(run, strategy="A", options={}, precision="64-true")
    assert (table["strategy"], table[JOB_SECRET]) == ("A", shown)


def test_a_secret_that_can_be_guessed() -> None:
    with pytest.raises(ValueError, match=r"has 6 characters; it must have 32 or more"):
        job_secret({JOB_SECRET: "secret"})
    assert job_secret({}) is None


@pytest.mark.parametrize(
    ("remote", "other"),
    [(", remote=[10.77.0.2]:4711", "rank 1 (host h1, node 1, pid 101)"), ("", "another rank")],
    ids=["a newer Gloo", "an older one"],
)
def test_a_rank_that_finds_no_way_says_so(remote: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 33 hosts, rank 27 got "No route to host" and waited; rank 11, who saw that connection close, was blamed."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    way = Joining(FailureWatch(RunSignals()))
    way._arrivals = [Arrival(r, f"h{r}", r, 100 + r, 3, {}, f"10.77.0.{r + 1}") for r in range(3)]
    way._deadline_s = time.monotonic() + 60
    run: Any = SimpleNamespace(rank=2, join_timeout_s=60.0)
    expected = f"^no way to {re.escape(other)}: .*No route to host"
    with pytest.raises(ConnectionError, match=expected) as caught, way.limited(run):
        raise RuntimeError(f"[gloo/transport/tcp/socket.cc:142] connect: No route to host{remote}")
    assert not _is_connection_loss(caught.value), "it is told at once, before those who only see connections close"


@pytest.mark.parametrize(("address", "name"), [("10.0.0.3", "node 2 (host c)"), ("10.1.0.3", "10.1.0.3")])
def test_both_ends_of_a_link_are_named(address: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[list[Any]] = [[], [(7, address, 2.6)]]
    monkeypatch.setattr(joining.CONNECTIONS, "silent", lambda limit_s: looks.pop(0) if limit_s == 2.5 else None)
    hosts = {"10.0.0.3": "node 2 (host c)"}
    assert joining.broken_link("node 1 (host b)", hosts, 5.0) is None
    found = joining.broken_link("node 1 (host b)", hosts, 5.0)
    assert found is not None
    assert found[0].what.startswith(f"node 1 (host b) has received nothing from {name} for 2.6 s: ")
    assert found[1] == 2.6
