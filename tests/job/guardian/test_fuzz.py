"""A few hundred bad messages to every target of benchmarks.guardian_fuzz, which sends 100,000 to each."""

import pytest

from benchmarks.guardian_fuzz import TARGETS

pytestmark = pytest.mark.launch


@pytest.mark.parametrize("target", TARGETS)
def test_bad_messages_do_no_harm(target: str) -> None:
    assert TARGETS[target](300, seed=1).problem == ""
