"""A user's job with a planted fault: ``fault_script.py START_METHOD KIND WHERE RANK STEP NUM_WORKERS [STRATEGY]``.

It trains 2 ranks on this host, validates, and saves checkpoints into the directory ``SAVE_TO``. KIND may be "nothing".
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from lightning_multigpu import RingDDPStrategy, faults
from tests.strategies.tasks import Case, Classifier, eval_loader, make_trainer, train_loader

RANKS = 2
STACKS_SIGNAL = signal.SIGUSR2
FAILURE_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 25.0  # from the start of a rank: on a busy machine they import Lightning at different speeds

KINDS: dict[str, Callable[[faults.Spot], Callback]] = {
    "kill": faults.Spot.kill,
    "exit": lambda spot: spot.exit(3),
    "raise": lambda spot: spot.raise_(RuntimeError("planted")),
    "stop": faults.Spot.stop,
    "hang": faults.Spot.hang,
    "interrupt": faults.Spot.interrupt,
    "terminate": faults.Spot.terminate,
}
STRATEGIES: dict[str, Callable[[Any], Any]] = {
    "ring_ddp": lambda method: RingDDPStrategy(
        start_method=method, failure_timeout_s=FAILURE_TIMEOUT_S, join_timeout_s=JOIN_TIMEOUT_S
    ),
    "ddp": lambda method: DDPStrategy(start_method=method),
}


faulthandler.register(STACKS_SIGNAL, all_threads=True)  # here, so that spawned ranks, which import this, have it too


def main() -> None:
    method, kind, where, rank, step, num_workers, *strategy = sys.argv[1:]
    callbacks: list[Callback] = [ModelCheckpoint(os.environ["SAVE_TO"], every_n_train_steps=4, save_last=True)]
    if kind != "nothing":
        callbacks.append(KINDS[kind](faults.at(rank=int(rank), step=int(step), where=where)))  # type: ignore[arg-type]
    trainer = make_trainer(
        Case(num_samples=96),
        STRATEGIES[strategy[0] if strategy else "ring_ddp"](method),
        RANKS,
        callbacks=callbacks,
        enable_checkpointing=True,
        val_check_interval=6,
        num_sanity_val_steps=0,
    )
    workers: dict[str, Any] = {"num_workers": int(num_workers)}
    trainer.fit(Classifier(), train_loader(Case(num_samples=96), RANKS, **workers), eval_loader())


if __name__ == "__main__":
    main()
