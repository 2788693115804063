"""Emulated hosts for tests: skipped with the reason on a user's machine, never in CI."""

import os

import pytest


def require_hosts() -> None:
    """Skips the test where namespaces cannot be made; in CI it fails there instead."""
    from lightning_multigpu.emulation import HostsUnavailable
    from lightning_multigpu.emulation.namespaces import check_available

    try:
        check_available()
    except HostsUnavailable as reason:
        if os.environ.get("CI"):
            pytest.fail(f"CI must run the tests on emulated hosts, but: {reason}", pytrace=False)
        pytest.skip(str(reason))
