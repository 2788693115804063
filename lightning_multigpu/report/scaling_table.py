"""Predictions of strategies as a table, and as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_multigpu.planning.numbers import number, size
from lightning_multigpu.planning.scaling.machine import QUIET
from lightning_multigpu.planning.scaling.ranking import Ranking
from lightning_multigpu.planning.scaling.step_model import Prediction
from lightning_multigpu.report.schema import as_json, attributes
from lightning_multigpu.report.terminal import narrow, say

SCHEMA_VERSION = 1
_LIMITS = {"exposed communication": "comm.", "computation": "comp."}


def show(ranking: Ranking, json_path: Path | None) -> None:
    """Prints a ranking to standard output, and writes its JSON where there is a path."""
    print_ranking(Console(file=sys.stdout), ranking)
    if json_path is not None:
        json_path.write_text(json.dumps(document(ranking), indent=2) + "\n")
        print(f"Plans as JSON: {json_path}")


def print_ranking(console: Console, ranking: Ranking) -> None:
    """Prints how disturbed it is, the model, the table, what is impossible, and the explanation."""
    model, one = ranking.model, ranking.one
    say(console, *_disturbances(ranking))
    batches = f", accumulate_grad_batches={one.candidate.accumulate}" if one.candidate.accumulate > 1 else ""
    say(
        console,
        f"{model.name}: {model.parameters:,} parameters, {model.samples} samples a batch and rank{batches}; "
        f"on one device {number(1e3 * one.step_s)} ms a step, {number(one.samples_per_s)} samples/s",
    )
    table = narrow()  # all columns fit on 80 characters
    table.add_column("strategy", overflow="fold", min_width=20)
    for title in ("nodes\nranks", "step\nms", "x one", "eff.", "comm.", "bubble", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for each in [*ranking.predictions, *ranking.too_large]:
        table.add_row(*_row(each, one, fits=each not in ranking.too_large))
    console.print(table)
    reasons: dict[str, list[str]] = {}
    for candidate, _, reason in ranking.impossible:
        reasons.setdefault(reason, []).append(str(candidate))
    say(console, *(f"not {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()))
    if ranking.predictions:
        first = ranking.first
        sent = ", ".join(f"{size(bytes_)} over the {link}" for link, bytes_ in first.sent_bytes.items())
        memory = f"{first.memory.kinds}, activations {size(first.activations_bytes)}"
        say(console, f"{first.candidate}: {memory}; sends {sent} a step")
    say(console, "", *ranking.explanation())


def _disturbances(ranking: Ranking) -> list[str]:
    """How much other processes took while the model and the machine were measured."""
    worlds = dict.fromkeys(str(each.world) for each in ranking.predictions)
    shares = {f"the calibration of {world}": ranking.machine.disturbed.get(world, 0.0) for world in worlds}
    shares["the measurement of the model"] = ranking.model.disturbed
    busy = [f"{100 * share:.0f} % of the processors during {what}" for what, share in shares.items() if share > QUIET]
    lines = [f"warning: other processes took {each}" for each in busy]
    return [*lines, "Times below may be wrong: repeat this on a quiet machine."] if lines else []


def _row(each: Prediction, one: Prediction, *, fits: bool) -> list[str]:
    def share(seconds: float) -> str:
        return f"{100 * seconds / each.step_s:.0f} %"

    candidate = each.candidate
    options = [f" {option}={value}" for option, value in candidate.options.items()]
    return [
        "\n".join([candidate.strategy, *options]),
        str(each.world),
        number(1e3 * each.step_s),
        f"{each.samples_per_s / one.samples_per_s:.2f}",
        f"{100 * each.efficiency(one):.0f} %",
        share(each.exposed_s),
        share(each.bubble_s),
        size(each.memory_bytes),
        _LIMITS.get(each.limit, each.limit) if fits else "memory",
    ]


def document(ranking: Ranking) -> dict[str, Any]:
    """The object of ``plan --json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": attributes(ranking.model, "name", "parameters", "samples"),
        "machine": ranking.machine.name,
        "one_device": _prediction(ranking.one),
        "predictions": [_prediction(each) for each in ranking.predictions],
        "too_large": [_prediction(each) for each in ranking.too_large],
        "impossible": [{"strategy": str(c), "world": world, "reason": why} for c, world, why in ranking.impossible],
        "remedies": [{"change": each.change, **_prediction(each.prediction)} for each in ranking.remedies],
        "explanation": ranking.explanation(),
    }


def _prediction(each: Prediction) -> dict[str, Any]:
    return {
        "strategy": each.candidate.strategy,
        "options": each.candidate.options,
        "accumulate_grad_batches": each.candidate.accumulate,
        **attributes(each, "world", "step_s", "interval_s", "parts_s", "hidden_s", "samples_per_s"),
        "memory": {**as_json(each.memory), "activations_bytes": each.activations_bytes},
        **attributes(each, "sent_bytes", "limit"),
    }
