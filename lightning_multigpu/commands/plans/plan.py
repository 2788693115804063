"""``lightning-multigpu plan``: predicted step time, memory and scaling under every strategy, without training.

It takes the configuration and the options of ``fit``. ``--json PATH`` writes one object. Its keys are stable: a change
of their meaning raises ``schema_version``; new keys do not. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_multigpu.commands.option_parser import OptionParser, check_directories, names_of, number, strategies_of
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.planning.scaling.presets import MODELS, NODES, seed
from lightning_multigpu.registry import STRATEGIES

_OF_BOTH = ["--devices", "--strategies", "--link-gbit", "--json"]
_OF_EXAMPLES = ["--example", "--nodes", "--preset", "--batch", *_OF_BOTH]
"""The options with --example; seed has the first two."""
_OF_MODULES = ["--nodes", "--machine", "--profile", *_OF_BOTH]
_DESCRIPTION = f"""\
Predict step time, memory and scaling under every strategy, without training:

  {PROGRAM} plan --config configs/ring_ddp.yaml --nodes 1 2 4 --devices 2

A model and a machine of publications, by name:

  {PROGRAM} plan --example gpt3_1.3b --preset h100_400gbit --nodes 1 2 4
  {PROGRAM} plan --example seed

All other options are those of "{PROGRAM} fit". A layout for GPUs can be tried on CPUs: --trainer.accelerator=cpu
--trainer.devices=8.
"""


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the plan, and writes it where that was asked for.

    Raises:
        UsageError: an option, a configuration file or a setting is wrong, or the module cannot be measured.
    """
    options, rest = _parser(name).parse_known_args(arguments)
    example, given = (
        options.example,
        [f"--{option.replace('_', '-')}" for option, value in vars(options).items() if value],
    )
    allowed = _OF_EXAMPLES[: 2 if example == "seed" else None] if example else _OF_MODULES
    if wrong := [flag for flag in given if flag not in allowed]:
        which = f"with --example={example}" if example else "without --example"
        raise UsageError(
            f"{wrong[0]} is no option {which}, which takes {', '.join(f for f in allowed if f != '--example')}"
        )
    if example is not None:
        if rest:
            raise UsageError(f"{rest[0]}: --example={example} takes no configuration and no options of fit")
        if example == "seed":
            print(*seed(options.nodes or [2, 4, 8]), sep="\n")
            return 0
        options.example = names_of("example", [example], ["seed", *MODELS])[0]
        if options.preset is None:
            raise UsageError(f"--example={example}: name a machine by --preset: {', '.join(NODES)}")
        options.preset = names_of("preset", [options.preset], NODES)[0]
    check_directories(options, "json")
    if options.strategies is not None:
        options.strategies = strategies_of(options.strategies)
        names = [each.partition(":")[0] for each in options.strategies]
        names_of("strategies", names, [row.name for row in STRATEGIES])
    from lightning_multigpu.commands.plans import scaling_cli

    return scaling_cli.run(rest, options)


def _parser(name: str) -> OptionParser:
    parser = OptionParser(f"{PROGRAM} {name}", _DESCRIPTION)
    add, whole, above_0 = parser.add_argument, number(int, 1), number(float, 0, above=True)
    add(
        "--strategies", nargs="+", metavar="NAME", help="such as ring_ddp pipeline_1f1b; name:option=value sets options"
    )
    add("--nodes", type=whole, nargs="+", metavar="N", help="numbers of hosts")
    add("--devices", type=whole, nargs="+", metavar="N", help="numbers of ranks on each host")
    add("--machine", type=Path, metavar="PATH", help="the machine.json of calibrate")
    add("--profile", type=Path, metavar="PATH", help="the multigpu_report.json of a ProfilerReport(for_plan=True) on "
        "one device, instead of a measurement")  # fmt: skip
    add("--preset", metavar="NAME", help="the machine of the --example, such as a100_100gbit")
    add("--example", metavar="NAME", help="a model by name, instead of a configuration, such as "
        "gpt3_1.3b, on a --preset; or seed, the arithmetic of data parallel training")  # fmt: skip
    add("--batch", type=whole, metavar="B", help="samples of a rank's batch of the --example")
    add("--link-gbit", type=above_0, metavar="G", help="bandwidth between neighbouring devices, in Gbit/s")
    add("--json", type=Path, metavar="PATH", help="write the plan there too")
    return parser
