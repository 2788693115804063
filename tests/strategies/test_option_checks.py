"""What is refused before processes start, and that each message names the value, the limit and the fix."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_multigpu import HybridStrategy, ShardedStrategy
from lightning_multigpu.job import shared_gpus
from lightning_multigpu.job.run_context import RunContext
from lightning_multigpu.job.shared_gpus import SHARING_VARIABLE
from lightning_multigpu.registry import StrategyRow
from lightning_multigpu.strategies import option_checks
from tests.strategies.tasks import rows_of_each_class

CPU = torch.device("cpu")


def gpus(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


def message_of(check: Any, *args: Any, error: type[Exception] = ValueError, **kwargs: Any) -> str:
    with pytest.raises(error) as caught:
        check(*args, **kwargs)
    return str(caught.value)


class TestOptions:
    def test_a_choice(self) -> None:
        option_checks.check_choice("uneven_inputs", "stop", ("stop", "join"))

    def test_no_choice_lists_them_and_names_the_nearest(self) -> None:
        assert message_of(option_checks.check_choice, "uneven_inputs", "joni", ("stop", "join")) == (
            "uneven_inputs='joni' is not one of the choices: 'stop', 'join'. Did you mean 'join'?"
        )

    def test_no_choice_without_anything_near(self) -> None:
        assert message_of(option_checks.check_choice, "uneven_inputs", None, ("stop", "join")) == (
            "uneven_inputs=None is not one of the choices: 'stop', 'join'."
        )

    @pytest.mark.parametrize("row", rows_of_each_class(), ids=lambda row: row.name)
    def test_a_string_is_no_bool(self, row: StrategyRow) -> None:
        """``find_unused_parameters="no"`` was taken as True."""
        options = inspect.signature(row.strategy.__init__).parameters.values()
        for option in options:
            if str(option.annotation) in ("bool", "bool | None"):
                with pytest.raises(ValueError, match=rf"^{option.name}='no' is not a bool; pass True or False"):
                    row.strategy(**{**row.options, option.name: "no"})

    def test_options_are_listed_once(self) -> None:
        names = ShardedStrategy.option_names()
        assert len(names) == len({*names})

    @pytest.mark.parametrize("value", [0.1, 25, 1e9])
    def test_positive(self, value: float) -> None:
        option_checks.check_positive("bucket_cap_mb", value)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (0, "bucket_cap_mb=0 is out of range; pass a number above 0"),
            (-2.5, "bucket_cap_mb=-2.5 is out of range; pass a number above 0"),
            (float("nan"), "bucket_cap_mb=nan is out of range; pass a number above 0"),
            (float("inf"), "bucket_cap_mb=inf is out of range; pass a number above 0"),
            ("25", "bucket_cap_mb='25' is not a number; pass a number above 0"),
            (True, "bucket_cap_mb=True is not a number; pass a number above 0"),
            (None, "bucket_cap_mb=None is not a number; pass a number above 0"),
        ],
    )
    def test_not_positive(self, value: object, message: str) -> None:
        assert message_of(option_checks.check_positive, "bucket_cap_mb", value) == message

    def test_not_whole(self) -> None:
        assert message_of(option_checks.check_positive, "model_averaging_period", 1.5, whole=True) == (
            "model_averaging_period=1.5 is not a whole number; pass a whole number above 0"
        )

    @pytest.mark.parametrize("value", [None, timedelta(seconds=1)])
    def test_timeout(self, value: timedelta | None) -> None:
        option_checks.check_timeout(value)

    def test_timeout_is_no_timedelta(self) -> None:
        assert message_of(option_checks.check_timeout, 30) == (
            "timeout=30 is not a timedelta; pass datetime.timedelta(seconds=1800), for example"
        )

    def test_timeout_is_over_at_once(self) -> None:
        assert message_of(option_checks.check_timeout, timedelta(0)) == (
            "timeout=datetime.timedelta(0) is out of range; pass a timedelta above 0"
        )

    @pytest.mark.parametrize("value", ["popen", "spawn", "fork", "forkserver"])
    def test_start_method(self, value: str) -> None:
        option_checks.check_start_method(value)

    def test_start_method_that_the_platform_lacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(option_checks, "get_all_start_methods", lambda: ["spawn"])
        assert message_of(option_checks.check_start_method, "fork") == (
            "start_method='fork' is not one of the choices: 'popen', 'spawn'."
        )

    def test_unknown_option_is_a_type_error_with_the_nearest(self) -> None:
        known = {"bucket_cap_mb", "static_graph"}
        option_checks.check_options("RingDDPStrategy", ["static_graph"], known)
        assert message_of(option_checks.check_options, "RingDDPStrategy", ["bucket_mb"], known, error=TypeError) == (
            "RingDDPStrategy has no option 'bucket_mb'. Did you mean 'bucket_cap_mb'?"
        )

    def test_unknown_option_like_no_other_lists_them(self) -> None:
        known = {"bucket_cap_mb", "static_graph"}
        assert message_of(option_checks.check_options, "RingDDPStrategy", ["zzz"], known, error=TypeError) == (
            "RingDDPStrategy has no option 'zzz'. It takes bucket_cap_mb, static_graph."
        )


class TestDevices:
    def test_as_many_ranks_as_cores(self, recwarn: pytest.WarningsRecorder) -> None:
        option_checks.check_devices([CPU, CPU], cpu_count=2, gpu_count=0)
        assert not recwarn.list

    def test_more_ranks_than_cores_warn(self) -> None:
        with pytest.warns(UserWarning, match="ranks share cores") as caught:
            option_checks.check_devices([CPU] * 3, cpu_count=1, gpu_count=0)
        assert str(caught[0].message) == (
            "devices=3: this process may use 1 CPU core, so that ranks share cores and slow each other down; "
            "devices=1 or fewer avoids it"
        )

    def test_none(self) -> None:
        assert message_of(option_checks.check_devices, [], cpu_count=2, gpu_count=0) == (
            "devices=0: a run needs at least 1 rank on each host; pass devices=1 or more"
        )

    def test_mixed_types(self) -> None:
        assert message_of(option_checks.check_devices, [CPU, *gpus(0)], cpu_count=2, gpu_count=1) == (
            "parallel_devices are of the types cpu, cuda; all must be of one type"
        )

    def test_gpus_of_the_machine(self) -> None:
        option_checks.check_devices(gpus(0, 1), cpu_count=1, gpu_count=2)

    def test_more_gpus_than_the_machine_has(self) -> None:
        assert message_of(option_checks.check_devices, gpus(0, 1, 2), cpu_count=8, gpu_count=1) == (
            "devices=3: this machine has 1 GPU, and no GPU 1, 2; pass devices=1 or fewer"
        )

    def test_no_gpu_at_all(self) -> None:
        assert message_of(option_checks.check_devices, gpus(0), cpu_count=8, gpu_count=0) == (
            "devices=1: this machine has 0 GPUs, and no GPU 0; pass accelerator='cpu'"
        )

    def test_one_gpu_twice(self) -> None:
        with pytest.warns(UserWarning, match=r"parallel_devices=\[1, 1\]: ranks that share a GPU share its time"):
            option_checks.check_devices(gpus(1, 1), cpu_count=8, gpu_count=2)

    @pytest.mark.parametrize(("version", "variable"), [((2, 30, 7), "1"), ((2, 31, 2), None), ((2, 31, 2), "0")])
    def test_nccl_that_refuses_to_share_a_gpu(
        self, version: tuple[int, ...], variable: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_gpus, "nccl_version", lambda: version)
        monkeypatch.delenv(SHARING_VARIABLE, raising=False)
        if variable is not None:
            monkeypatch.setenv(SHARING_VARIABLE, variable)
        assert message_of(option_checks.check_shared_gpus, gpus(0, 0), None) == (
            "parallel_devices=[0, 0]: ranks share a GPU over NCCL from version 2.31 on, where "
            f"NCCL_MULTI_RANK_GPU_ENABLE=1 is set (here: NCCL {'.'.join(map(str, version))}, "
            f"NCCL_MULTI_RANK_GPU_ENABLE {variable or 'unset'}); "
            "pass process_group_backend='gloo', or name each GPU once"
        )
        option_checks.check_shared_gpus(gpus(0, 0), "gloo")
        option_checks.check_shared_gpus(gpus(0, 0), "cpu:nccl,cuda:gloo")
        option_checks.check_shared_gpus(gpus(0, 1), None)

    def test_nccl_that_shares_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared_gpus, "nccl_version", lambda: (2, 31, 2))
        monkeypatch.setenv(SHARING_VARIABLE, "1")
        option_checks.check_shared_gpus(gpus(0, 0), "nccl")

    def test_the_version_is_that_of_the_loaded_library(self, tmp_path: Path) -> None:
        """Torch tells that of the headers with which it was built."""
        source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
        source.write_text("int ncclGetVersion(int *version) { *version = 23102; return 0; }")
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        code = f"from {shared_gpus.__name__} import nccl_version; print(nccl_version())"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "LD_PRELOAD": str(library)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "(2, 31, 2)\n"

    def test_another_accelerator(self) -> None:
        assert message_of(option_checks.check_devices, [torch.device("mps")], cpu_count=8, gpu_count=0) == (
            "accelerator='mps': the strategies of this pack run on CPUs and CUDA GPUs; "
            "pass accelerator='cpu' or accelerator='gpu'"
        )

    def test_cores_that_this_process_may_use(self) -> None:
        assert option_checks.available_cpu_count() >= 1


class TestBackend:
    @pytest.mark.parametrize("backend", [None, "gloo", "GLOO", "cpu:gloo,cuda:nccl"])
    def test_serves_cpu(self, backend: str | None) -> None:
        option_checks.check_backend(backend, "cpu")

    def test_gloo_serves_gpus(self) -> None:
        option_checks.check_backend("gloo", "cuda")

    @pytest.mark.parametrize("backend", ["nccl", "cpu:nccl,cuda:nccl", "cuda:nccl", "glo"])
    def test_moves_nothing_on_cpu(self, backend: str) -> None:
        message = message_of(option_checks.check_backend, backend, "cpu")
        assert message.startswith(
            f"process_group_backend={backend!r} moves no tensors on 'cpu' in this build of torch; pass 'gloo'"
        )
        assert message.endswith("or leave the option out. Did you mean 'gloo'?") == (backend == "glo")

    def test_not_in_this_build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "gloo")
        assert message_of(option_checks.check_backend, "mpi", "cpu") == (
            "process_group_backend='mpi' moves no tensors on 'cpu' in this build of torch; pass 'gloo', or leave the "
            "option out"
        )


class TestPrecision:
    @pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-true", "16-mixed"])
    @pytest.mark.parametrize("device_type", ["cpu", "cuda"])
    def test_served(self, precision: str, device_type: str) -> None:
        option_checks.check_precision(precision, device_type)

    def test_16_mixed_on_cpu_as_a_word(self) -> None:
        assert message_of(option_checks.check_precision, "16-mixed", "cpu", explicit=False) == (
            "precision='16-mixed' on CPU: Lightning would compute in bf16-mixed instead; pass precision='bf16-mixed', "
            "or plugins=MixedPrecision('16-mixed', 'cpu') if float16 is what you want"
        )

    def test_transformer_engine_on_cpu(self) -> None:
        assert message_of(option_checks.check_precision, "transformer-engine", "cpu") == (
            "precision='transformer-engine' needs a GPU; pass precision='bf16-mixed' on CPU, or accelerator='gpu'"
        )

    def test_bf16_on_an_old_gpu(self) -> None:
        assert message_of(option_checks.check_precision, "bf16-mixed", "cuda", bf16_supported=False) == (
            "precision='bf16-mixed': this GPU has no bfloat16 units (compute capability 8.0 or newer has); "
            "pass precision='16-mixed' or '32-true'"
        )

    def test_sync_batchnorm(self) -> None:
        option_checks.check_sync_batchnorm(True, "cuda")
        option_checks.check_sync_batchnorm(False, "cpu")
        assert message_of(option_checks.check_sync_batchnorm, True, "cpu") == (
            "sync_batchnorm=True on CPU: torch synchronises BatchNorm on GPUs only; pass sync_batchnorm=False, or use "
            "a norm without batch statistics such as GroupNorm"
        )


class TestRun:
    """``check_run`` hands every setting of a run to the check that it belongs to."""

    @staticmethod
    def check(
        *,
        devices: list[torch.device],
        backend: str | None = None,
        num_nodes: int = 1,
        failure_timeout_s: float = 1.0,
        **options: Any,
    ) -> None:
        run = RunContext(
            environment=LightningEnvironment(),
            devices=tuple(devices),
            num_nodes=num_nodes,
            backend=backend,
            failure_timeout_s=failure_timeout_s,
            hang_report_s=None,
            join_timeout_s=600.0,
        )
        given: dict[str, Any] = {"precision": "32-true", "sync_batchnorm": False, "may_ask_gpu": True}
        option_checks.check_run(run, **(given | options))

    def test_accepted(self) -> None:
        self.check(devices=[CPU], num_nodes=2, failure_timeout_s=5.0)
        self.check(devices=[CPU], precision="16-mixed")  # of a plugin: Lightning takes bf16-mixed for the word

    @pytest.mark.parametrize(
        ("change", "refused"),
        [
            ({"devices": []}, "devices=0"),
            ({"backend": "nccl"}, "process_group_backend='nccl'"),
            ({"sync_batchnorm": True}, "sync_batchnorm=True"),
            # Half a second of silence between hosts was a failure, which a throttled host exceeds without any fault.
            ({"num_nodes": 2}, "failure_timeout_s=1 with num_nodes=2: it must be 5 or more."),
            ({"precision": "transformer-engine"}, "precision='transformer-engine'"),
        ],
    )
    def test_refused(self, change: dict[str, Any], refused: str) -> None:
        assert message_of(self.check, **({"devices": [CPU]} | change)).startswith(refused)

    def test_more_gpus_than_this_machine_has(self) -> None:
        assert "pass " in message_of(self.check, devices=gpus(torch.cuda.device_count()))


@pytest.mark.parametrize(("name", "value"), [("activation_checkpointing", True), ("verify_steps", 1)])
def test_options_of_its_pipeline_are_refused_by_hybrid(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name}={value}: .* pass pipeline={{'{name}': ...}}"):
        HybridStrategy(**{name: value})  # type: ignore[arg-type]
