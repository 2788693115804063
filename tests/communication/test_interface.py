"""Which interface leads to the other ranks, as the host's routes say."""

import pytest

from lightning_multigpu.communication.interface import interface_towards, own_address, source_address


def test_loopback_is_reached_through_loopback() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("localhost") == "lo"


def test_the_interface_that_somebody_chose_for_gloo_is_that_of_servers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert own_address("no-such-host.invalid") == "127.0.0.1"


def test_an_unknown_host_has_no_interface() -> None:
    assert source_address("no-such-host.invalid") is None
    assert interface_towards("no-such-host.invalid") is None
