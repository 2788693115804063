"""What cannot work is refused before anything is made, with the reason: needs neither root nor iproute2."""

import os
import shutil
import sys
from typing import Any

import pytest

from lightning_multigpu.emulation import EmulatedHosts, HostsUnavailable
from tests.hosts import require_hosts


@pytest.mark.parametrize(
    ("module", "name", "value", "message"),
    [
        (os, "geteuid", lambda: 1000, "need root, this process runs as user 1000"),
        (sys, "platform", "darwin", "Linux only, this is darwin"),
        (shutil, "which", lambda program: None, "install iproute2"),
    ],
)
def test_what_is_missing_is_named(
    module: Any, name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(module, name, value)
    with pytest.raises(HostsUnavailable, match=message), EmulatedHosts(2):
        pass


def test_tests_on_hosts_are_skipped_for_users_and_fail_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CI that lost its root would otherwise stay green without having run them."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="need root"):
        require_hosts()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"CI must run the tests on emulated hosts, but: .* need root"):
        require_hosts()
