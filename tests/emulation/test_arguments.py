"""What cannot work is refused before anything is made, with the reason: needs neither root nor iproute2."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from lightning_multigpu.emulation import EmulatedHosts, HostsUnavailable
from tests.hosts import require_hosts


def test_a_user_without_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostsUnavailable, match="need root, this process runs as user 1000"), EmulatedHosts(2):
        pass


def test_another_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(HostsUnavailable, match="Linux only, this is darwin"), EmulatedHosts(2):
        pass


def test_missing_programs_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(HostsUnavailable, match="install iproute2"), EmulatedHosts(2):
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
