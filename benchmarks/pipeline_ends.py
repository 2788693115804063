"""What it saves that an embedding and a head live on the stages that use them: step time and bytes of a small Llama.

    python -m benchmarks.pipeline_ends [--turns 5] [--steps 10] [--ranks 2] [--tokens 64]

``replicated`` is the same pipeline with ``replicated=True``, under which every rank holds, computes and updates what is
outside of the layers. The two take turns, each in processes of its own. A Llama of width 256 with 8 layers and a
vocabulary of 32,000 trains in float32 with AdamW, 8 sequences a batch; the first three steps do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.heading import heading
from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.placeholder import Placeholder

_ROOT = Path(__file__).parents[1]
_UNCOUNTED = 3
CONTENDERS = ("replicated", "where used")


class Decoder(L.LightningModule):
    def __init__(self, directory: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(1)
        sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes))
        self.directory = directory
        self.seconds: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch, labels=batch).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_start(self, *_: Any) -> None:
        self.began_s = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began_s)

    def on_train_end(self) -> None:
        held = [parameter for parameter in self.parameters() if not isinstance(parameter, Placeholder)]
        states = [v for state in self.optimizers(use_pl_optimizer=False).state.values() for v in state.values()]  # type: ignore[union-attr]
        found = {
            "parameters": sum(p.nbytes for p in held),
            "gradients": sum(p.grad.nbytes for p in held if p.grad is not None),
            "states": sum(v.nbytes for v in states if isinstance(v, Tensor) and not isinstance(v, Placeholder)),
            "model": sum(parameter.nbytes for parameter in self.parameters()),
            "step_s": statistics.median(self.seconds[_UNCOUNTED:]),
        }
        (Path(self.directory) / f"{self.global_rank}.json").write_text(json.dumps(found))


def run_rank(contender: str, args: argparse.Namespace) -> None:
    tokens = torch.randint(
        32000, (8 * (args.steps + _UNCOUNTED), args.tokens), generator=torch.Generator().manual_seed(2)
    )
    strategy = PipelineStrategy(replicated=contender == "replicated", verify_steps=0)
    L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=args.ranks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Decoder(args.directory), DataLoader(tokens, batch_size=8))


def measured(contender: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """What each rank has measured, the rank with the last stage first."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--ranks", str(args.ranks), "--steps", str(args.steps), "--tokens", str(args.tokens)]
        command = [sys.executable, "-m", "benchmarks.pipeline_ends", "--contender", contender, "--directory", directory]
        subprocess.run([*command, *options], cwd=_ROOT, check=True, capture_output=True, env={**os.environ})
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(args.ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        run_rank(args.contender, args)
        return
    print(f"$ python -m benchmarks.pipeline_ends {' '.join(sys.argv[1:])}\n{heading()}")
    steps: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for turn in range(1, args.turns + 1):
        for contender in CONTENDERS:
            ranks = measured(contender, args)
            steps[contender].append(max(rank["step_s"] for rank in ranks))
            if turn == 1:
                share = sum(rank["parameters"] for rank in ranks) / ranks[0]["model"]
                print(f"{contender}: parameters of all ranks / those of the model: {share:.3f}")
                for number, rank in enumerate(ranks):
                    sizes = ", ".join(
                        f"{kind} {rank[kind] / 1e6:.1f} MB" for kind in ("parameters", "gradients", "states")
                    )
                    print(f"  rank {number}: {sizes}")
        print(
            f"turn {turn}: " + ", ".join(f"{name} {1e3 * found[-1]:.0f} ms" for name, found in steps.items()),
            flush=True,
        )
    old, new = (steps[contender] for contender in CONTENDERS)
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    print(
        f"median step: {1e3 * statistics.median(old):.0f} ms, {1e3 * statistics.median(new):.0f} ms; "
        f"ratio of a turn {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
