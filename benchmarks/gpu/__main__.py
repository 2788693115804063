"""Runs every check on the GPUs of this machine: ``python -m benchmarks.gpu``, or ``make gpu``.

One line a check (held, failed, not possible here), the table, and figures; all of it is written to
``benchmarks/results/gpu_<card>.txt`` too. Ranks have a GPU each where there are enough, and share one where there are
not: over NCCL from version 2.31 on, else over Gloo. Exit status 1 if a check has failed. ``--device cpu`` runs the same
checks on CPUs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu import benches, failures, measures, sharing, training
from benchmarks.gpu.card import Card
from benchmarks.gpu.figures import figures
from benchmarks.gpu.table import Check, run_table, summary
from benchmarks.heading import heading
from tests import preforked

_RESULTS = Path(__file__).resolve().parents[1] / "results"
_FIGURES_S = 90.0  # what all figures together take
_PACKAGES = ("lightning", "torchmetrics", "fairscale", "transformers", "jsonargparse", "nvidia-ml-py")


def all_checks() -> list[Check]:
    """Every check, strategy by strategy."""
    found = [*training.checks(), *measures.checks(), *failures.checks(), *benches.checks()]
    rows = list(dict.fromkeys(check.row for check in found))
    return sorted(found, key=lambda check: rows.index(check.row))


def _by_importance(checks: Sequence[Check]) -> list[Check]:
    """The order in which checks run: first whether a name trains at all, then what only a GPU can show."""
    first = {check.row: check for check in reversed(checks)}  # the first check of each row
    only_here = {check.name for check in (*measures.checks(), *failures.checks(), *benches.checks())}

    def rank(check: Check) -> int:
        return 0 if first[check.row] == check else 1 if check.name in only_here else 2

    columns = list(dict.fromkeys(check.column for check in checks))
    return sorted(checks, key=lambda check: (rank(check), columns.index(check.column)))


class _Output:
    """Prints lines, and keeps them for the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []

    def say(self, text: str = "") -> None:
        print(text, flush=True)
        self.lines.append(text)
        self.path.write_text("\n".join(self.lines) + "\n")  # each time: a run that is cut off has left its results


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    card = Card.found(options.device)
    every, timed = all_checks(), figures(card) if options.figures else []
    checks, timed = _chosen(every, options.only), _chosen(timed, options.only)
    if not checks and not timed:
        rows = dict.fromkeys(check.row for check in [*every, *figures(card)])
        print(f"--only={options.only}: no such row or column; the rows are {', '.join(rows)}", file=sys.stderr)
        return 2
    output = _Output(options.results or _RESULTS / f"gpu_{_name_of(card)}.txt")
    started_s = time.monotonic()
    output.say("# python -m benchmarks.gpu" + "".join(f" {word}" for word in arguments or sys.argv[1:]))
    output.say(heading())
    if not preforked.works():
        os.environ[preforked.PLAIN] = "1"
        output.say("# processes are new interpreters: this kernel refuses what forked ones need")
    try:
        card, refusal = sharing.tried(card)
        if refusal:
            output.say(f"# NCCL does not let ranks share a GPU here, so that they use Gloo: {refusal}")
        output.say(f"# {card}, {_driver()}, {', '.join(_versions())}")
        os.environ.update(card.variables)
        lanes = options.lanes or _lanes(card)
        limit_s = options.limit - (_FIGURES_S if timed else 0.0)
        results = run_table(_by_importance(checks), card, lanes=lanes, limit_s=limit_s, say=output.say)
        limit_s = options.limit - (time.monotonic() - started_s)
        # Alone: a neighbour would take time from them.
        results += run_table(timed, card, lanes=1, limit_s=limit_s, say=output.say)
    finally:
        preforked.close()
    output.say(f"\n{summary(results, [*checks, *timed])}")
    output.say(f"{time.monotonic() - started_s:.0f} s in all")
    return 1 if any(result.verdict == "failed" for result in results) else 0


def _lanes(card: Card) -> int:
    """Checks at a time; fewer over NCCL, whose kernels spin: ranks that share a card wait for its time."""
    most = 2 if card.is_gpu and card.backend == "nccl" else 4
    return max(1, min(most, (os.cpu_count() or 1) // 4))


def _chosen(checks: Sequence[Check], name: str | None) -> list[Check]:
    """Those of one row or column, or all of them."""
    return [check for check in checks if name is None or name in (check.row, check.column)]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs where there are any")
    parser.add_argument("--only", metavar="NAME", help="one row (a strategy) or one column of the table")
    parser.add_argument(
        "--figures", action=argparse.BooleanOptionalAction, default=True, help="measure the figures after the checks"
    )
    parser.add_argument("--lanes", type=int, metavar="N", help="checks at a time (default: one for 4 cores, 4 at most)")
    parser.add_argument(
        "--limit",
        type=float,
        default=float("inf"),
        metavar="S",
        help=f"seconds after which no figure begins, and {_FIGURES_S:.0f} s before that no check",
    )
    parser.add_argument("--results", type=Path, metavar="PATH", help="the file of the results")
    return parser.parse_args(arguments)


def _name_of(card: Card) -> str:
    name = torch.cuda.get_device_name() if card.is_gpu else "cpu"
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _driver() -> str:
    try:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        return f"driver {pynvml.nvmlSystemGetDriverVersion()}, CUDA {torch.version.cuda}"
    except Exception:  # no package, no library or no GPU
        return f"no driver, CUDA {torch.version.cuda}"


def _versions() -> list[str]:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return [*found, platform.platform()]


if __name__ == "__main__":
    sys.exit(main())
