"""The tables of mutants still fit the package and its tests; ``python -m tests.mutants`` runs the mutants."""

from collections import Counter

from tests.mutants import load


def test_every_mutant_still_applies() -> None:
    stale = {mutant.title: problem for mutant in load() if (problem := mutant.problem())}
    assert not stale, "\n".join(f"{title}: {problem}" for title, problem in stale.items())


def test_every_mutant_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(mutant.title for mutant in load()).items() if count > 1] == []
