"""``lightning-multigpu bench strategies``: one model's training step under several strategies, in turn.

On several hosts the same command runs on each, with ``--num-nodes``, and MASTER_ADDR and NODE_RANK in the environment.
Only the first process prints.

``--json PATH`` writes one object. Its keys are stable: a change of their meaning raises ``schema_version``; new keys do
not. ::

    {
      "schema_version": 1,
      "date", "command", "machine", "versions", "ranks", "nodes", "ranks_per_node", "threads_per_rank", "device":
                                                             as in "bench collectives"
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
          "ratio": number or null,                           median step over that of the baseline
          "communication_cost_ms": number or null,           median step less that of "no communication"
          "communication_cost_ratio": number or null,        over that of the baseline
          "metered": {"total_ms", "hidden_ms", "exposed_ms", "sent_bytes": number} or null
                                                             medians of a step by the strategy's own meter
        }
      ]
    }

``parameters`` and ``batch_size`` are 0 where they are not known: all strategies failed, or the model has a loader of
its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule

from lightning_multigpu.bench.jobs.placement import placement
from lightning_multigpu.bench.strategies.contenders import contenders
from lightning_multigpu.bench.strategies.models import MODELS, brings_batch, check_model
from lightning_multigpu.bench.strategies.strategy_run import Plan, measure
from lightning_multigpu.bench.strategies.strategy_table import SCHEMA_VERSION, StrategiesTable
from lightning_multigpu.commands.bench_options import add_common_options, check_directory, started, write_json
from lightning_multigpu.commands.classes import ClassNotFoundError, find_class
from lightning_multigpu.commands.option_parser import OptionParser, number
from lightning_multigpu.commands.usage import PROGRAM, UsageError

DEFAULT_STRATEGIES = ("ddp", "ring_ddp")


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the table when all turns are taken, and writes what was asked for.

    Returns:
        0; 1 where a strategy failed.

    Raises:
        UsageError: an option is wrong; no process has been started.
        SystemExit: for ``--help``.
    """
    options = _parser(name).parse(arguments)
    try:
        place = placement(options.devices, options.num_nodes)
        plan, baseline = _plan(options), _baseline(options)
        _check(options, place.devices)
    except ValueError as error:
        raise UsageError(str(error)) from error
    with started(place, options, [*name.split(), *arguments]) as running:
        if running is None:
            return 0
        hosts, head = running
        results = measure(hosts, plan)
    table = StrategiesTable(results, baseline)
    settings = {
        "model": options.model,
        "parameters": max(result.parameters for result in results),
        "batch_size": plan.batch_size,
        "baseline": baseline,
        "repetitions": plan.repetitions,
        "steps": plan.steps,
        "warm_up": plan.warm_up,
        "timeout_s": plan.timeout_s,
    }
    batch = plan.batch_size or "of its own loader"
    print(
        f"# {settings['model']}: {settings['parameters']:,} parameters, batch {batch} a rank; "
        f"{plan.repetitions} x {plan.steps} steps after {plan.warm_up} each; medians on the slowest rank\n"
        f"# ratio: to {baseline}; communication cost: step less the step without communication"
    )
    print("\n".join(table.lines()), flush=True)
    document = {"schema_version": SCHEMA_VERSION, **head, "settings": settings, "results": table.as_json()}
    write_json(options.json, document)
    return int(any(result.reason is not None for result in results))


def _plan(options: argparse.Namespace) -> Plan:
    model = _model(options.model)
    return Plan(
        contenders=contenders(options.strategies),
        model=model,
        batch_size=_batch_size(options.batch_size, model),
        device_type=options.device,
        repetitions=options.repetitions,
        steps=options.steps,
        warm_up=options.warm_up,
        timeout_s=options.timeout,
    )


def _batch_size(given: int | None, model: type[LightningModule]) -> int:
    if not brings_batch(model):
        if given is not None:
            raise UsageError(f"--batch-size={given}: {model.__name__} has a loader of its own, which decides that")
        return 0
    return given or int(getattr(model, "default_batch_size", 64))


def _model(name: str) -> type[LightningModule]:
    if name in MODELS:
        return MODELS[name]
    if "." not in name:
        raise UsageError(f"--model={name}: pass one of {', '.join(MODELS)}, or the class of yours as package.Class")
    try:
        cls = find_class(name)
    except ClassNotFoundError as error:
        raise UsageError(f"--model={name}: {error}") from error
    if cls is None:
        raise UsageError(f"--model={name} is no class")
    check_model(cls)
    return cls


def _baseline(options: argparse.Namespace) -> str:
    baseline: str = options.baseline or ("ddp" if "ddp" in options.strategies else options.strategies[0])
    if baseline not in options.strategies:
        raise UsageError(
            f"--baseline={baseline} is not among --strategies {' '.join(options.strategies)}; add it there"
        )
    return baseline


def _check(options: argparse.Namespace, devices: int) -> None:
    if options.device == "cuda" and torch.cuda.device_count() < devices:
        raise UsageError(
            f"--device=cuda --devices={devices}: this machine has {torch.cuda.device_count()} GPU(s); pass as many, or "
            "--device=cpu"
        )
    check_directory("json", options.json)


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
        default="mlp",
        metavar="NAME",
        help="mlp, gpt, or your own package.Class: a LightningModule with example_batch(batch_size) or "
        "train_dataloader() (default: mlp)",
    )
    add("--batch-size", type=number(int, 1), metavar="N", help="of each rank (default: 64 for mlp, 4 for gpt)")
    add_common_options(parser, timed="steps", timeout_s=120.0)
    add("--steps", type=number(int, 1), default=5, metavar="N", help="timed steps in each turn (default: 5)")
    return parser
