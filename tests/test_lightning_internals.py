"""Names the piece of Lightning that has moved, instead of letting a user find out by an import error."""

import inspect

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy

from lightning_multigpu._lightning_internals import HOOKS_BEFORE_STEP


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Strategy, "_configure_launcher"),
        (Strategy, "process_dataloader"),
        (Strategy, "on_train_batch_start"),
        (Strategy, "load_model_state_dict"),
        (ParallelStrategy, "reduce_boolean_decision"),
        (DDPStrategy, "_setup_model"),
        (DDPStrategy, "_register_ddp_hooks"),
        (DDPStrategy, "set_world_ranks"),
        (DDPStrategy, "determine_ddp_device_ids"),
        (DDPStrategy, "post_backward"),
        (Precision, HOOKS_BEFORE_STEP),
        (_TrainingEpochLoop, "update_lr_schedulers"),
        (_TrainingEpochLoop, "update_restart_stage"),
    ],
)
def test_hook_that_we_override_is_still_called_so(owner: type, name: str) -> None:
    assert inspect.isfunction(getattr(owner, name, None)), f"Lightning's {owner.__name__} no longer has {name}"


def test_attributes_that_we_read_and_arguments_that_we_pass_are_still_there() -> None:
    for name in ("_ddp_comm_hook", "_ddp_comm_state"):
        assert hasattr(DDPStrategy(), name), f"Lightning's DDPStrategy no longer has {name}"
    for stage in ("fit", "validate", "test", "predict"):
        assert "ckpt_path" in inspect.signature(getattr(Trainer, f"_{stage}_impl")).parameters, stage
