"""``lightning-multigpu plan --example NAME``: a plan of a model that is known by name; it does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TypeVar

from lightning_multigpu._suggest import did_you_mean
from lightning_multigpu.commands.usage import UsageError
from lightning_multigpu.planning.scaling.bandwidth_need import source_arithmetic
from lightning_multigpu.planning.scaling.machine_model import World
from lightning_multigpu.planning.scaling.presets import MACHINES, MODELS, USUAL_UTILISATION, profile_of
from lightning_multigpu.planning.scaling.ranking import Ranking, ranked
from lightning_multigpu.planning.scaling.step_model import Candidate
from lightning_multigpu.registry import STRATEGIES
from lightning_multigpu.report import scaling_table

T = TypeVar("T")


def run(arguments: Sequence[str], wanted: argparse.Namespace) -> int:
    """Prints the source's arithmetic for "seed", and the ranking of the example on ``--preset``.

    Raises:
        UsageError: there are ``arguments`` for fit, there is no such example or machine, or no machine is named.
    """
    if arguments:
        raise UsageError(f"{arguments[0]}: --example={wanted.example} takes no configuration and no options of fit")
    by_name(wanted.example, MODELS, "--example")
    of_ranking = (wanted.batch, wanted.devices, wanted.strategies, wanted.link_gbit, wanted.picture, wanted.json)
    if wanted.preset is None and (wanted.example != "seed" or any(of_ranking)):
        raise UsageError(f"--example={wanted.example}: name a machine by --preset: {', '.join(MACHINES)}")
    if wanted.example == "seed":
        print(*source_arithmetic(wanted.nodes or [2, 4, 8]), sep="\n")
    if wanted.preset is None:
        return 0
    ranking = _ranking(wanted)
    scaling_table.show(ranking, wanted.picture, wanted.json)
    return 0


def _ranking(wanted: argparse.Namespace) -> Ranking:
    model, machine = MODELS[wanted.example], by_name(wanted.preset, MACHINES, "--preset")
    if wanted.link_gbit:
        machine = machine.with_link(wanted.link_gbit)
    usual = [1, 2, 4, 8] if machine.between is not None else [1]
    worlds = [World(n, d) for n in wanted.nodes or usual for d in wanted.devices or [machine.devices]]
    sizes = {size for world in worlds for size in range(2, world.size + 1) if world.size % size == 0}
    profile = profile_of(wanted.example, model, machine, sorted(sizes), samples=wanted.batch or 0)
    activations = "by Korthikanti et al. 2022" if model.layers else "not predicted, as its layers are not known"
    print(f"{wanted.example}: {model.source}; activations {activations}")
    print(f"{machine.name}: computation at {100 * USUAL_UTILISATION:.0f} % of its peak, by assumption")
    if wanted.strategies:
        from lightning_multigpu.commands.plans.scaling_cli import strategy_of  # imports Lightning

        candidates = [Candidate(*strategy_of(strategy)) for strategy in wanted.strategies]
    else:
        candidates = [Candidate(row.name) for row in STRATEGIES if not row.name.endswith("_spawn")]
    return ranked(profile, machine, candidates, worlds)


def by_name(name: str, known: Mapping[str, T], option: str) -> T:
    """The preset of this name.

    Raises:
        UsageError: there is none; the message lists those that exist.
    """
    if name not in known:
        raise UsageError(
            f"{option}={name} is unknown; known are {', '.join(known)}. {did_you_mean(name, known)}".rstrip()
        )
    return known[name]
