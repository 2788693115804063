"""What is refused before processes start, and that each message names the value, the limit and the fix."""

import inspect
import pickle
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar

from lightning_multigpu import (
    DataParallelStrategy,
    FaultTolerantDDPStrategy,
    PipelineStrategy,
    RingDDPStrategy,
    ShardedStrategy,
    TensorSplitStrategy,
)
from lightning_multigpu.callbacks import ThroughputMonitor
from lightning_multigpu.job.run_context import RunContext
from lightning_multigpu.job.shared_gpus import SHARING_VARIABLE
from lightning_multigpu.registry import StrategyRow
from lightning_multigpu.strategies import option_checks as checks
from lightning_multigpu.strategies.steps.hook_detection import has_hook
from tests.strategies.tasks import rows_of_each_class

CPU, MPS = torch.device("cpu"), torch.device("mps")


def gpus(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


def outer(optimizer: Any, average_every: int = 2, **options: Any) -> RingDDPStrategy:
    return RingDDPStrategy(average_every=average_every, outer_optimizer=optimizer, **options)


CHOICES = ("stop", "join")
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: checks.check_choice("mode", "joni", CHOICES), "mode='joni' .*: 'stop', 'join'. Did you mean 'join'"),
    (lambda: checks.check_number("size", 0), "size=0 is out of range; pass a number above 0"),
    (lambda: checks.check_number("size", 0.5, least=1), "size=0.5 is out of range; pass a number of 1 or more"),
    (lambda: checks.check_number("size", float("nan")), "size=nan is out of range"),
    (lambda: checks.check_number("size", "25"), "size='25' is not a number; pass a number above 0"),
    (lambda: checks.check_number("size", True), "size=True is not a number"),
    (lambda: checks.check_number("period", 1.5, whole=True), "period=1.5 is not a whole number; pass a whole number"),
    (lambda: RingDDPStrategy(timeout=30), r"timeout=30 is no timedelta above 0; pass datetime.timedelta\(seconds="),
    (lambda: RingDDPStrategy(timeout=timedelta(0)), "timeout=.* is no timedelta above 0"),
    (lambda: RingDDPStrategy(start_method="forked"), "start_method='forked' .*: 'popen', .*'spawn'"),
    (lambda: checks.check_backend("nccl", "cpu"), "='nccl' moves no tensors on 'cpu' .*pass 'gloo'"),
    (lambda: checks.check_backend("cpu:nccl,cuda:nccl", "cpu"), "='cpu:nccl,cuda:nccl' moves no tensors on 'cpu'"),
    (lambda: checks.check_backend("glo", "cpu"), "='glo' moves no tensors .*pass 'gloo'"),
    (lambda: RingDDPStrategy(bucket_cap_mb=0), "bucket_cap_mb=0 .* above 0"),
    (lambda: RingDDPStrategy(failure_timeout_s=0.5), "failure_timeout_s=0.5 .* 1 or more"),
    (lambda: RingDDPStrategy(hang_report_s=0.5), "hang_report_s=0.5 .* 1 or more"),
    (lambda: RingDDPStrategy(join_timeout_s=0.5), "join_timeout_s=0.5 .* 1 or more"),
    (lambda: RingDDPStrategy(uneven_inputs="wait"), "uneven_inputs='wait' .*: 'stop', 'join'"),
    (lambda: RingDDPStrategy(loss_reduction="median"), "loss_reduction='median' .*: 'mean', 'sum'"),
    (lambda: DataParallelStrategy(loss_reduction="median"), "loss_reduction='median' .*: 'mean', 'sum'"),
    (lambda: RingDDPStrategy(average_every=0), "average_every=0"),
    (lambda: RingDDPStrategy(average_every=2, ddp_comm_hook=print), "average_every=2 and .* leave one of the two out"),
    (lambda: RingDDPStrategy(average_every=2, compression="int8"), "average_every=2 and .* leave one of the two out"),
    (lambda: outer("nesterov", average_every=1), "outer_optimizer='nesterov' with average_every=1: .* leave it out"),
    (lambda: outer("adam"), "outer_optimizer='adam': pass 'nesterov', or a mapping of lr and momentum"),
    (lambda: outer({"rate": 1}), "outer_optimizer={'rate': 1}: pass 'nesterov'"),
    (lambda: outer({"lr": 0}), "outer_optimizer: lr=0 is out of range; pass a number above 0"),
    (lambda: outer({"momentum": 1.0}), "outer_optimizer: momentum=1.0 is out of range; pass a number from 0 to"),
    (lambda: outer({"momentum": -0.1}), "outer_optimizer: momentum=-0.1 is out of range"),
    (lambda: outer("nesterov", ddp_comm_hook=print), "average_every=2 and ddp_comm_hook=.* leave one of the two out"),
    (lambda: TensorSplitStrategy(average_every=2, outer_optimizer="nesterov"), "outer_optimizer='nesterov': .*leave"),
    (lambda: RingDDPStrategy(compression="int4"), "compression='int4' is unknown"),
    (lambda: RingDDPStrategy(compression="int8", ddp_comm_hook=print), "both choose how gradients travel"),
    (lambda: RingDDPStrategy(verify_steps=1, static_graph=True), "verify_steps=1 and static_graph=True: .* leave one"),
    (
        lambda: L.Trainer(accelerator="cpu", devices=2, strategy=FaultTolerantDDPStrategy(min_replicas=3)),
        "min_replicas=3 of 2 ranks",
    ),
    (lambda: PipelineStrategy(verify_steps=-1), "verify_steps=-1 is out of range; pass a whole number of 0 or more"),
]


@pytest.mark.parametrize(("check", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_is_wrong_is_refused_with_the_value_the_limit_and_the_fix(check: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check()


def test_a_back_end_that_is_not_in_this_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "gloo")
    with pytest.raises(ValueError, match=r"process_group_backend='mpi' moves no tensors on 'cpu' .*; pass 'gloo'"):
        checks.check_backend("mpi", "cpu")


def test_an_unknown_option_is_a_type_error_with_the_nearest_or_all() -> None:
    for wrong, message in (
        ("bucket_mb", "Did you mean 'bucket_cap_mb'"),
        ("zzz", "It takes bucket_cap_mb, static_graph"),
    ):
        with pytest.raises(TypeError, match=f"RingDDPStrategy has no option '{wrong}'. {message}"):
            checks.check_options("RingDDPStrategy", [wrong], {"bucket_cap_mb", "static_graph"})
    with pytest.raises(TypeError, match=r"no option 'bucket_cap'\. Did you mean 'bucket_cap_mb'\?"):
        RingDDPStrategy(bucket_cap=3)  # its own option, and not one of the base
    names = ShardedStrategy.option_names()
    assert len(names) == len({*names})


@pytest.mark.parametrize("row", rows_of_each_class(), ids=lambda row: row.name)
def test_a_string_is_no_bool(row: StrategyRow) -> None:
    """``find_unused_parameters="no"`` was taken as True."""
    for option in inspect.signature(row.strategy.__init__).parameters.values():
        if str(option.annotation) in ("bool", "bool | None"):
            with pytest.raises(ValueError, match=rf"^{option.name}='no' is not a bool; pass True or False"):
                row.strategy(**{**row.options, option.name: "no"})


def test_ranks_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    monkeypatch.delenv(SHARING_VARIABLE, raising=False)
    checks.check_backend("gloo", "cuda", gpus(0, 0))
    checks.check_backend("cpu:nccl,cuda:gloo", "cuda", gpus(0, 0))
    checks.check_backend(None, "cuda", gpus(0, 1))
    with pytest.raises(ValueError, match=r"parallel_devices=\[0, 0\]: .*from version 2.31 on.*=1 .*'gloo'"):
        checks.check_backend(None, "cuda", gpus(0, 0))
    monkeypatch.setenv(SHARING_VARIABLE, "1")
    checks.check_backend("nccl", "cuda", gpus(0, 0))


def check_run(devices: list[torch.device], num_nodes: int = 1, **options: Any) -> None:
    run = RunContext(
        environment=LightningEnvironment(),
        devices=tuple(devices),
        num_nodes=num_nodes,
        backend=options.pop("backend", None),
        failure_timeout_s=options.pop("failure_timeout_s", 1.0),
        hang_report_s=None,
        join_timeout_s=600.0,
    )
    checks.check_run(run, **({"sync_batchnorm": False} | options))


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"devices": [MPS]}, "accelerator='mps': .*pass accelerator='cpu'"),
        ({"backend": "nccl"}, "process_group_backend='nccl'"),
        ({"sync_batchnorm": True}, "sync_batchnorm=True on CPU: .*; pass sync_batchnorm=False"),
        # Half a second of silence between hosts was a failure, which a throttled host exceeds without any fault.
        ({"num_nodes": 2}, "failure_timeout_s=1 with num_nodes=2: it must be 5 or more."),
    ],
)
def test_every_setting_of_a_run_comes_to_its_check(change: dict[str, Any], refused: str) -> None:
    check_run([CPU], num_nodes=2, failure_timeout_s=5.0)
    with pytest.raises(ValueError, match=refused):
        check_run(**({"devices": [CPU]} | change))


@pytest.mark.parametrize("row", rows_of_each_class(), ids=lambda row: row.name)
def test_a_strategy_goes_to_spawned_ranks(row: StrategyRow) -> None:
    """A lambda in a helper ended each spawned run with "Can't pickle local object"."""
    assert isinstance(pickle.loads(pickle.dumps(row.strategy(**row.options))), row.strategy)


class Looking(L.Callback):
    def on_validation_batch_end(self, *args: Any) -> None:
        """Looks at outputs."""


def test_hooks_of_the_user_count_and_those_of_libraries_do_not() -> None:
    module, theirs = L.LightningModule(), [TQDMProgressBar(), ModelCheckpoint(), ThroughputMonitor()]
    for callbacks, hook, expected in (
        (theirs, "on_validation_batch_end", False),
        ([*theirs, Looking()], "on_validation_batch_end", True),
        ([*theirs, Looking()], "on_test_batch_end", False),
    ):
        module._trainer = SimpleNamespace(callbacks=callbacks)  # type: ignore[assignment]
        assert has_hook(hook, module) is expected
