"""A user's job with a planted fault: ``fault_script.py START_METHOD KIND WHERE RANK STEP NUM_WORKERS [STRATEGY]``.

It trains 2 ranks, validates, and saves checkpoints into the directory ``SAVE_TO``. KIND may be "nothing". The ranks are
on this host, or on as many as ``NUM_NODES`` says; with ``RESUME`` they go on from the last checkpoint.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.gpu.card import Card
from lightning_multigpu import (
    HybridStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
    RingDDPStrategy,
    ShardedStrategy,
    TensorSplitStrategy,
    find_last_checkpoint,
)
from tests import faults
from tests.launch import outside_faults
from tests.strategies.tasks import Case, Classifier, eval_loader, make_trainer, train_loader

RANKS = int(os.environ.get("RANKS", "2"))
STACKS_SIGNAL = signal.SIGUSR2
FAILURE_TIMEOUT_S = float(os.environ.get("FAILURE_TIMEOUT_S", "5"))
HANG_REPORT_S = float(os.environ.get("HANG_REPORT_S", "8"))
# From the start of a rank: on a busy machine they import Lightning at different speeds.
JOIN_TIMEOUT_S = float(os.environ.get("JOIN_TIMEOUT_S", "25"))

KINDS: dict[str, Callable[[], object]] = {
    "kill": partial(signal.raise_signal, signal.SIGKILL),
    "exit": partial(os._exit, 3),
    "raise": partial(faults.raise_error, RuntimeError("planted")),
    "stop": partial(signal.raise_signal, signal.SIGSTOP),
    "hang": faults.hang,
    "interrupt": partial(signal.raise_signal, signal.SIGINT),
    "terminate": partial(signal.raise_signal, signal.SIGTERM),
    "end-guardian": outside_faults.end_guardian,
}
# Those that need a host of their own.
HOST_KINDS: dict[str, Callable[[], object]] = {
    "cut": outside_faults.cut,
    "drop": outside_faults.drop,
    "vanish": outside_faults.vanish,
    "sever": outside_faults.sever,
}
NUM_HOSTS = {"sever": 3}  # others need two
# Those that a job must survive.
CONTROLS: dict[str, Callable[[], object]] = {
    "slow": outside_faults.slow,
    "hold": outside_faults.hold,
    "breakpoint": outside_faults.breakpoint_,
    "trace": outside_faults.trace,
    "pause": outside_faults.pause,
}


def must_survive(kind: str, where: str) -> bool:
    """Whether this is no fault, and the job has to come to the weights of a run without it.

    SIGINT to a worker of a loader is what every Ctrl-C at a terminal brings along: the rank decides what to do, and the
    worker goes on until it is ended.
    """
    return kind in ("nothing", *CONTROLS) or (kind, where) == ("interrupt", "data")


CLASSES: dict[str, Any] = {
    "ring_ddp": RingDDPStrategy,
    "pipeline_1f1b": PipelineStrategy,
    "sync_ps": ParameterServerStrategy,
    "ddp_sharded": ShardedStrategy,
    "tensor_split": TensorSplitStrategy,
    "hybrid": HybridStrategy,
}
STRATEGIES = (*CLASSES, "ddp")


def strategy_of(name: str, method: str) -> Any:
    if name == "ddp":  # Lightning's
        return DDPStrategy(start_method=method)  # type: ignore[arg-type]
    limits = {"failure_timeout_s": FAILURE_TIMEOUT_S, "join_timeout_s": JOIN_TIMEOUT_S, "hang_report_s": HANG_REPORT_S}
    start: dict[str, str] = {} if name == "pipeline_1f1b" else {"start_method": method}
    return CLASSES[name](**start, **limits)


class TellsWeights(Callback):
    """One line with the sum of all weights, at the end of training."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weights = trainer.strategy.lightning_module_state_dict()  # of all stages, in a pipeline
        if trainer.global_rank == 0:
            total = sum(float(weights[name].double().abs().sum()) for name, _ in pl_module.named_parameters())
            print(f"weights {total:.12f}", flush=True)


faulthandler.register(STACKS_SIGNAL, all_threads=True)  # here, so that spawned ranks, which import this, have it too


def main() -> None:
    method, kind, where, rank, step, num_workers, *strategy = sys.argv[1:]
    callbacks: list[Callback] = [
        ModelCheckpoint(os.environ["SAVE_TO"], every_n_train_steps=4, save_last=True, save_on_exception=True),
        TellsWeights(),
    ]
    if kind != "nothing":
        action = {**KINDS, **HOST_KINDS, **CONTROLS}[kind]
        callbacks.append(faults.plant(action, rank=int(rank), step=int(step), where=where))  # type: ignore[arg-type]
    num_nodes = int(os.environ.get("NUM_NODES", "1"))
    ranks = RANKS // num_nodes
    trainer = make_trainer(
        Case(num_samples=96),
        ranks=ranks,
        num_nodes=num_nodes,
        callbacks=callbacks,
        default_root_dir=os.environ["SAVE_TO"],
        enable_checkpointing=True,
        val_check_interval=6,
        **Card.of_environment().place(strategy_of(strategy[0] if strategy else "ring_ddp", method), ranks),
    )
    workers: dict[str, Any] = {"num_workers": int(num_workers)}
    last = find_last_checkpoint(os.environ["SAVE_TO"]) if os.environ.get("RESUME") else None
    trainer.fit(Classifier(), train_loader(Case(num_samples=96), trainer, **workers), eval_loader(), ckpt_path=last)


if __name__ == "__main__":
    main()
