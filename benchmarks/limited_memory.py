"""A model that needs three times the memory that one process is allowed: trained, saved and resumed on 4 ranks.

    python -m benchmarks.limited_memory [--limit-mb 2400] [--ranks 4] [--steps 2]

Each process has a memory cgroup of its own with the limit (as root, cgroups of version 1 or 2), which counts what the
kernel keeps of files for it as well. The model, whose parameters, gradients and states of Adam take three times the
limit, is built by ``configure_model``:

- ``ranks`` processes under the limit train, save, end, and go on from the file in new processes;
- one process under the limit is killed;
- one process without a limit trains as long, and the last files are compared tensor by tensor.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.heading import heading
from lightning_multigpu import PipelineStrategy

_ROOT = Path(__file__).parents[1]
_NUM_LAYERS = 64
_BYTES_A_PARAMETER = 4 * 8  # float64: its value, its gradient, two states of Adam
# glibc returns memory of freed tensors to the system at once, so that a limit does not fall on holes of its heap.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
_CGROUPS = (  # version 1, version 2: the folder, the file of the limit, that of the peak
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"),
)


def width_of(limit_mb: int) -> int:
    """The width at which the model needs three times the limit: two matrices of 2 width**2 a layer."""
    return int((3e6 * limit_mb / _BYTES_A_PARAMETER / (4 * _NUM_LAYERS)) ** 0.5)


class Perceptrons(L.LightningModule):
    """Residual blocks of two linear layers; no other tensor counts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        width = self.width
        self.first = nn.Linear(16, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(_NUM_LAYERS))
        self.last = nn.Linear(width, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        for layer in self.layers:
            x = layer(x)
        return (self.last(x) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        # Without foreach, whose temporaries are as large as the parameters.
        return torch.optim.Adam(self.parameters(), lr=1e-5, foreach=False)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Group:
    """A memory cgroup for one process.

    Args:
        limit_bytes: what the process may use; None for no limit.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        folder, limit, peak = next(each for each in _CGROUPS if (each[0] / "cgroup.procs").exists())
        self._path = Path(tempfile.mkdtemp(prefix="limited_memory_", dir=folder))
        if limit_bytes is not None:
            (self._path / limit).write_text(str(limit_bytes))
        self._peak = self._path / peak

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Starts a process that is in the group before it uses any memory."""
        entering = ["sh", "-c", f'echo $$ > {self._path}/cgroup.procs; exec "$@"', "sh", *command]
        return subprocess.Popen(
            entering,
            cwd=_ROOT,
            env={**os.environ, **_ENVIRONMENT, **environment},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )

    def end(self) -> int:
        """Removes the group, and returns the most bytes that it has used."""
        peak = int(self._peak.read_text())
        while True:
            try:
                self._path.rmdir()
            except OSError:  # the kernel has not done with a process that has ended
                time.sleep(0.1)
            else:
                return peak


def run_rank(args: argparse.Namespace) -> None:
    """Trains an epoch, or a second one from the file."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    path = Path(args.directory) / "last.ckpt"
    # The check holds as much as gradients and states take, and in a run that goes on these are there already.
    pipeline = PipelineStrategy(gather_at_end=False, verify_steps=2 * (args.epochs == 1))
    strategy: Any = "auto" if args.ranks == 1 else pipeline
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=args.ranks,
        precision="64-true",  # in which the order of a sum does not show
        max_epochs=args.epochs,
        logger=False,
        callbacks=[ModelCheckpoint(args.directory, filename="last", enable_version_counter=False)],
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    samples = torch.randn(8 * args.steps, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    loader = DataLoader(samples, batch_size=8)
    trainer.fit(Perceptrons(args.width), loader, ckpt_path=path if args.epochs > 1 else None)


def run(ranks: int, epochs: int, directory: Path, limit_mb: int | None, args: argparse.Namespace) -> bool:
    """Whether all ranks have ended well; prints a line about them."""
    options = ["--ranks", str(ranks), "--epochs", str(epochs), "--steps", str(args.steps)]
    options += ["--directory", str(directory), "--width", str(args.width)]
    command = [sys.executable, "-m", "benchmarks.limited_memory", *options]
    began_s = time.perf_counter()
    groups = [Group(None if limit_mb is None else limit_mb * 1_000_000) for _ in range(ranks)]
    several = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port), "NODE_RANK": "0"} if ranks > 1 else {}
    processes = [
        group.start(command, {**several, "LOCAL_RANK": str(rank)} if several else {})
        for rank, group in enumerate(groups)
    ]
    errors = [process.communicate()[1] for process in processes]
    peaks = [f"{group.end() / 1e6:.0f}" for group in groups]
    statuses = [process.returncode for process in processes]
    print(
        f"{ranks} rank{'s' if ranks > 1 else ''}, {f'{limit_mb} MB each' if limit_mb else 'no limit'}, "
        f"{'begun' if epochs == 1 else 'resumed'}: exit status {', '.join(map(str, statuses))}; "
        f"{time.perf_counter() - began_s:.0f} s; has used at most {', '.join(peaks)} MB",
        flush=True,
    )
    if any(statuses) and (ranks > 1 or limit_mb is None):
        print(errors[0][-3000:])
    return not any(statuses)


def largest_difference(one: Path, other: Path) -> tuple[int, float, float]:
    """The number of tensors in two checkpoints, and the largest difference of two weights and of two states.

    Differences are relative to the largest value of their tensor.
    """
    first, second = (torch.load(path, weights_only=True, mmap=True) for path in (one, other))
    assert list(first["state_dict"]) == list(second["state_dict"])
    assert first["global_step"] == second["global_step"]
    weights = [(first["state_dict"][name], second["state_dict"][name]) for name in first["state_dict"]]
    both = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (first, second)]
    assert list(both[0]) == list(both[1])
    states = [(both[0][n][key], both[1][n][key]) for n in both[0] for key in both[0][n]]
    differences = [max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs) for pairs in (weights, states)]
    return len(weights) + len(states), *differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mb", type=int, default=2400)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="of each of two epochs")
    parser.add_argument("--scratch", default="/var/tmp", help="a folder on a disk, for 5 times the limit")
    parser.add_argument("--port", type=int, default=29871, help="of the ranks' meeting, free on this machine")
    parser.add_argument("--epochs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.directory:
        run_rank(args)
        return
    print(f"$ python -m benchmarks.limited_memory {' '.join(sys.argv[1:])}\n{heading()}")
    args.width = width_of(args.limit_mb)
    num_parameters = _NUM_LAYERS * (4 * args.width**2 + 3 * args.width) + 18 * args.width + 1
    needed_mb = num_parameters * _BYTES_A_PARAMETER / 1e6
    print(
        f"{num_parameters / 1e6:.0f} M parameters; with gradients and states of Adam {needed_mb:.0f} MB, "
        f"{needed_mb / args.limit_mb:.2f} times the limit"
    )
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        alone, split = (Path(scratch) / name for name in ("alone", "split"))
        alone.mkdir()
        split.mkdir()
        for epochs in (1, 2):
            assert run(args.ranks, epochs, split, args.limit_mb, args)
            print(f"  the file: {(split / 'last.ckpt').stat().st_size / 1e6:.0f} MB", flush=True)
        assert not run(1, 1, alone, args.limit_mb, args), "the limit limits nothing"
        for epochs in (1, 2):
            assert run(1, epochs, alone, None, args)
        count, weights, states = largest_difference(split / "last.ckpt", alone / "last.ckpt")
        print(f"{count} tensors in both files; largest relative difference {weights:.1e}, of states {states:.1e}")


if __name__ == "__main__":
    main()
