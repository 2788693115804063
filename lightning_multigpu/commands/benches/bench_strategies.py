"""``lightning-multigpu bench strategies``: one model's training step under several strategies, in turn.

On several hosts the same command runs on each, with ``--num-nodes``, and MASTER_ADDR and NODE_RANK in the environment.
Only the first process prints.

``--json PATH`` writes one object. Its keys are stable: a change of their meaning raises ``schema_version``; new keys do
not. ::

    {
      "schema_version": 1,
      "date", "command", "machine", "versions", "ranks", "nodes", "ranks_per_node", "threads_per_rank", "device",
      "note":                                                as in "bench collectives"
      "settings": {"model": str, "parameters": int, "batch_size": int, "baseline": str, "repetitions": int,
                   "steps": int, "warm_up": int, "timeout_s": number},
      "results": [                                           "no communication" first
        {
          "strategy": "ring_ddp:bucket_cap_mb=4",            as it was given
          "status": "ok", "failed", "crashed" or "timed out",
          "reason": str or null,                             why, where the status is not "ok"
          "step_ms": {"median", "p25", "p75", "min", "max": number, "count": int} or null,
                                                             on the rank whose median is the longest
          "rank_median_step_ms": [number],                   of every rank
          "ratio": number or null,                           median step over that of the baseline for as many samples
          "communication_cost_ms": number or null,           median step less that of "no communication", as above; not
                                                             less than 0
          "communication_cost_spread_ms": number or null,    half of the distance of the quartiles of both steps
          "communication_cost_ratio": number or null,        over that of the baseline for as many samples
          "metered": {"total_ms", "hidden_ms", "exposed_ms", "sent_bytes": number} or null,
                                                             medians of a step by the strategy's own meter
          "samples_per_s": number or null                    of all ranks together, from their median steps
        }
      ]
    }

``parameters`` and ``batch_size`` are 0 where they are not known: all strategies failed, or the model has a loader of
its own.

Functions import what needs torch, so that ``--help`` and a refusal do without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from lightning_multigpu.bench.jobs.placement import placement
from lightning_multigpu.commands.benches.bench_options import add_common_options, check_device, started, write_json
from lightning_multigpu.commands.option_parser import (
    OptionParser,
    check_directories,
    number,
    settings_in,
    strategies_of,
)
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.report.schema import attributes

if TYPE_CHECKING:
    from lightning_multigpu.bench.strategies.models import Subject

DEFAULT_STRATEGIES = ("ddp", "ring_ddp")
MODEL_NAMES = ("mlp", "gpt")


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the table after all turns, and writes what was asked for; returns 1 where a strategy failed."""
    options = _parser(name).parse(arguments)
    options.strategies = strategies_of(options.strategies)
    try:
        _check_names(options)
        place, baseline = placement(options.devices, options.num_nodes), _baseline(options)
        check_directories(options, "json")
        check_device(options)
        subject = _subject(options)
        from lightning_multigpu.bench.strategies.contenders import NO_COMMUNICATION, Contender, contender

        contenders = [Contender(NO_COMMUNICATION), *map(contender, options.strategies)]
    except ValueError as error:
        raise UsageError(str(error)) from error
    from lightning_multigpu.bench.strategies.strategy_rank import StrategyPlan
    from lightning_multigpu.bench.strategies.strategy_run import StrategyRun, take_turns
    from lightning_multigpu.bench.strategies.strategy_table import StrategiesTable

    plan = StrategyPlan(
        subject=subject,
        device_type=options.device,
        repetitions=options.repetitions,
        steps=options.steps,
        warm_up=options.warm_up,
        timeout_s=options.timeout,
    )
    progress = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
    with started(place, options, [*name.split(), *arguments]) as (hosts, head), progress:
        runs = [StrategyRun(hosts, each, plan) for each in contenders]
        task = progress.add_task("starting", total=(plan.repetitions + 1) * len(runs))
        results = take_turns(runs, lambda label: progress.update(task, description=label, advance=1))
    status = int(any(result.reason is not None for result in results))
    if not hosts.prints:
        return status
    table = StrategiesTable(results, baseline)
    settings = {
        "model": subject.name,
        "parameters": max(result.parameters for result in results),
        "batch_size": subject.batch_size,
        "baseline": baseline,
        **attributes(plan, "repetitions", "steps", "warm_up", "timeout_s"),
    }
    batch = subject.batch_size or "of its own loader"
    print(
        f"# {settings['model']}: {settings['parameters']:,} parameters, batch {batch} a rank; "
        f"{plan.repetitions} x {plan.steps} steps after {plan.warm_up} each; medians on the slowest rank\n"
        f"# ratio: to {baseline}; cost: step less the step without communication; both for as many samples\n"
        "# samples: of all ranks; under async_ps a step is one rank's own, and an update: compare samples, not steps"
    )
    print("\n".join(table.lines()), flush=True)
    write_json(options.json, head, settings, table.as_json())
    return status


def _check_names(options: argparse.Namespace) -> None:
    """Checks what needs no import of the classes."""
    if options.config is not None and (options.model is not None or options.data is not None):
        raise UsageError("--config has a model and its data: leave --model and --data out, or it")
    if options.model is not None and options.model not in MODEL_NAMES and "." not in options.model:
        raise UsageError(
            f"--model={options.model}: pass one of {', '.join(MODEL_NAMES)}, or the class of yours as package.Class"
        )


def _subject(options: argparse.Namespace) -> Subject:
    """What ``--model`` and ``--data`` name, or a configuration file of ``fit``."""
    of = "--"
    settings: Mapping[str, Any] = {"model": options.model or MODEL_NAMES[0], "data": options.data}
    if options.config is not None:
        of, settings = f"--config={options.config}: ", settings_in(options.config)
        if "model" not in settings:
            raise UsageError(f"{of}it has no 'model'")
        if "optimizer" in settings:
            raise UsageError(f"{of}'optimizer' is not read here; write the model's configure_optimizers()")
    from lightning.pytorch import LightningDataModule, LightningModule

    from lightning_multigpu.bench.strategies.models import MODELS, Subject, brings_batch, made

    given = settings["model"]
    model: Any = MODELS.get(str(given)) or partial(made, LightningModule, given, f"{of}model")
    has_data = settings.get("data") is not None
    data = partial(made, LightningDataModule, settings["data"], f"{of}data") if has_data else None
    example = model()
    name = given if options.config is None else type(example).__name__
    batch_size = 0
    if data is not None:
        data()
    elif brings_batch(example):
        batch_size = options.batch_size or int(getattr(example, "default_batch_size", 64))
    elif type(example).train_dataloader is LightningModule.train_dataloader:
        raise UsageError(
            f"{of}model: {type(example).__name__} has neither example_batch(batch_size), which returns the batch of a "
            "rank, nor train_dataloader(); add one of them, or pass data"
        )
    if options.batch_size is not None and not batch_size:
        raise UsageError(f"--batch-size={options.batch_size}: {name} has a loader of its own, which decides that")
    precision = (settings.get("trainer") or {}).get("precision")
    return Subject(name, model, batch_size, data, precision)


def _baseline(options: argparse.Namespace) -> str:
    baseline: str = options.baseline or ("ddp" if "ddp" in options.strategies else options.strategies[0])
    if baseline not in options.strategies:
        raise UsageError(
            f"--baseline={baseline} is not among --strategies {' '.join(options.strategies)}; add it there"
        )
    return baseline


def _parser(name: str) -> OptionParser:
    parser = OptionParser(
        prog=f"{PROGRAM} {name}",
        description="Train one model under several strategies, some steps of each in turn, and compare the steps.\n"
        "The row 'no communication' is the same step with each rank by itself, all at the same time.",
        epilog="a strategy is a name, a name with options, or a class:\n"
        "  ddp  ring_ddp:bucket_cap_mb=4,static_graph=true  package.MyStrategy:option=1",
    )
    add = parser.add_argument
    add("--strategies", nargs="+", default=list(DEFAULT_STRATEGIES), metavar="NAME", help="default: ddp ring_ddp")
    add("--baseline", metavar="NAME", help="the one that the others are set against (default: ddp, or the first)")
    add(
        "--model",
        metavar="NAME",
        help="mlp, gpt, or your own package.Class: a LightningModule with example_batch(batch_size) or "
        "train_dataloader() (default: mlp)",
    )
    add("--data", metavar="CLASS", help="the LightningDataModule of your model, as package.Class")
    add("--config", metavar="PATH", help="model, data and precision of a configuration file of 'fit'")
    add("--batch-size", type=number(int, 1), metavar="N", help="of each rank (default: 64 for mlp, 4 for gpt)")
    add_common_options(parser, timed="steps", timeout_s=120.0)
    add("--steps", type=number(int, 1), default=5, metavar="N", help="timed steps in each turn (default: 5)")
    return parser
