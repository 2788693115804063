"""``lightning-multigpu plan``: predicted step time, memory and scaling under every strategy, without training.

It takes the configuration and the options of ``fit``. ``--json PATH`` writes one object. Its keys are stable: a change
of their meaning raises ``schema_version``; new keys do not. Times are in seconds.

With ``--micro-batches``, a view of one pipeline, from measurements in one process, or in the ranks of one tensor group
where layers are split; none of the other devices needs to be idle::

    {
      "schema_version": 2,
      "num_ranks": 2, "tensor_parallel_size": 1, "num_pipelines": 1, "balance": "time", "link_gbit": null,
      "batch_samples": 32,             of the first batch, those of one pipeline
      "one_device_s": 0.4,             the same samples on one device, forward and backward; the median of the rounds
      "waiting": 0.01,                 the share of the measurement in which other processes had the core
      "too_noisy": false,              whether the rounds differ too much to choose
      "plans": [{
          "schedule": "1f1b", "num_micro_batches": 4, "module": "blocks",
          "step_s": 0.25,              forward and backward of the batch
          "bubble": 0.2,               1 - busy / wall, over all ranks
          "relative_throughput": 1.6,  one device's time / step_s; one device takes the whole batch at once, or its
                                       micro-batches one after the other, whichever is faster
          "relative_throughput_range": [1.57, 1.63], "step_s_of_rounds": [0.25, 0.26, 0.24],   rounds of measurements
          "may_be_fastest": true,      no other plan was faster in every round
          "stages": [                  in order; for one micro-batch; with split layers of its tensor group's first rank
            {"rank": 1, "layers": [0, 4], "parameters_bytes": 1024, "forward_s": 0.01, "backward_s": 0.02,
             "transfer_s": 0.0}],
          "memory": [                  of each rank
            {"rank": 1, "parameters_bytes": 1024, "gradients_bytes": 1024, "optimizer_bytes": 2048,
             "activations_bytes": 4096,
             "recomputed_bytes": 0}]   in addition while one layer of activation_checkpointing runs again and backward
        }]
    }

With ``--blocks``, a view of the layers that ``tensor_split`` and ``hybrid`` would split, by the ranks of ``fit``, which
try the split on the first training batch and end::

    {
      "schema_version": 1,
      "num_ranks": 2,
      "blocks": [                      a kind of blocks that are split
        {"shape": "attention", "kind": "blocks.*.attention.(output, qkv)", "num_blocks": 12,
         "whole_bytes": 4096, "rank_bytes": 2080,      parameters of all of them
         "activation_bytes": 1024,                     output of one block, for the first batch
         "traffic": [                                  of one block
           {"direction": "forward", "operation": "all_reduce", "count": 1, "size_bytes": 1024, "sent_bytes": 1024.0}]}],
      "whole": [{"shape": "attention", "names": "...", "num_blocks": 1, "reason": "..."}], "notes": [],
      "one_device": {"parameters_bytes": 8192, "gradients_bytes": 8192, "optimizer_bytes": 16384},
      "ranks": []                      of the first tensor group, or of hybrid's first pipeline; keys as for one device
    }
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lightning_multigpu.commands.early_checks import check_strategy, checked_settings
from lightning_multigpu.commands.option_parser import OptionParser, check_directories, number, strategies_of
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.registry import STRATEGIES
from lightning_multigpu.report.schedule_picture import check_picture

SCHEDULES = {row.name: row.options["schedule"] for row in STRATEGIES if "schedule" in row.options}
"""The schedule of each pipeline's name."""
_SHOWN = ["--strategies", "--link-gbit", "--picture", "--json"]
# The option that asks for a view; the view's module, and the further options that it takes.
_VIEWS = {
    "--blocks": ("split_cli", ["--json"]),
    "--micro-batches": ("planning_cli", _SHOWN),
    "--example": ("example_cli", ["--preset", "--batch", "--nodes", "--devices", *_SHOWN]),
}
_DESCRIPTION = f"""\
Predict step time, memory and scaling under every strategy, without training:

  {PROGRAM} plan --config configs/ring_ddp.yaml --nodes 1 2 4 --devices 2

A machine or a model that is not at hand, by name:

  {PROGRAM} plan --config configs/ring_ddp.yaml --preset a100_100gbit
  {PROGRAM} plan --example gpt3_1.3b --preset h100_400gbit --nodes 1 2 4
  {PROGRAM} plan --example seed

Two views of one strategy:

  {PROGRAM} plan --config configs/gpipe.yaml --strategies gpipe pipeline_1f1b --micro-batches 1 2 4 8
  {PROGRAM} plan --config configs/tensor_split.yaml --blocks

All other options are those of "{PROGRAM} fit". With --micro-batches, one process (with split layers, those of
one tensor group) measures the layers on the first training batch. What is predicted is forward and backward of a batch:
not the optimizer, not the averaging of gradients between pipelines, and not what Lightning and torch's schedules take
themselves. With --blocks, the ranks of fit try the split on the first training batch and end. A layout for GPUs can be
tried on CPUs: --trainer.accelerator=cpu --trainer.devices=8.
"""


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the plan; writes it and its picture where that was asked for.

    Raises:
        UsageError: an option, a configuration file or a setting is wrong, or the module cannot be split.
        ValueError: with ``--blocks``, no layer can be split, or the plan of the configuration does not fit.
    """
    options, rest = _parser(name).parse_known_args(arguments)
    flags = {f"--{option.replace('_', '-')}": value for option, value in vars(options).items()}
    given = [flag for flag, value in flags.items() if value is not None]
    view = next((flag for flag in _VIEWS if flag in given), "")
    module, taken = _VIEWS.get(view, ("scaling_cli", given))
    for wrong in (flag for flag in given if flag not in (view, *taken)):
        raise UsageError(f"{wrong} is no option with {view}, which takes {', '.join(taken)}")
    check_directories(options, "json", "picture", "write")
    try:
        if options.picture is not None:
            check_picture(options.picture, "--picture", own_svg=view == "--micro-batches")
        options.strategies = options.strategies and strategies_of(options.strategies)
        for strategy in options.strategies or ():
            check_strategy(strategy.partition(":")[0])
            if view == "--micro-batches" and strategy not in SCHEDULES:
                raise UsageError(
                    f"--strategies={strategy}: with {view}, pass names of pipelines, which are "
                    f"{', '.join(SCHEDULES)}; their options are those of --trainer.strategy"
                )
    except ValueError as error:
        raise UsageError(str(error)) from error
    checked_settings("fit", rest, also=[flag.removeprefix("--") for flag in flags])
    status: int = import_module(f"lightning_multigpu.commands.plans.{module}").run(rest, options)
    return status


def _parser(name: str) -> OptionParser:
    parser = OptionParser(f"{PROGRAM} {name}", _DESCRIPTION)
    add, whole, above_0 = parser.add_argument, number(int, 1), number(float, 0, above=True)
    add(
        "--strategies", nargs="+", metavar="NAME", help="such as ring_ddp pipeline_1f1b; name:option=value sets options"
    )
    add("--nodes", type=whole, nargs="+", metavar="N", help="numbers of hosts")
    add("--devices", type=whole, nargs="+", metavar="N", help="numbers of ranks on each host")
    add("--machine", type=Path, metavar="PATH", help="the machine.json of calibrate")
    add("--preset", metavar="NAME", help="a machine by name, instead of --machine, such as a100_100gbit")
    add("--example", metavar="NAME", help="a model by name, instead of a configuration, such as "
        "gpt3_1.3b, on a --preset; or seed, the arithmetic of data parallel training")  # fmt: skip
    add("--batch", type=whole, metavar="B", help="samples of a rank's batch of the --example")
    add("--micro-batches", type=whole, nargs="*", metavar="M", help="a pipeline's plan for each of these numbers of "
        "parts of a batch (without numbers: 1 2 4 8 16 and the strategy's own, as far as it has samples); under the "
        "schedules of --strategies, or the strategy's own; model_parallel has M = 1")  # fmt: skip
    add("--blocks", action="store_true", default=None, help="the layers that would be split, each rank's memory, and "
        "what each block sends")  # fmt: skip
    add("--link-gbit", type=above_0, metavar="G", help="bandwidth between neighbouring devices, in Gbit/s")
    add("--picture", type=Path, metavar="PATH", help="draw the plan there: svg, png or pdf")
    add("--write", type=Path, metavar="PATH", help="write the best configuration there")
    add("--json", type=Path, metavar="PATH", help="write the plan there too")
    return parser
