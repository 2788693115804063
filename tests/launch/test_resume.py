"""After any fault ``ckpt_path="last"`` goes on to the weights of a run that never failed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.fault_job import FaultJob, Outcome
from lightning_multigpu.job.checkpoint_files.last_checkpoint import complete_checkpoints
from tests.strategies.tasks import Case, Classifier, eval_loader, fit, make_strategy, make_trainer, state, train_loader
from tests.world import World

pytestmark = pytest.mark.launch

KINDS = ("kill", "raise", "stop", "interrupt", "terminate")
STEP = 14  # of 36, within the second epoch; the newest checkpoint of an epoch or of every 4 steps is that of step 12
# Rank 0 saves when it stops: where the ranks have agreed to, or at the last step that all of them have completed.
SAVING = ("raise", "interrupt", "terminate")
CASE = Case(num_samples=96)


def failed(kind: str, directory: Path) -> Outcome:
    directory.mkdir()
    job = FaultJob(
        directory, ["popen", kind, "training", str(KINDS.index(kind) % 2), str(STEP), "0"], "popen", forked=True
    )
    return job.run(rank=0, kind=kind, deadline_s=60)


def resume(saved: str) -> dict[str, Any]:
    module = Classifier()
    checkpoints = ModelCheckpoint(saved, every_n_train_steps=4, save_last=True)
    trainer = make_trainer(CASE, make_strategy("ring_ddp"), 2, callbacks=[checkpoints], enable_checkpointing=True,
                           val_check_interval=6)  # fmt: skip
    trainer.fit(module, train_loader(CASE, 2), eval_loader(), ckpt_path="last")
    return {"weights": state(module), "resumed": len(module.seen), "global_step": trainer.global_step}


def test_a_failed_run_goes_on_from_its_last_checkpoint(tmp_path: Path, world2: World) -> None:
    expected = fit(CASE, None, 1)
    with ThreadPoolExecutor(2) as pool:
        outcomes = dict(zip(KINDS, pool.map(lambda kind: failed(kind, tmp_path / kind), KINDS), strict=True))
    for kind, outcome in outcomes.items():
        assert outcome.struck, outcome.output
        assert not outcome.hung, outcome.output
        assert not outcome.leaks, (outcome.leaks, outcome.output)
        newest = max(file.global_step for file in complete_checkpoints(tmp_path / kind / "saved"))
        assert newest >= STEP if kind in SAVING else newest == 12, (kind, newest)
        for found in world2.run(resume, str(tmp_path / kind / "saved")):
            assert found["global_step"] == expected["global_step"]
            assert found["resumed"] == expected["global_step"] - newest, "it has gone on, not begun again"
            for name, value in expected["weights"].items():
                torch.testing.assert_close(found["weights"][name], value, rtol=1e-9, atol=1e-12)
