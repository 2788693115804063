"""The network interface that reaches other ranks."""

from __future__ import annotations

import errno
import os
import socket

import psutil

NO_WAY = {number: os.strerror(number) for number in (errno.EHOSTUNREACH, errno.ENETUNREACH)}
"""The kernel's errors for an address without a route."""

_LARGEST_PORT = 65_535


def port_number(text: str) -> int:
    """Reads MASTER_PORT, a number from 1 to 65535.

    Raises:
        ValueError: the text is no such number.
    """
    if not text.isdecimal() or not 0 < int(text) <= _LARGEST_PORT:
        raise ValueError(f"MASTER_PORT={text} is out of range; a port is a number from 1 to {_LARGEST_PORT}")
    return int(text)


def source_address(destination: str) -> str | None:
    """This host's source address for packets to ``destination``, from its routes; None without a route.

    No packet is sent: connecting a datagram socket only looks up the route.
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


def own_address(destination: str) -> str:
    """This host's address for other hosts: that of GLOO_SOCKET_IFNAME if it is set, else of the route to them."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    found = [entry.address for entry in psutil.net_if_addrs().get(interface, []) if entry.family == socket.AF_INET]
    return found[0] if found else source_address(destination) or ""


def interface_towards(destination: str) -> str | None:
    """The name of the interface through which ``destination`` is reached ("eth0"), or None if unknown."""
    source = source_address(destination)
    if source is None:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == source for entry in addresses):
            return name
    return None
