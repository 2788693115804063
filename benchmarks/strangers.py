"""Which modules train as on one device, which are refused, and why: the table behind the page "Does my model run?".

    python -m benchmarks.strangers [--only NAME ...] [--strategies NAME ...]
        [--page benchmarks/results/strange_modules.md]

Each module of :mod:`benchmarks.strange_modules` is trained for six batches of four samples in 64-true precision, by
SGD: on one device, then by two ranks of this host (under dp: two replicas in one process) under each strategy, on the
same global batches. The weights are compared afterwards. A strategy that refuses a module is tried once more with the
option that its message names and the module is known to train with.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import platform
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from benchmarks.strange_modules import NUM_SAMPLES, STRANGERS, Stranger
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.registry import STRATEGIES

NUM_RANKS = 2
BATCH_SIZE = 4
EQUAL, EQUAL_IN_FLOAT32 = 1e-9, 1e-5
_TIMEOUT_S = 120.0
_MARK = "<!-- written by benchmarks.strangers -->"
_REFUSALS = (ValueError, MisconfigurationException, PipelineError)
_WORDS = {"equal": "equal", "float32": "equal (rounding)", "random": "trains", "documented": "trains"}


@dataclass(frozen=True)
class Verdict:
    """How a module fared under a strategy.

    Attributes:
        kind: "equal"; "float32", equal but for rounding, where a part computes in float32 or a gradient is nearly 0;
            "random", it trains but cannot be compared; "differs"; "documented", differs for a known reason; "refused";
            "fails".
        reason: of a refusal or failure, in one line; the largest relative difference of a weight.
        options: that the strategy was given.
    """

    kind: str
    reason: str = ""
    options: Mapping[str, Any] | None = None

    @property
    def is_wrong(self) -> bool:
        """Neither right nor refused."""
        return self.kind in ("differs", "fails")


class _Samples(Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return tree_map(lambda tensor: tensor[index], self._data)


class _Batches(L.LightningDataModule):
    """The same global batches under every strategy, dealt out to the ranks that load different ones."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self._data = data

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        share: dict[str, int] = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        count, first = share.get("num_replicas", 1), share.get("rank", 0)
        starts = range(0, NUM_SAMPLES, BATCH_SIZE)
        order = [index for start in starts for index in range(start + first, start + BATCH_SIZE, count)]
        return DataLoader(_Samples(self._data), batch_size=BATCH_SIZE // count, sampler=order)


def train(stranger: Stranger, strategy: Any, num_devices: int) -> dict[str, Tensor]:
    """The weights after training; only those of rank 0 are whole."""
    torch.manual_seed(0)
    module = stranger.make()
    module.train()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=num_devices,
            strategy=strategy,
            precision="64-true",
            max_epochs=1,
            use_distributed_sampler=False,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, _Batches(stranger.data()))
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _rank(
    connection: Connection,
    stranger: Stranger,
    strategy: str,
    options: Mapping[str, Any],
    num_devices: int,
    seat: dict[str, str],
) -> None:
    """One process: trains, and sends either the weights or how it ended."""
    os.environ.update(seat)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    try:
        weights = train(stranger, _strategy(strategy, options), num_devices)
        answer: Any = {name: tensor.numpy() for name, tensor in weights.items()}
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        answer = isinstance(error, _REFUSALS), f"{type(error).__name__}: {error}", trace
    connection.send(answer)
    connection.close()
    os._exit(0)


def _strategy(name: str, options: Mapping[str, Any]) -> Any:
    if not options:
        return name
    row = next(row for row in STRATEGIES if row.name == name)
    return row.strategy(**{**row.options, **options})


def outcome(stranger: Stranger, strategy: str, options: Mapping[str, Any]) -> Any:
    """The weights of rank 0 by name, or of the rank that failed (whether it refused, reason, traceback)."""
    row = next((row for row in STRATEGIES if row.name == strategy), None)
    num_processes = NUM_RANKS if row is not None and row.strategy.starts_ranks else 1
    num_devices = 1 if row is None else NUM_RANKS
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    connections: list[Connection] = []
    processes = []
    for rank in range(num_processes):
        seat = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(NUM_RANKS),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
        }
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(there, stranger, strategy, options, num_devices, seat if num_processes > 1 else {})
        )
        process.start()
        there.close()
        connections.append(here)
        processes.append(process)
    answers: list[Any] = []
    end = time.monotonic() + _TIMEOUT_S
    for connection in connections:
        try:
            answers.append(connection.recv() if wait([connection], max(0.0, end - time.monotonic())) else None)
        except EOFError:
            answers.append((False, "a rank ended without a word", ""))
    for process in processes:
        process.join(max(0.0, min(10.0, end - time.monotonic())))
        if process.is_alive():
            process.kill()
            process.join()
    failures = [answer for answer in answers if not isinstance(answer, dict)]
    if None in failures:
        return False, f"a rank did not end within {_TIMEOUT_S:g} s", ""
    if failures:
        return next((failure for failure in failures if "RankFailed" not in failure[1]), failures[0])
    return answers[0]


def verdict(stranger: Stranger, strategy: str, expected: dict[str, Any], options: Mapping[str, Any]) -> Verdict:
    """Trains once and compares."""
    found = outcome(stranger, strategy, options)
    if not isinstance(found, dict):
        refused, reason, trace = found
        if not refused and trace:
            print(f"--- {stranger.name}, {strategy} {dict(options)}\n{trace}", file=sys.stderr, flush=True)
        return Verdict("refused" if refused else "fails", reason, options)
    worst, name = max(((_difference(found[name], value), name) for name, value in expected.items()), default=(0.0, ""))
    if stranger.random:
        return Verdict("random", options=options)
    if worst > EQUAL_IN_FLOAT32 and stranger.known_difference:
        return Verdict("documented", stranger.known_difference, options)
    kind = "equal" if worst <= EQUAL else "float32" if worst <= EQUAL_IN_FLOAT32 else "differs"
    return Verdict(kind, f"{worst:.1e} in {name}", options)


def _second_attempt(stranger: Stranger, strategy: str, first: Verdict) -> dict[str, Any]:
    """Options for a strategy that has refused the module; empty where there are none."""
    if "find_unused_parameters" in first.reason and strategy in ("ring_ddp", "ddp_sharded"):
        return {"find_unused_parameters": True}
    row = next(row for row in STRATEGIES if row.name == strategy)
    if first.kind != "refused" or "schedule" not in row.options or not stranger.split_points:
        return {}
    looped = row.options["schedule"] in ("interleaved", "zero_bubble")
    points = stranger.split_points
    return {"split_points": list(points) if looped else [points[len(points) // 2]]}


def _difference(found: Any, expected: Any) -> float:
    """The largest difference of two arrays relative to the largest value."""
    a, b = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def row(stranger: Stranger, strategies: Sequence[str]) -> dict[str, Verdict]:
    """A module under every strategy."""
    expected = outcome(stranger, "auto", {})
    if not isinstance(expected, dict):
        raise RuntimeError(f"{stranger.name} does not train on one device: {expected[1]}\n{expected[2]}")
    found = {}
    for strategy in strategies:
        found[strategy] = verdict(stranger, strategy, expected, {})
        options = _second_attempt(stranger, strategy, found[strategy])
        if options:
            again = verdict(stranger, strategy, expected, options)
            if again.kind not in ("refused", "fails"):
                found[strategy] = again
        told = found[strategy]
        given = f" with {dict(told.options)}" if told.options else ""
        print(f"{stranger.name:32}{strategy:24}{told.kind:12}{told.reason[:300]}{given}", flush=True)
    return found


def markdown(rows: Mapping[str, Mapping[str, Verdict]], strategies: Sequence[str]) -> str:
    """The table of the documentation, with the reasons as notes below it."""
    notes: dict[str, int] = {}
    lines = ["| module | " + " | ".join(f"`{name}`" for name in strategies) + " |"]
    lines.append("|---" * (len(strategies) + 1) + "|")
    for name, verdicts in rows.items():
        cells = []
        for strategy in strategies:
            told = verdicts[strategy]
            text = _WORDS.get(told.kind, told.kind)
            if told.kind not in ("equal", "float32", "random"):
                reason = told.reason.split(": ", 1)[-1] if told.kind == "refused" else told.reason
                text += f" [{notes.setdefault(reason.splitlines()[0], len(notes) + 1)}]"
            if told.options:
                given = ", ".join(
                    key if key == "split_points" else f"{key}={told.options[key]!r}" for key in told.options
                )
                text += f" with `{given}`"
            cells.append(text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in notes.items())]) + "\n"


def main() -> None:
    names = [row.name for row in STRATEGIES if not row.name.endswith("_spawn")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of modules")
    parser.add_argument("--strategies", nargs="+", default=names, choices=names)
    parser.add_argument("--page", type=Path, help="the page whose table is written anew")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    versions = (
        f"{time.strftime('%Y-%m-%d')}, {NUM_RANKS} ranks on CPUs, Python {platform.python_version()}, torch "
        f"{torch.__version__}, lightning {L.__version__}, transformers {transformers.__version__}:"
    )
    print(versions, flush=True)
    chosen = [stranger for stranger in STRANGERS if any(part in stranger.name for part in given.only)]
    rows = {stranger.name: row(stranger, given.strategies) for stranger in chosen}
    counts = collections.Counter(told.kind for verdicts in rows.values() for told in verdicts.values())
    print(f"{len(rows)} modules: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    if given.page:
        before, mark, _ = given.page.read_text().partition(_MARK)
        given.page.write_text(f"{before}{mark}\n\n{versions}\n\n{markdown(rows, given.strategies)}")
    sys.exit(any(told.is_wrong for verdicts in rows.values() for told in verdicts.values()))


if __name__ == "__main__":
    main()
