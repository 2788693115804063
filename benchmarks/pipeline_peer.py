"""A pipeline of another library on two cores, for :mod:`benchmarks.pipeline_throughput`; run by its own Python.

``pipeline_peer.py fairscale|deepspeed|one RESULTS BATCH_SIZE MICRO_BATCHES STEPS`` writes median seconds of a step.
DeepSpeed is started once a rank, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.plain_gpt import batch_of, gpt, loss_of, median_step_s


def one_core(batch_size: int, num_micro_batches: int, num_steps: int) -> tuple[str, float]:
    """No pipeline: a loop over whole batches in one process with one thread."""
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    text, targets = batch_of(batch_size)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(text), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return f"torch {torch.__version__}", median_step_s(step, num_steps)


def fairscale_pipe(batch_size: int, num_micro_batches: int, num_steps: int) -> tuple[str, float]:
    """One process, two CPU devices, a thread for each."""
    import fairscale
    from fairscale.nn import Pipe

    model = gpt()
    half = len(model) // 2
    pipe = Pipe(
        model, balance=[half, len(model) - half], devices=["cpu", "cpu"], chunks=num_micro_batches, checkpoint="never"
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    text, targets = batch_of(batch_size)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(pipe(text), targets).backward()
        optimizer.step()

    return f"FairScale {fairscale.__version__}", median_step_s(step, num_steps)


def deepspeed_pipeline(batch_size: int, num_micro_batches: int, num_steps: int) -> tuple[str, float]:
    """Two processes, 1F1B."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo", verbose=False)
    module = PipelineModule(list(gpt()), num_stages=2, loss_fn=loss_of, partition_method="uniform")
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        config={
            "train_batch_size": batch_size,
            "train_micro_batch_size_per_gpu": batch_size // num_micro_batches,
            "gradient_accumulation_steps": num_micro_batches,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "steps_per_print": 1000000,
        },
    )
    text, targets = batch_of(batch_size)
    parts = list(zip(text.chunk(num_micro_batches), targets.chunk(num_micro_batches), strict=True))
    micro_batches = itertools.cycle(parts)
    return f"DeepSpeed {deepspeed.__version__}", median_step_s(lambda: engine.train_batch(micro_batches), num_steps)


LIBRARIES = {"one": one_core, "fairscale": fairscale_pipe, "deepspeed": deepspeed_pipeline}


def main() -> None:
    name, path, *numbers = sys.argv[1:]
    torch.set_num_threads(1)
    library, seconds = LIBRARIES[name](*map(int, numbers))
    if os.environ.get("RANK", "0") == "0":
        Path(path).write_text(json.dumps({"library": library, "seconds": seconds}))
    if name == "fairscale":
        os._exit(0)  # its threads run on, and an ordinary end would abort the process


if __name__ == "__main__":
    main()
