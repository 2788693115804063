"""Plants losses of ranks in runs under ft_ddp, and measures the seconds that each has cost.

``python -m benchmarks.losses --losses 100`` trains on 4 ranks, run after run, with several losses in each: a rank is
killed or stopped (SIGKILL, SIGSTOP), all processes of an emulated host are killed at once, or its link is cut and comes
back; in a step, a validation, while a checkpoint is saved, while a lost rank joins again, and two at once.
With ``--only kill,stop save`` those that have one of the words in each of the arguments. Emulated hosts need root.

Every run has to reach its last step, with the same bits on all ranks, and to leave no process and no damaged file.

``python -m benchmarks.losses --kill-every 20 --minutes 10`` kills every rank in turn, and compares the validation loss
at the end with that of an undisturbed run of as many epochs; ``--strategy`` takes options of ft_ddp.

The exit status is 1 if a run was wrong, or losses differ by more than 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import lightning as L
import psutil
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.heading import heading
from lightning_multigpu import FaultTolerantDDPStrategy
from lightning_multigpu.emulation import EmulatedHosts
from lightning_multigpu.job.guardian.proc import read_stat
from tests import preforked

RANKS, HOSTS = 4, 2
KINDS = ("kill", "stop", "host", "cut")
PLACES = ("step", "validation", "save", "rejoin", "two")
_MARK = "LOSSES_MARK"
_VALIDATE_EVERY, _SAVE_EVERY = 20, 15  # steps
_SAVING_S = 0.2  # takes a save longer, so that losses find it
_RETURN_S = 90.0  # in which a lost rank has to be back
_END_S = 120.0  # without progress the job hangs
_POLL_S = 0.005


# What the ranks run


class Classifier(L.LightningModule):
    """A small network; a step takes ``pause_s`` longer. A fifth of the labels is wrong, so that the loss stays high."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    @override
    def training_step(self, batch: list[Tensor]) -> Tensor:
        time.sleep(self.pause_s)
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    @override
    def validation_step(self, batch: list[Tensor]) -> None:
        time.sleep(self.pause_s / 2)
        self.log("loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def examples(number: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, 64, generator=generator)
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    labels = (inputs @ teacher).argmax(1)
    is_wrong = torch.rand(number, generator=generator) < 0.2
    return TensorDataset(inputs, torch.where(is_wrong, torch.randint(10, (number,), generator=generator), labels))


class Notes(L.Callback):
    """Files of each rank: what it does now (``phase``), when its steps ended (``steps``), its last state (``end``)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rank = int(os.environ["LOCAL_RANK"]) + int(os.environ.get("NODE_RANK", 0)) * RANKS // nodes()

    def phase(self, name: str) -> None:
        path = self.directory / f"phase{self.rank}"
        path.with_suffix(".new").write_text(f"{os.getpid()} {name}")
        path.with_suffix(".new").replace(path)

    @override
    def on_train_start(self, *_: object) -> None:
        self.phase("rejoin" if int(os.environ.get("LIGHTNING_MULTIGPU_STARTS", 0)) else "begin")

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        view = trainer.strategy.run_view()  # type: ignore[attr-defined]
        self.phase("step" if view.data_ranks == RANKS else "fewer")
        with (self.directory / f"steps{self.rank}").open("a") as file:
            file.write(f"{time.time()} {trainer.global_step}\n")

    @override
    def on_validation_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step:
            self.phase("validation")

    @override
    def on_validation_end(self, *_: object) -> None:
        self.phase("step")

    @override
    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.phase("end")
        bits = hashlib.sha256()
        for value in module.state_dict().values():
            bits.update(value.numpy().tobytes())
        end = {"step": trainer.global_step, "epoch": trainer.current_epoch, "bits": bits.hexdigest()[:16]}
        end["loss"] = float(trainer.callback_metrics["loss"])
        (self.directory / f"end{self.rank}").write_text(json.dumps(end))


class SlowCheckpointIO(TorchCheckpointIO):
    """Takes its time, and notes it."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    @override
    def save_checkpoint(self, *given: Any, **options: Any) -> None:
        self.notes.phase("save")
        time.sleep(_SAVING_S)
        super().save_checkpoint(*given, **options)
        self.notes.phase("step")


def nodes() -> int:
    return int(os.environ.get("NUM_NODES", 1))


def train(directory: Path, pause_s: float, steps: int, epochs: int, strategy: dict[str, Any]) -> None:
    """The script of the job; one of ``steps`` and ``epochs`` is -1."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the supervisor forwards it to the ranks
    L.seed_everything(1, verbose=False)
    is_rank = "LOCAL_RANK" in os.environ
    notes = Notes(directory) if is_rank else L.Callback()
    saves = ModelCheckpoint(
        directory / "saved", every_n_train_steps=_SAVE_EVERY, save_top_k=3, monitor="step", mode="max"
    )
    training = DataLoader(examples(8192, 1), batch_size=32, shuffle=True)
    validation = DataLoader(examples(1024, 2), batch_size=32)
    trainer = L.Trainer(
        strategy=FaultTolerantDDPStrategy(**strategy),
        accelerator="cpu",
        devices=RANKS // nodes(),
        num_nodes=nodes(),
        max_steps=steps,
        max_epochs=epochs,
        val_check_interval=_VALIDATE_EVERY if steps > 0 else 1.0,
        callbacks=[notes, saves],
        plugins=[SlowCheckpointIO(notes)] if isinstance(notes, Notes) else [],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(pause_s), training, validation)


# What strikes them


@dataclass
class Loss:
    """A loss: its kind, what the job did then, when it struck (since 1970), and the seconds that it has cost."""

    kind: str
    place: str
    struck_s: float = 0.0
    cost_s: float | None = None


@dataclass
class Run:
    """One job, its losses, and what was wrong with it."""

    losses: list[Loss] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    loss: float | None = None
    seconds: float = 0.0


class TrainedJob:
    """The job, on this machine or on two emulated hosts; a context manager that leaves no process behind."""

    def __init__(self, directory: Path, hosts: EmulatedHosts | None, forked: bool, *arguments: str) -> None:
        self.directory, self.hosts, self._forked = directory, hosts, forked
        self._command = [sys.executable, "-m", "benchmarks.losses", "--train", str(directory), *arguments]
        self._mark = f"{os.getpid()}-{directory.name}"
        self.supervisors = [self._start(node) for node in range(HOSTS if hosts else 1)]
        self.begun_s, self._struck_s = time.monotonic(), 0.0

    def _start(self, node: int) -> subprocess.Popen[Any]:
        variables = {_MARK: self._mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (self.directory / f"output{node}.log").open("ab") as file:
            given: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            host = None if self.hosts is None else self.hosts[node]
            place = {} if host is None else {**host.environment(), "NUM_NODES": str(HOSTS)}
            start: Any = subprocess.Popen if host is None else host.popen
            if self._forked:
                start = partial(preforked.Process, namespace=None if host is None else host.namespace.pid)
            return start(self._command, env={**os.environ, **variables, **place}, **given)

    def phases(self) -> dict[int, tuple[int, str]]:
        """What each rank does, and its process, of those that run."""
        found = {}
        for rank in range(RANKS):
            with contextlib.suppress(OSError, ValueError):
                pid, phase = (self.directory / f"phase{rank}").read_text().split()
                if (stat := read_stat(int(pid))) is not None and stat.state not in "ZX":
                    found[rank] = int(pid), phase
        return found

    def doing(self) -> list[str]:
        return [phase for _, phase in self.phases().values()]

    def is_whole(self) -> bool:
        """Whether all ranks train, and have gone on since the last loss."""
        phases = self.phases()
        if len(phases) < RANKS or not {phase for _, phase in phases.values()} <= {"step", "validation", "save"}:
            return False
        return all((self.directory / f"phase{rank}").stat().st_mtime > self._struck_s for rank in phases)

    def until(self, condition: Any, limit_s: float) -> bool:
        """Waits; False if the time is over, or the job has ended or is about to."""
        until_s = time.monotonic() + limit_s
        while not (met := condition()) and time.monotonic() < until_s and not self.is_ending():
            time.sleep(_POLL_S)
        return bool(met)

    def is_ending(self) -> bool:
        return any(each.poll() is not None for each in self.supervisors) or any(self.directory.glob("end*"))

    def strike(self, kind: str, ranks: Sequence[int], chance: random.Random) -> float:
        """Lets ``ranks`` be lost; returns the time."""
        struck_s = time.time()
        self._strike(kind, ranks, chance)
        self._struck_s = time.time()
        return struck_s

    def _strike(self, kind: str, ranks: Sequence[int], chance: random.Random) -> None:
        phases = self.phases()
        if kind == "cut":
            assert self.hosts is not None
            self.hosts.switch.run("ip", "link", "set", "port1", "down")
            time.sleep(chance.uniform(2, 8))
            self.hosts.switch.run("ip", "link", "set", "port1", "up")
            return
        if kind == "host":
            self.supervisors[1].kill()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(phases[rank][0], signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        if kind == "host":  # its scheduler starts it anew
            self.supervisors[1].wait()
            self.supervisors[1] = self._start(1)

    def check(self, run: Run, steps: int) -> None:
        """Waits for the end, and notes what is wrong."""
        while any(each.poll() is None for each in self.supervisors) and time.time() < self._progress_s() + _END_S:
            time.sleep(0.1)
        if None in (statuses := [each.poll() for each in self.supervisors]):
            self.show_stacks()
        run.seconds = time.monotonic() - self.begun_s
        if set(statuses) != {0}:
            run.wrong.append(f"exit statuses {statuses}")
        time.sleep(6)  # workers of loaders look for their ranks every 5 s
        run.wrong += [f"left: {process}" for process in self.processes()]
        ends = [json.loads(path.read_text()) for path in sorted(self.directory.glob("end*"))]
        if not ends or len({each["bits"] for each in ends}) != 1:
            run.wrong.append(f"bits of the weights: {[each['bits'] for each in ends]}")
        if steps > 0 and {each["step"] for each in ends} != {steps}:
            run.wrong.append(f"last steps {[each['step'] for each in ends]}, not {steps}")
        run.loss = ends[0]["loss"] if ends else None
        saved = [path for path in (self.directory / "saved").rglob("*") if path.is_file()]
        run.wrong += [
            f"damaged: {path.name}" for path in saved if not zipfile.is_zipfile(path) or path.suffix != ".ckpt"
        ]
        for loss, following in itertools.zip_longest(run.losses, run.losses[1:]):
            loss.cost_s = self._cost_s(loss.struck_s, following.struck_s if following else loss.struck_s + _RETURN_S)

    def show_stacks(self) -> None:
        """Has the ranks write to the output where they are."""
        for each in self.supervisors:
            each.send_signal(signal.SIGUSR1)
        time.sleep(1)

    def _progress_s(self) -> float:
        """When a rank has noted something last."""
        return max((path.stat().st_mtime for path in self.directory.glob("steps*")), default=time.time())

    def _cost_s(self, struck_s: float, until_s: float) -> float | None:
        """The longest time without a step that ends between a loss and the next one, beyond an ordinary one."""
        times: dict[int, float] = {}
        for path in self.directory.glob("steps*"):
            for line in path.read_text().splitlines():
                at_s, step = float(line.split()[0]), int(line.split()[1])
                times[step] = min(at_s, times.get(step, at_s))
        gaps = [(times[step - 1], times[step] - times[step - 1], step) for step in sorted(times) if step - 1 in times]
        ordinary = {
            special: median([gap for _, gap, step in gaps if _is_special(step) == special] or [0.0])
            for special in (False, True)
        }
        near = [gap - ordinary[_is_special(step)] for at_s, gap, step in gaps if struck_s < at_s + gap < until_s]
        return max(near, default=None)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.directory.glob("output*.log")))

    def __enter__(self) -> TrainedJob:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for each in self.supervisors:
            each.kill()
            each.wait()


def _is_special(step: int) -> bool:
    """Whether the time before this step has a validation or a save."""
    return (step - 1) % _VALIDATE_EVERY == 0 or (step - 1) % _SAVE_EVERY == 0


@contextlib.contextmanager
def job(on_hosts: bool, options: argparse.Namespace, *arguments: str) -> Iterator[TrainedJob]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="losses-")))
        hosts = stack.enter_context(EmulatedHosts(HOSTS)) if on_hosts else None
        arguments = (*arguments, f"--strategy={json.dumps(options.strategy)}")
        yield stack.enter_context(TrainedJob(directory, hosts, options.forked, *arguments))


def run_with_losses(planned: Sequence[Loss], options: argparse.Namespace, chance: random.Random) -> Run:
    """One job, in which the planned losses strike one after another, each when the last one is over."""
    run = Run()
    on_hosts = any(each.kind in ("cut", "host") for each in planned)
    with job(on_hosts, options, f"--pause={options.pause}", f"--steps={options.steps}") as trained:
        for loss in planned:
            if not trained.until(trained.is_whole, _RETURN_S):
                run.wrong.append("over too early" if trained.is_ending() else "not all ranks were back in time")
                trained.show_stacks()
                break
            trained.until(lambda: False, chance.uniform(0.5, 2))
            ranks = [2, 3] if loss.kind == "host" else chance.sample(range(RANKS), 2 if loss.place == "two" else 1)
            if loss.place == "rejoin":
                trained.strike("kill", [first := chance.randrange(RANKS)], chance)
                if loss.kind in ("kill", "stop"):  # the rank that joins, or another one
                    ranks = chance.choice([[first], [(first + 1) % RANKS]])
            looked_for = {"two": "step"}.get(loss.place, loss.place)
            if trained.until(lambda: looked_for in trained.doing(), _RETURN_S):  # noqa: B023 - called at once
                time.sleep(chance.uniform(0, 0.1))
                loss.struck_s = trained.strike(loss.kind, ranks, chance)
                run.losses.append(loss)
        trained.check(run, options.steps)
        if run.wrong:
            print(trained.output(), flush=True)
    return run


def run_with_kills(options: argparse.Namespace, every_s: float) -> Run:
    """One job, of which every rank in turn is killed every ``every_s`` seconds; 0 for none."""
    run = Run()
    pause_s = 60 * options.minutes * RANKS * 32 / 8192 / options.epochs if every_s else 0.0
    with job(False, options, f"--pause={pause_s}", f"--epochs={options.epochs}") as trained:
        trained.until(trained.is_whole, _RETURN_S)
        for rank in itertools.cycle(range(RANKS)) if every_s else ():
            trained.until(lambda: False, every_s)
            if trained.is_ending():
                break
            run.losses.append(Loss("kill", "step", trained.strike("kill", [rank], random.Random())))
        while not trained.is_ending():
            time.sleep(0.5)
        trained.check(run, -1)
        if run.wrong:
            print(trained.output(), flush=True)
    return run


# What is printed


def table(losses: Sequence[Loss]) -> list[str]:
    """The seconds that losses have cost, by kind and by place."""
    groups: dict[str, list[float]] = defaultdict(list)
    for each in losses:
        for name in (each.kind, f"in {each.place}", "all"):
            groups[name] += [] if each.cost_s is None else [each.cost_s]
    lines = [f"{'losses':16}{'number':>8}{'median s':>10}{'p95 s':>8}{'most s':>8}"]
    for name in sorted(groups, key=lambda name: (name == "all", name.startswith("in "), name)):
        costs = groups[name]
        p95 = quantiles(costs, n=20, method="inclusive")[-1] if len(costs) > 1 else max(costs, default=0.0)
        row = [median(costs or [0.0]), p95, max(costs, default=0.0)]
        lines.append(
            f"{name:16}{len(costs):8}"
            + "".join(f"{value:{width}.2f}" for value, width in zip(row, (10, 8, 8), strict=True))
        )
    return lines


def planned(options: argparse.Namespace) -> list[list[Loss]]:
    """The losses of each run; those of hosts and links come in runs of their own, on emulated hosts."""
    every = [
        Loss(kind, place)
        for kind in KINDS
        for place in PLACES
        if (kind, place) not in {("host", "two"), ("cut", "two")}
    ]
    wanted = [set(words.split(",")) for words in options.only]
    every = [each for each in every if all({each.kind, each.place} & words for words in wanted)]
    if not every:
        raise SystemExit(f"--only: use some of {', '.join((*KINDS, *PLACES))}")
    losses = [Loss(each.kind, each.place) for each in itertools.islice(itertools.cycle(every), options.losses)]
    random.Random(options.seed).shuffle(losses)
    runs = []
    for on_hosts in (False, True):
        those = [each for each in losses if (each.kind in ("cut", "host")) == on_hosts]
        runs += [those[begin : begin + options.each] for begin in range(0, len(those), options.each)]
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=100)
    parser.add_argument("--each", type=int, default=5, help="losses of a run")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD[,WORD]")
    parser.add_argument("--steps", type=int, default=-1, help="of a run (as many as its losses need)")
    parser.add_argument("--pause", type=float, default=0.04, help="seconds that a step takes at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-every", type=float, metavar="SECONDS")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the run with --kill-every")
    parser.add_argument("--epochs", type=int, default=-1, help="of that run (30)")
    parser.add_argument("--strategy", type=json.loads, default={}, metavar="JSON", help="options of ft_ddp")
    parser.add_argument("--forked", action="store_true", help="fork ranks from a process that has imported Lightning")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)  # in a rank
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.pause, options.steps, options.epochs, options.strategy)
        return 0
    print(f"{heading()}\n# python -m benchmarks.losses {' '.join(sys.argv[1:])}", flush=True)
    return compare_kills(options) if options.kill_every else count_losses(options)


def count_losses(options: argparse.Namespace) -> int:
    options.steps = options.steps if options.steps > 0 else round(options.each * 13 / options.pause)
    chance, runs = random.Random(options.seed), []
    for number, losses in enumerate(planned(options)):
        runs.append(run := run_with_losses(losses, options, chance))
        struck = ", ".join(f"{each.kind} in {each.place} {each.cost_s or 0:.1f} s" for each in run.losses)
        print(f"run {number}, {run.seconds:.0f} s: {struck}: {'; '.join(run.wrong) or 'right'}", flush=True)
    print("\n".join(["", *table([each for run in runs for each in run.losses])]))
    wrong = sum(bool(run.wrong) for run in runs)
    print(f"{len(runs)} runs, {wrong} of them wrong")
    return 1 if wrong else 0


def compare_kills(options: argparse.Namespace) -> int:
    options.epochs = options.epochs if options.epochs > 0 else 30
    killed, calm = run_with_kills(options, options.kill_every), run_with_kills(options, 0.0)
    print("\n".join(table(killed.losses)))
    for name, run in (("killed", killed), ("undisturbed", calm)):
        print(
            f"{name}: {run.seconds:.0f} s, {options.epochs} epochs, validation loss {run.loss}, {run.wrong or 'right'}"
        )
    differ = None if None in (killed.loss, calm.loss) else abs(killed.loss / calm.loss - 1)  # type: ignore[operator]
    print(f"the losses differ by {'?' if differ is None else f'{100 * differ:.2f} %'}")
    return 1 if killed.wrong or calm.wrong or differ is None or differ > 0.01 else 0


if __name__ == "__main__":
    sys.exit(main())
