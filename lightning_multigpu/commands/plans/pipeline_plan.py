"""``lightning-multigpu pipeline plan``: split, predicted step time, memory and picture of a pipeline, without training.

It takes the configuration and the options of ``fit``, runs in one process on one device, and needs none of the other
devices to be idle. Where layers are split, it starts the ranks of one tensor group. ``--json PATH`` writes one object.
Its keys are stable: a change of their meaning raises ``schema_version``; new keys do not. Times are in seconds. ::

    {
      "schema_version": 2,
      "num_ranks": 2, "tensor_parallel_size": 1, "num_pipelines": 1, "balance": "time", "link_gbit": null,
      "batch_samples": 32,             of the first batch, those of one pipeline
      "one_device_s": 0.4,             the same samples on one device, forward and backward; the median of the rounds
      "waiting": 0.01,                 the share of the measurement in which other processes had the core
      "too_noisy": false,              whether the rounds differ too much to choose
      "plans": [
        {
          "schedule": "1f1b", "num_micro_batches": 4, "module": "blocks",
          "step_s": 0.25,              forward and backward of the batch
          "bubble": 0.2,               1 - busy / wall, over all ranks
          "relative_throughput": 1.6,  one device's time / step_s, one device takes the whole batch
                                       at once, or its micro-batches one after the other, whichever is faster
          "relative_throughput_range": [1.57, 1.63],   over the rounds of measurements
          "step_s_of_rounds": [0.25, 0.25, 0.26, 0.25, 0.24],
          "may_be_fastest": true,      no other plan was faster in every round
          "stages": [                  in order; for one micro-batch
            {"rank": 1, "layers": [0, 4], "parameters_bytes": 1024,    with split layers: of its tensor group's first
             "forward_s": 0.01, "backward_s": 0.02, "transfer_s": 0.0}
          ],
          "memory": [                  of each rank
            {"rank": 1, "parameters_bytes": 1024, "gradients_bytes": 1024,
             "optimizer_bytes": 2048, "activations_bytes": 4096,
             "recomputed_bytes": 0}  in addition while one layer of activation_checkpointing runs again and backward
          ]
        }
      ]
    }
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from lightning_multigpu.commands.early_checks import checked_settings
from lightning_multigpu.commands.option_parser import OptionParser, check_directories, names_of, number
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.planning.pipelines.pipeline_prediction import PipelinePlans
from lightning_multigpu.planning.pipelines.schedule_order import SCHEDULES
from lightning_multigpu.report.prediction_table import as_json, picture, print_plans
from lightning_multigpu.report.schedule_picture import check_picture

SCHEMA_VERSION = 2
_DESCRIPTION = f"""\
Predict what a pipeline takes, without training:

  {PROGRAM} pipeline plan --config configs/gpipe.yaml --num-micro-batches 1 2 4 8

All other options are those of "{PROGRAM} fit". One process takes the first training batch, measures the
layers on one device (the first of the Trainer's) in several rounds, and trains nothing. With tensor_parallel_size=2,
two processes split the layers as fit does, and measure them together on two devices. What is predicted is forward
and backward of a batch: not the optimizer, not the averaging of gradients between pipelines, and not what Lightning and
torch's schedules take themselves.
"""


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the plans; writes them and the picture where that was asked for.

    Raises:
        UsageError: an option, a configuration file or a setting is wrong, or the module cannot be split.
        SystemExit: for ``--help``.
    """
    options, rest = _parser(name).parse_known_args(arguments)
    if options.schedules is not None:
        options.schedules = names_of("schedules", options.schedules, SCHEDULES)
    check_directories(options, "json", "picture")
    if options.picture is not None:
        try:
            check_picture(options.picture, "--picture")
        except ValueError as error:
            raise UsageError(str(error)) from error
    checked_settings("fit", rest, also=[option.replace("_", "-") for option in vars(options)])
    plans: PipelinePlans | None = import_module("lightning_multigpu.commands.plans.planning_cli").planned(rest, options)
    if plans is None:  # another rank of a tensor group, whose first one prints
        return 0
    print_plans(Console(file=sys.stdout), plans, options.link_gbit)
    if options.json is not None:
        document = {"schema_version": SCHEMA_VERSION, **as_json(plans, options.link_gbit)}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
        print(f"Plans as JSON: {options.json}")
    if options.picture is not None:
        options.picture.write_bytes(picture(plans, options.picture.suffix))
        print(f"Picture: {options.picture}")
    return 0


def _parser(name: str) -> OptionParser:
    parser = OptionParser(f"{PROGRAM} {name}", _DESCRIPTION)
    add = parser.add_argument
    add(
        "--num-micro-batches",
        type=number(int, 1),
        nargs="+",
        metavar="M",
        help="into how many parts a batch is cut (1 2 4 8 16 and the strategy's own, as far as it has samples)",
    )
    add("--schedules", nargs="+", metavar="NAME", help=f"some of {', '.join(SCHEDULES)} (the strategy's own)")
    add(
        "--link-gbit",
        type=number(float, 0, above=True),
        metavar="G",
        help="bandwidth between neighbouring devices, in Gbit/s (messages take no time)",
    )
    add("--picture", type=Path, metavar="PATH", help="draw the predicted schedules there: svg, png or pdf")
    add("--json", type=Path, metavar="PATH", help="write the plans there too")
    return parser
