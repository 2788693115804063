"""Finds a learning rate and trains with it: ``python -m tests.launch.tuning_script STRATEGY``."""

from __future__ import annotations

import sys

from lightning.pytorch.tuner import Tuner

import lightning_multigpu  # noqa: F401 - its import makes the strategies known
from tests.strategies.tasks import Case, make_trainer, train_loader
from tests.strategies.test_tuning import Rated

CASE = Case(max_epochs=3)


def main() -> None:
    module = Rated()
    trainer = make_trainer(CASE, sys.argv[1], 2)
    Tuner(trainer).lr_find(module, train_loader(CASE, 2), num_training=20, early_stop_threshold=None)
    trainer.fit(module, train_loader(CASE, 2))
    # In one piece: the ranks share the output.
    sys.stdout.write(f"rank {trainer.global_rank}: {trainer.global_step} steps at {module.lr:.3g}\n")


if __name__ == "__main__":
    main()
