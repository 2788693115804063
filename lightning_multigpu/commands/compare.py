"""``lightning-multigpu compare``: one configuration under several strategies, profiled one after the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_multigpu.commands.early_checks import checked_settings
from lightning_multigpu.commands.option_parser import OptionParser, strategies_of
from lightning_multigpu.commands.usage import COMMAND, PROGRAM, UsageError
from lightning_multigpu.report.profile import profile_document, profile_text

_CALLBACK = "lightning_multigpu.callbacks.ProfilerReport"


def run(name: str, arguments: Sequence[str]) -> int:
    """Trains under each strategy, and compares the profiles; returns 1 if a run has failed."""
    parser = OptionParser(
        f"{PROGRAM} {name}",
        "Train one configuration under several strategies, one after the other, and compare where the time of a step "
        f"goes. Options that are not listed here go to {PROGRAM} fit, --trainer.max_steps=30 for example.",
    )
    parser.add_argument("--config", type=Path, required=True, help="a configuration of fit")
    parser.add_argument("--strategies", required=True, nargs="+", metavar="NAME", help="such as ring_ddp cpu_ps")
    parser.add_argument("--folder", type=Path, default=Path("runs/compared"), help="for the runs; default: %(default)s")
    options, further = parser.parse_known_args(list(arguments))
    strategies = strategies_of(options.strategies)
    if not options.config.is_file():
        raise UsageError(f"--config={options.config}: there is no such file")
    commands = {s: [f"--config={options.config}", *further, f"--trainer.strategy={s}"] for s in strategies}
    for command in commands.values():
        checked_settings("fit", command)  # nothing is trained where a later run has a wrong name
    folders = {strategy: options.folder / strategy for strategy in strategies}
    failed = []
    for strategy, folder in folders.items():
        print(f"{strategy}:", flush=True)
        (folder / profile_document.FILE_NAME).unlink(missing_ok=True)
        own = ["--trainer.logger=false", f"--trainer.default_root_dir={folder}", f"--trainer.callbacks+={_CALLBACK}"]
        command = [*COMMAND, "fit", *commands[strategy], *own]
        status = subprocess.run(command, check=False).returncode
        if status or not (folder / profile_document.FILE_NAME).is_file():
            failed.append(strategy)
            print(f"{strategy} has no profile: fit ended with status {status}", file=sys.stderr)
    profiles = {s: profile_document.read(f / profile_document.FILE_NAME) for s, f in folders.items() if s not in failed}
    if profiles:
        print(profile_text.comparison(profiles))
    return 1 if failed else 0
