"""``lightning-multigpu tensor plan``: what ``tensor_split`` and ``hybrid`` would split, memory and communication.

Nothing is trained. It takes the configuration and the options of ``fit`` and starts the same ranks, which try the split
on the first training batch as ``fit`` does, and end. ``--json PATH`` writes one object. Its keys are stable: a change
of their meaning raises ``schema_version``; new keys do not. ::

    {
      "schema_version": 1,
      "num_ranks": 2,
      "blocks": [                     a kind of blocks that are split
        {"shape": "attention", "kind": "blocks.*.attention.(output, qkv)", "num_blocks": 12,
         "whole_bytes": 4096, "rank_bytes": 2080,       parameters of all of them
         "activation_bytes": 1024,                      output of one block, for the first batch
         "traffic": [                                   of one block
           {"direction": "forward", "operation": "all_reduce", "count": 1, "size_bytes": 1024, "sent_bytes": 1024.0}
         ]}
      ],
      "whole": [{"shape": "attention", "names": "...", "num_blocks": 1, "reason": "..."}],
      "notes": [],
      "one_device": {"parameters_bytes": 8192, "gradients_bytes": 8192, "optimizer_bytes": 16384},
      "ranks": [                      of the first tensor group, or of hybrid's first pipeline; keys as for one device
      ]
    }
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lightning_multigpu.commands.early_checks import checked_settings
from lightning_multigpu.commands.option_parser import OptionParser, check_directories
from lightning_multigpu.commands.usage import PROGRAM

_DESCRIPTION = f"""\
Show how tensor_split would split a module, without training:

  {PROGRAM} tensor plan --config configs/tensor_split.yaml

All other options are those of "{PROGRAM} fit". The ranks of fit are started; they try the split on the first training
batch and end. No weight changes, and no log or checkpoint is written. A layout for GPUs can be tried on CPUs:
--trainer.accelerator=cpu --trainer.devices=8.
"""


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the plan, and writes it where that was asked for.

    Raises:
        UsageError: an option, a configuration file or a setting is wrong, or the strategy is no ``tensor_split``.
        ValueError: no layer can be split, or the plan of the configuration does not fit.
        SystemExit: for ``--help``.
    """
    parser = OptionParser(f"{PROGRAM} {name}", _DESCRIPTION)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the plan there too")
    options, rest = parser.parse_known_args(arguments)
    check_directories(options, "json")
    checked_settings("fit", rest, also=["json"])
    import_module("lightning_multigpu.commands.plans.split_cli").SplitCLI(rest, options.json)
    return 0
