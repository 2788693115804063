"""Ranks that cannot train together say so as soon as they meet, on every one of them and with the same message."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from lightning_multigpu import ParameterServerStrategy, RingDDPStrategy
from lightning_multigpu.communication.job_secret import JOB_SECRET, job_secret
from lightning_multigpu.communication.main_store import MainStore
from lightning_multigpu.communication.rendezvous import Rendezvous, RendezvousError
from lightning_multigpu.job import joining
from lightning_multigpu.job.failure_watch import FailureWatch
from lightning_multigpu.job.joining import Joining
from lightning_multigpu.job.run_signals import RunSignals
from tests.job.test_failure_watch import RUN
from tests.strategies.tasks import Case, Classifier, fit_module
from tests.world import World, rank


class OwnModel(Classifier):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def configure_model(self) -> None:
        self.layer = nn.Linear(self.width, 1)


def fit(module: Callable[[int], Classifier], uneven_inputs: Sequence[Any] = ("stop", "stop")) -> int:
    strategy = RingDDPStrategy(join_timeout_s=30, failure_timeout_s=10, uneven_inputs=uneven_inputs[rank()])
    return fit_module(module(rank()), strategy, 2, Case(num_samples=16, precision="32-true")).global_step


def test_different_options_and_a_run_after_that(world2: World) -> None:
    text, same = "option uneven_inputs: 'stop' on rank 0; 'join' on rank 1", lambda rank: Classifier()
    assert len(world2.run_raising(RendezvousError, text, fit, same, ("stop", "join"))) == 2
    first, second = world2.run(fit, same)
    assert first == second > 0


def test_different_models(world2: World) -> None:
    text = r"layer.weight float32 \(1, 3\) on rank 0; layer.weight float32 \(1, 4\) on rank 1"
    assert len(world2.run_raising(RendezvousError, text, fit, lambda rank: OwnModel(3 + rank))) == 2


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


def invitations(secret: str) -> list[Any]:
    """What rank 0 has left in the store for the guardians of other hosts, and whether it is there in training.

    Each rank takes itself for a host of its own, with the job's secret that its launcher has set.
    """
    seen: list[Any] = []
    check_in = Rendezvous.check_in

    def observed(self: Rendezvous) -> None:
        check_in(self)
        if self._own.offer is not None:
            seen.extend([self._own.offer["secret"], lambda: self._store.check([f"note/{self._ticket}"])])

    class Looks(Classifier):
        def on_train_start(self) -> None:
            seen[1:] = [look() for look in seen[1:]]

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"LOCAL_RANK": "0", "NODE_RANK": str(rank()), JOB_SECRET: secret}.items():
            if value:
                patch.setenv(name, value)
        patch.setattr(Rendezvous, "check_in", observed)
        case = Case(num_samples=16, trainer={"num_nodes": 2})
        fit_module(Looks(), RingDDPStrategy(join_timeout_s=60), 1, case)
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
    table = joining.table_of(replace(RUN, num_nodes=2), {"strategy": 3})
    assert (table["strategy"], table[JOB_SECRET]) == ("3", shown)
    with pytest.raises(ValueError, match=r"has 6 characters; it must have 32 or more"):
        job_secret({JOB_SECRET: "secret"})


def test_a_rank_that_finds_no_way_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 33 hosts, rank 27 got "No route to host" and waited; rank 11, who saw that connection close, was blamed."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    way = Joining(FailureWatch(RunSignals()))
    way._deadline_s = time.monotonic() + 60
    run: Any = SimpleNamespace(rank=2, join_timeout_s=60.0)
    with pytest.raises(ConnectionError, match=r"^no way to another rank: .*No route") as caught, way.limited(run):
        raise RuntimeError("[gloo/transport/tcp/socket.cc:142] connect: No route to host")
    assert not isinstance(caught.value, RuntimeError), "it is told at once, before those who only see connections close"


@pytest.mark.parametrize(("address", "name"), [("10.0.0.3", "node 2 (host c)"), ("10.1.0.3", "10.1.0.3")])
def test_both_ends_of_a_link_are_named(address: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[list[Any]] = [[], [(7, address, 2.6)]]
    monkeypatch.setattr(joining.CONNECTIONS, "silent", lambda limit_s: looks.pop(0) if limit_s == 2.5 else None)
    hosts = {"10.0.0.3": "node 2 (host c)"}
    assert joining.broken_link("node 1 (host b)", hosts, 5.0) is None
    found: Any = joining.broken_link("node 1 (host b)", hosts, 5.0)
    assert found.what.startswith(f"node 1 (host b) has received nothing from {name} for 2.6 s: ")
    assert found.age_s == 2.6
