"""What the Trainer is asked for on the command line, checked against a machine that the tests invent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_multigpu.commands.early_checks import check_checkpoint
from lightning_multigpu.commands.settings import trainer_settings
from lightning_multigpu.commands.usage import UsageError


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def refused(devices: object, device_type: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        trainer_settings.check_devices(devices, device_type)
    return str(caught.value)


@pytest.mark.parametrize("devices", ["auto", 1, "2", 7])
def test_devices_on_cpu(devices: object) -> None:
    trainer_settings.check_devices(devices, "cpu")


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("devices", ["auto", 1, "1", -1, "-1", [0], "0,"])
def test_devices_on_gpus(devices: object) -> None:
    trainer_settings.check_devices(devices, "cuda")


@pytest.mark.parametrize("devices", [0, -2, "0"])
def test_fewer_than_one_device(devices: object) -> None:
    assert refused(devices, "cpu") == (
        f"devices={int(str(devices))}: a run needs at least 1 rank on each host; pass devices=1 or more, or 'auto'"
    )


def test_all_devices_is_for_gpus() -> None:
    assert refused(-1, "cpu") == (
        "devices=-1: a run needs at least 1 rank on each host (-1, all devices, is for GPUs); "
        "pass devices=1 or more, or 'auto'"
    )


@pytest.mark.parametrize("devices", ["two", "0,a", 1.5, True])
def test_devices_that_cannot_be_read(devices: object) -> None:
    assert refused(devices, "cpu") == (
        f"devices={devices!r} is neither a number nor a list of GPUs; pass devices=1 or more, or 'auto'"
    )


def test_a_list_on_cpu() -> None:
    assert refused([0, 1, 2], "cpu") == ("devices=[0, 1, 2] names devices; on CPU pass the number of ranks, devices=3")


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(("devices", "missing"), [(3, "1, 2"), ([0, 5, 6], "5, 6")])
def test_more_gpus_than_the_machine_has(devices: object, missing: str) -> None:
    assert refused(devices, "cuda") == (
        f"devices=3: this machine has 1 GPU, and no GPU {missing}; pass devices=1 or fewer"
    )


@pytest.mark.usefixtures("no_gpu")
def test_no_gpu() -> None:
    assert refused(1, "cuda") == "accelerator='gpu': this machine has no GPU; pass accelerator='cpu' or 'auto'"


def test_every_registered_name_is_known() -> None:
    for name in ("auto", "ddp", "ring_ddp", "RING_DDP"):
        trainer_settings.check_strategy_name(name)


def test_unknown_strategy_lists_ours_and_lightnings_and_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown") as caught:
        trainer_settings.check_strategy_name("ringddp")
    first, ours, lightnings = str(caught.value).splitlines()
    assert first == "strategy='ringddp' is unknown. Did you mean 'ring_ddp'?"
    assert ours.startswith("  this pack's: ring_ddp, ring_ddp_spawn")
    assert lightnings.startswith("  Lightning's: auto, ddp, ")
    assert "ring_ddp" not in lightnings


def test_unknown_strategy_like_no_other() -> None:
    with pytest.raises(ValueError, match="unknown") as caught:
        trainer_settings.check_strategy_name("zzz")
    assert str(caught.value).splitlines()[0] == "strategy='zzz' is unknown."


@pytest.mark.parametrize("name", ["RingDDPStrategy", "lightning_multigpu.RingDDPStrategy"])
def test_a_class_in_place_of_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="is a class") as caught:
        trainer_settings.check_strategy_name(name)
    assert str(caught.value) == (f"strategy={name!r} is a class; pass a name of it: ring_ddp, ring_ddp_spawn")


@pytest.mark.parametrize("path", [None, "", "best", "last", "s3://bucket/last.ckpt", "registry:model"])
def test_checkpoints_that_are_not_looked_for_here(path: object) -> None:
    check_checkpoint(path)


def test_missing_checkpoint(tmp_path: Path) -> None:
    right = tmp_path / "epoch=3.ckpt"
    right.touch()
    check_checkpoint(right)
    with pytest.raises(UsageError) as caught:
        check_checkpoint(tmp_path / "epoch=4.ckpt")
    assert str(caught.value) == (
        f"ckpt_path={str(tmp_path / 'epoch=4.ckpt')!r}: there is no such file. Did you mean {str(right)!r}?"
    )
