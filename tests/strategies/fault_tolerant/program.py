"""What a rank of these tests runs: a short fit that notes each sample, and is lost where the test's plan says so."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_multigpu  # noqa: F401
from lightning_multigpu import FaultTolerantDDPStrategy
from lightning_multigpu.callbacks import RunReport

NUM_FEATURES, LEARNING_RATE, MOMENTUM, EPOCHS = 3, 0.05, 0.5, 100


class Rows(Dataset[Any]):
    """Numbered samples."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, NUM_FEATURES, generator=generator, dtype=torch.float64)
        self.y = self.x.sum(1, keepdim=True) + torch.randn(length, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], index


def first_layer() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(NUM_FEATURES, 1, dtype=torch.float64)


def unfreeze(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    """What callbacks for fine-tuning do."""
    layer.bias.requires_grad_(True)
    optimizer.add_param_group({"params": [layer.bias]})


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """One whose next rate depends on its own state, and not on the present rate alone."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)


def loss_of(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(layer(x), y)


class Slow(Callback):
    """Makes a rank that comes in take its time to take over a state."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        time.sleep(self.seconds)


class Noted(L.LightningModule):
    def __init__(self, plan: dict[str, Any], rank: int, directory: Path) -> None:
        super().__init__()
        self.layer = first_layer()
        if rank > 0:
            torch.nn.init.ones_(self.layer.weight)  # the first rank's values have to reach the others
        self.plan, self.rank = plan, rank
        self.notes = (directory / f"notes{rank}.jsonl").open("a")
        self.starts = int(os.environ.get("LIGHTNING_MULTIGPU_STARTS", os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))

    def note(self, **what: Any) -> None:
        self.notes.write(json.dumps(what) + "\n")
        self.notes.flush()

    def maybe_lost(self, where: str) -> None:
        for fault in self.plan.get("faults", []):
            is_here = (fault["rank"], fault.get("where", "training"), fault.get("start", 0)) == (
                self.rank,
                where,
                self.starts,
            )
            if is_here and self.trainer.global_step == fault["step"] and not self.trainer.sanity_checking:
                self.note(lost=time.time())
                fault["step"] = -1
                if fault["signal"] == "hang":
                    time.sleep(fault.get("seconds", 1000))
                else:
                    os.kill(os.getpid(), getattr(signal, fault["signal"]))

    def on_fit_start(self) -> None:
        self.maybe_lost("begin")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        time.sleep(self.plan.get("pause_s", 0.01))
        self.maybe_lost("training")
        loss = loss_of(self.layer, x, y)
        self.log("train_loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        view = self.trainer.strategy.run_view()  # type: ignore[attr-defined]
        step = self.trainer.global_step
        back = min((each.step for each in view.member_changes() if each.joined), default=math.inf)
        if (self.rank == 1 and step == self.plan.get("stops")) or step > back + self.plan.get("steps_after", math.inf):
            self.trainer.should_stop = True
        if view.owns_batch():
            self.note(step=step, epoch=self.trainer.current_epoch, ids=batch[2].tolist(), at=time.time())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.maybe_lost("validation")
        x, y, ids = batch
        self.log("val_loss", loss_of(self.layer, x, y), sync_dist=True)
        self.log("val_samples", float(len(ids)), sync_dist=True, reduce_fx="sum")

    def on_validation_end(self) -> None:
        self.note(validated=float(self.trainer.callback_metrics["val_samples"]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.maybe_lost("save")

    def on_validation_start(self) -> None:
        """A rank that is started again validates alone: the others go on meanwhile."""
        others = Path(self.notes.name).with_name("notes0.jsonl")
        is_alone = self.starts and self.trainer.state.fn == "validate"
        size = others.stat().st_size + 5000 if is_alone else 0
        while size > others.stat().st_size:
            time.sleep(0.02)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step + 1 == self.plan.get("unfreezes"):
            unfreeze(self.layer, self.trainer.optimizers[0])

    def configure_optimizers(self) -> Any:
        if self.plan.get("unfreezes"):
            self.layer.bias.requires_grad_(False)
        optimizer = torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad],
            lr=LEARNING_RATE,
            momentum=self.plan.get("momentum", MOMENTUM),
        )
        return [optimizer], [schedule(optimizer)]


def main() -> None:
    ranks_by_launcher = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
    rank, directory = next((int(each) for each in ranks_by_launcher if each), 0), Path(os.environ["DIRECTORY"])
    ranks = int(os.environ.get("WORLD_SIZE", 2))
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    rank += int(os.environ.get("NODE_RANK", 0)) * devices
    plan: dict[str, Any] = json.loads(os.environ["PLAN"])
    module = Noted(plan, rank, directory)
    callbacks: list[Any] = []
    if plan.get("validate"):
        callbacks = [
            ModelCheckpoint(directory / "checkpoints", monitor="val_loss", save_top_k=2, save_last=True),
            EarlyStopping("val_loss", mode="max", min_delta=1e9, patience=1000),  # counts validations
        ]
    if plan.get("takes_s"):
        callbacks.append(Slow(plan["takes_s"]))
    if plan.get("report"):
        callbacks.append(RunReport())
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=ranks // devices,
        strategy=FaultTolerantDDPStrategy(**plan.get("options", {})),
        precision="64-true",
        logger=False,
        callbacks=callbacks,
        enable_checkpointing="validate" in plan,
        default_root_dir=directory,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=True,
        **plan.get("trainer", {}),
    )
    data = DataLoader(Rows(plan.get("samples", 40)), batch_size=2, shuffle=True)
    validation = DataLoader(Rows(15), batch_size=2) if plan.get("validate") else None
    if plan.get("validates_first"):
        trainer.validate(module, validation)
    trainer.fit(module, data, validation)
    result = {
        "weights": [*module.layer.weight[0].tolist(), module.layer.bias.item()],
        "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
        "step": trainer.global_step,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "waited": [callback.wait_count for callback in trainer.early_stopping_callbacks],
        "batches": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "best": [callback.best_model_path for callback in trainer.checkpoint_callbacks],
    }
    (directory / f"result{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
