"""The network interface that reaches other ranks."""

from __future__ import annotations

import socket

import psutil


def source_address(destination: str) -> str | None:
    """The address of this host from which packets to ``destination`` leave, as its routes say; None if there is none.

    No packet is sent: connecting a datagram socket only looks the route up.

    Args:
        destination: a host name or an IPv4 or IPv6 address.
    """
    try:
        candidates = socket.getaddrinfo(destination, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0]).split("%")[0]
        except OSError:
            continue
    return None


def interface_towards(destination: str) -> str | None:
    """The name of the interface through which ``destination`` is reached ("eth0"), or None if it cannot be told."""
    source = source_address(destination)
    if source is None:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == source for entry in addresses):
            return name
    return None
