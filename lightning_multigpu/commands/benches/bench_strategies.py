"""``lightning-multigpu bench strategies``: one model's training step under several strategies, in turn.

``--json PATH`` writes one object, as "bench collectives" does, with ::

      "settings": {"model", "parameters", "batch_size", "baseline", "repetitions", "steps", "warm_up", "timeout_s"},
      "results": [                                  "no communication" first
        {
          "strategy": "ring_ddp:bucket_cap_mb=4",   as it was given
          "status": "ok" or "failed", "reason",     text, or null
          "step_ms": {"median", "p25", "p75", "min", "max", "count"} or null,
                                                    on the rank whose median is the longest
          "rank_median_step_ms": [number],          of every rank
          "ratio",                                  median step over that of the baseline for as many samples
          "communication_cost_ms",                  median step less that of "no communication" for as many samples
          "communication_cost_ratio",               over that of the baseline
          "metered": {"total_ms", "hidden_ms", "exposed_ms", "sent_bytes"} or null,
                                                    medians of a step by the strategy's own meter
          "samples_per_s"                           of all ranks together, from their median steps
        }
      ]

A figure that is not known is null; ``parameters`` and ``batch_size`` are 0 then. The baseline is "ddp", or
else the first strategy.

Functions import what needs torch, so that ``--help`` and a refusal do without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
from lightning_multigpu.report.terminal import columns

if TYPE_CHECKING:
    from lightning_multigpu.bench.strategies.models import Subject
    from lightning_multigpu.bench.strategies.strategy_run import StrategyResult

MODELS = {name: f"lightning_multigpu.bench.strategies.models.Bench{name.upper()}" for name in ("mlp", "gpt")}


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the table after all turns, and writes what was asked for; returns 1 where a strategy failed."""
    options = _parser(name).parse(arguments)
    names = strategies_of(options.strategies)
    baseline = "ddp" if "ddp" in names else names[0]
    try:
        place = placement(options.devices, options.num_nodes)
        check_directories(options, "json")
        check_device(options)
        subject = _subject(options)
        from lightning_multigpu.bench.strategies.contenders import NO_COMMUNICATION, Contender, contender

        contenders = [Contender(NO_COMMUNICATION), *map(contender, names)]
    except ValueError as error:
        raise UsageError(str(error)) from error
    from lightning_multigpu.bench.strategies.strategy_rank import StrategyPlan
    from lightning_multigpu.bench.strategies.strategy_run import StrategyRun, take_turns

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
        progress.stop()
        entries = as_json(results, baseline)
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
            "# samples: of all ranks; under async_ps a step is an update of one rank: compare samples, not steps"
        )
        print("\n".join(lines(entries)), flush=True)
        write_json(options.json, head, settings, entries)
    return int(any(result.reason is not None for result in results))


def as_json(results: Sequence[StrategyResult], baseline: str) -> list[dict[str, Any]]:
    """The entries of ``results``; the first result is that without communication.

    Where the steps of two rows have different numbers of samples, as those of a pipeline and of ``ddp``, the time of as
    many samples is compared.
    """
    medians_s = {each.label: each.step_s.median for each in results if each.step_s is not None}
    samples = {each.label: each.samples for each in results}
    silent = results[0].label
    entries = []
    for result in results:
        label, step_s = result.label, medians_s.get(result.label)
        quiet_s, base_s = (  # that the other row takes for as many samples
            medians_s[of] * (samples[label] / samples[of] if samples[label] and samples[of] else 1.0)
            if of in medians_s
            else None
            for of in (silent, baseline)
        )
        cost_s = None if step_s is None or quiet_s is None or label == silent else max(0.0, step_s - quiet_s)
        base_cost_s = 0.0 if base_s is None or quiet_s is None else base_s - quiet_s
        entries.append(
            {
                "strategy": label,
                "status": "ok" if result.reason is None else "failed",
                "reason": result.reason,
                "step_ms": result.step_s and asdict(result.step_s.scaled(1e3)),
                "rank_median_step_ms": [1e3 * value for value in result.rank_medians_s],
                "ratio": step_s and base_s and step_s / base_s,
                "communication_cost_ms": None if cost_s is None else 1e3 * cost_s,
                # There is no ratio to noise.
                "communication_cost_ratio": None if cost_s is None or base_cost_s <= 0 else cost_s / base_cost_s,
                **attributes(result, "metered", "samples_per_s"),
            }
        )
    return entries


def lines(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of the entries; times in ms, sizes in MB."""
    names = ["# strategy", "step", "25 %", "75 %", "ratio", "cost", "ratio", "metered", "hidden", "exposed", "sent"]
    units = ["#", "(ms)", "(ms)", "(ms)", "", "(ms)", "", "(ms)", "(ms)", "(ms)", "(MB)"]
    rows, failures = [[*names, "samples"], [*units, "(1/s)"]], []
    for entry in entries:
        if entry["step_ms"] is None:
            failures.append(f"  {entry['strategy']}  failed: {entry['reason']}")
            continue
        step, metered = entry["step_ms"], entry["metered"] or {}
        figures = [
            *(step["median"], step["p25"], step["p75"]),
            *(entry[key] for key in ("ratio", "communication_cost_ms", "communication_cost_ratio")),
            *(metered.get(key) for key in ("total_ms", "hidden_ms", "exposed_ms")),
            *(metered["sent_bytes"] / 1e6 if metered else None, entry["samples_per_s"]),
        ]
        rows.append([f"  {entry['strategy']}", *("-" if each is None else f"{each:.2f}" for each in figures)])
    return [*columns(rows, "left", "right"), *failures]


def _subject(options: argparse.Namespace) -> Subject:
    """One of the bench's models, or what a configuration file of ``fit`` trains."""
    from lightning.pytorch import LightningDataModule, LightningModule

    from lightning_multigpu.bench.strategies.models import Subject, made

    if options.config is None:
        name = options.model or "mlp"
        model: Any = partial(made, LightningModule, MODELS[name], "--model")
        return Subject(name, model, options.batch_size or model().default_batch_size)
    if options.model is not None or options.batch_size is not None:
        raise UsageError("--config has a model, and data in batches: leave --model and --batch-size out, or it")
    of, settings = f"--config={options.config}:", settings_in(options.config)
    if "model" not in settings:
        raise UsageError(f"{of} it has no 'model'")
    if "optimizer" in settings:
        raise UsageError(f"{of} 'optimizer' is not read here; write the model's configure_optimizers()")
    model = partial(made, LightningModule, settings["model"], f"{of} model")
    data: Any = None
    if settings.get("data") is not None:
        data = partial(made, LightningDataModule, settings["data"], f"{of} data")
        data()
    precision = (settings.get("trainer") or {}).get("precision")
    return Subject(type(model()).__name__, model, data=data, precision=precision)


def _parser(name: str) -> OptionParser:
    parser = OptionParser(
        prog=f"{PROGRAM} {name}",
        description="Train one model under several strategies, some steps of each in turn, and compare the steps.\n"
        "The row 'no communication' is the same step with each rank by itself, all at the same time.",
        epilog="a strategy is a name, a name with options, or a class:\n"
        "  ddp  ring_ddp:bucket_cap_mb=4,static_graph=true  package.MyStrategy:option=1",
    )
    add = parser.add_argument
    add("--strategies", nargs="+", default=["ddp", "ring_ddp"], metavar="NAME", help="default: ddp ring_ddp")
    add("--model", choices=MODELS, help="mlp (default), or gpt: models of 6.3 and 6.5 M parameters")
    add("--config", metavar="PATH", help="model, data and precision of a configuration file of 'fit'")
    add("--batch-size", type=number(int, 1), metavar="N", help="of each rank (default: 64 for mlp, 4 for gpt)")
    add_common_options(parser, timed="steps", timeout_s=120.0)
    add("--steps", type=number(int, 1), default=5, metavar="N", help="timed steps in each turn (default: 5)")
    return parser
