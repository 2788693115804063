"""Links between hosts that a rank's connections show to have broken; tests/launch/test_fault_matrix.py breaks some."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_multigpu.job import link_watch
from lightning_multigpu.job.guardian import Failure
from lightning_multigpu.job.link_watch import LinkWatch


class Client:
    """The connection to a guardian."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.rests = False
        self.told: list[tuple[str, float]] = []

    def has_left(self, timeout_s: float) -> bool:
        return False

    def failed(self, failure: Failure, *, age_s: float) -> None:
        self.told.append((failure.what, age_s))


@pytest.mark.parametrize(("address", "name"), [("10.0.0.3", "node 2 (host c)"), ("10.1.0.3", "10.1.0.3")])
def test_both_ends_of_a_link_are_named(address: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[list[Any]] = [[], [(7, address, 2.6)]]
    monkeypatch.setattr(link_watch.CONNECTIONS, "silent", lambda limit_s: looks.pop(0) if limit_s == 2.5 else None)
    client: Any = Client()
    hosts = {"10.0.0.3": "node 2 (host c)"}
    LinkWatch(client, own="node 1 (host b)", hosts=hosts, failure_timeout_s=5.0).run()
    [(what, age_s)] = client.told
    assert what.startswith(f"node 1 (host b) has received nothing from {name} for 2.6 s: ")
    assert age_s == 2.6
