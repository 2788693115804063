"""Which interface leads to the other ranks, as the host's routes say."""

from __future__ import annotations

from lightning_multigpu.communication.interface import interface_towards, source_address


def test_loopback_is_reached_through_loopback() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("localhost") == "lo"


def test_an_unknown_host_has_no_interface() -> None:
    assert source_address("no-such-host.invalid") is None
    assert interface_towards("no-such-host.invalid") is None
