"""Checks of a user's options against this machine and this build of torch, before any process is started.

Every function takes plain values, returns nothing, and raises ``ValueError`` with the value, the limit and the fix.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import get_all_start_methods
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision

from lightning_multigpu._suggest import did_you_mean
from lightning_multigpu.job.run_context import RunContext
from lightning_multigpu.job.shared_gpus import SHARING_VARIABLE, share_a_gpu, sharing_backend

SHORTEST_OF_HOSTS_S = 5.0


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Checks that ``value`` is one of ``choices``."""
    if not (isinstance(value, str) and value in choices):
        listed = ", ".join(repr(choice) for choice in choices)
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise ValueError(f"{name}={value!r} is not one of the choices: {listed}. {hint}".rstrip())


def check_bools(**options: object) -> None:
    """Checks that every value is True or False: a string such as "no" counts as True in Python."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is not a bool; pass True or False")


def check_number(name: str, value: object, *, least: float | None = None, whole: bool = False) -> None:
    """Checks that ``value`` is a finite number, with ``whole`` an integer: above 0, or ``least`` and more."""
    kind, wanted = "a whole number" if whole else "a number", "above 0" if least is None else f"of {least:g} or more"
    if isinstance(value, bool) or not isinstance(value, (int,) if whole else (int, float)):
        raise ValueError(f"{name}={value!r} is not {kind}; pass {kind} {wanted}")
    if not ((value > 0 if least is None else value >= least) and math.isfinite(value)):
        raise ValueError(f"{name}={value!r} is out of range; pass {kind} {wanted}")


def check_options(owner: str, options: Iterable[str], known: Collection[str]) -> None:
    """Checks that every name of ``options`` is one of ``known``.

    Raises:
        TypeError: a name is unknown; Python raises the same for an unknown keyword.
    """
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known) or f"It takes {', '.join(sorted(known))}."
            raise TypeError(f"{owner} has no option {name!r}. {hint}")


def options_of(strategy: type, *, eval_str: bool = True) -> dict[str, inspect.Parameter]:
    """The options of a strategy's own constructor, by name."""
    own = inspect.signature(strategy.__init__, eval_str=eval_str).parameters  # type: ignore[misc]
    return {name: parameter for name, parameter in own.items() if parameter.kind is parameter.KEYWORD_ONLY}


def own_options(strategy: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options of a strategy's own constructor from its local variables, or another mapping."""
    return {name: given.get(name, option.default) for name, option in options_of(strategy).items()}


def check_options_of_all(options: Mapping[str, Any]) -> None:
    """Checks the options that every strategy that starts ranks has, by name."""
    check_choice("start_method", options["start_method"], ("popen", *get_all_start_methods()))
    check_choice("uneven_inputs", options["uneven_inputs"], ("stop", "join"))
    if not callable(options["loss_reduction"]):
        check_choice("loss_reduction", options["loss_reduction"], ("mean", "sum"))
    for name in ("failure_timeout_s", "hang_report_s", "join_timeout_s"):
        if options[name] or name != "hang_report_s":
            check_number(name, options[name], least=1)
    timeout = options["timeout"]
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise ValueError(f"timeout={timeout!r} is no timedelta above 0; pass datetime.timedelta(seconds=1800)")
    check_number("verify_steps", options["verify_steps"], least=0, whole=True)
    if (every := options["check_replicas_every_n_steps"]) is not None:
        check_number("check_replicas_every_n_steps", every, least=0, whole=True)


def check_devices(devices: Sequence[torch.device]) -> None:
    """Checks the types of the devices of this host's ranks."""
    if wrong := next((device.type for device in devices if device.type not in ("cpu", "cuda")), None):
        raise ValueError(
            f"accelerator={wrong!r}: the strategies of this pack run on CPUs and CUDA GPUs; "
            "pass accelerator='cpu' or accelerator='gpu'"
        )


def check_backend(backend: str | None, device_type: str, devices: Sequence[torch.device] = ()) -> None:
    """Checks that this build of torch has the process group back end, and that it moves tensors of ``device_type``.

    Where ranks of this host share one of ``devices``, NCCL has to let them.

    Args:
        backend: a name ("gloo", "nccl"), a name for each device ("cpu:gloo,cuda:nccl"), or None for the default.
    """
    name = (backend or "nccl").lower()
    if ":" in name:
        name = dict(part.partition(":")[::2] for part in name.replace(" ", "").split(",")).get(device_type, "")
    moves = {each: of for each, of in dist.Backend.backend_capability.items() if each != "fake"}
    usable = [each for each, of in moves.items() if device_type in of and dist.is_backend_available(each)]
    if backend is not None and name not in usable:
        raise ValueError(
            f"process_group_backend={backend!r} moves no tensors on {device_type!r} in this build of torch; pass "
            f"{' or '.join(map(repr, usable))}, or leave the option out"
        )
    if name == "nccl" and share_a_gpu(devices) and sharing_backend() != "nccl":
        raise ValueError(
            f"parallel_devices={[device.index or 0 for device in devices]}: ranks share a GPU over NCCL from version "
            f"2.31 on, where {SHARING_VARIABLE}=1 is set; pass process_group_backend='gloo', or name each GPU once"
        )


def check_run(run: RunContext, *, sync_batchnorm: bool) -> None:
    """Checks the Trainer's settings for a strategy: devices, hosts, back end and SyncBatchNorm."""
    check_devices(run.devices)
    check_backend(run.backend, run.device_type, run.devices)
    if run.num_nodes > 1 and run.failure_timeout_s < SHORTEST_OF_HOSTS_S:  # the guardians could take one for failed
        raise ValueError(
            f"failure_timeout_s={run.failure_timeout_s:g} with num_nodes={run.num_nodes}: it must be "
            f"{SHORTEST_OF_HOSTS_S:g} or more. A host that is silent for half of it counts as gone, and a busy or "
            "throttled one may be silent for a second and more"
        )
    if sync_batchnorm and run.device_type == "cpu":
        raise ValueError(
            "sync_batchnorm=True on CPU: torch synchronises BatchNorm on GPUs only; pass sync_batchnorm=False, or "
            "use a norm without batch statistics such as GroupNorm"
        )


def check_pipeline(run: RunContext, num_stages: int, *, sync_batchnorm: bool, fewest_stages: int = 2) -> None:
    """Checks that there are enough ranks for a pipeline; it may have 1 stage if ranks also split layers."""
    if num_stages < fewest_stages:
        raise ValueError(
            f"{num_stages} device{'s' * (num_stages != 1)} a pipeline: a pipeline has a stage on each device and needs "
            "2 or more; pass devices=2, or leave strategy= out to train on one device"
        )
    if run.world_size % num_stages:
        raise ValueError(
            f"pipeline_parallel_size={num_stages} does not divide the {run.world_size} ranks of {run.num_nodes} x "
            f"{run.ranks_per_host} devices into pipelines; pass a divisor of {run.world_size}"
        )
    if sync_batchnorm:
        raise ValueError(
            "sync_batchnorm=True: the stages of a pipeline have no BatchNorm in common; pass sync_batchnorm=False"
        )


def check_averages(average_every: int, outer: object, **of_gradients: object) -> None:
    """Raises ValueError for options of steps alone that are out of range, or do not fit those about gradients."""
    check_number("average_every", average_every, whole=True)
    for name, value in of_gradients.items():
        if average_every > 1 and value is not None and (outer is None or name != "compression"):
            raise ValueError(
                f"average_every={average_every} and {name}={value!r}: that works on gradients, which do not travel "
                "when models are averaged; leave one of the two out. An outer_optimizer sends changes, which can be "
                "compressed"
            )
    if outer is None:
        return
    if outer != "nesterov" and not (isinstance(outer, Mapping) and {*outer} <= {"lr", "momentum"}):
        raise ValueError(f"outer_optimizer={outer!r}: pass 'nesterov', or a mapping of lr and momentum")
    for name, value in outer.items() if isinstance(outer, Mapping) else ():
        check_number(f"outer_optimizer: {name}", value, least=None if name == "lr" else 0)
        if name == "momentum" and value >= 1:
            raise ValueError(f"outer_optimizer: momentum={value!r} is out of range; pass a number from 0 to below 1")
    if average_every == 1:
        raise ValueError(
            f"outer_optimizer={outer!r} with average_every=1: it steps with what each rank changes in several steps of "
            "its own; pass average_every=50, for example, or leave it out"
        )


def check_scales(precision: Precision, average_every: int) -> None:
    """Raises ValueError if ranks that step alone would scale their losses each by a factor of its own."""
    if average_every > 1 and getattr(precision, "scaler", None) is not None:
        raise ValueError(
            f"average_every={average_every} with precision={precision.precision!r}: ranks that "
            "step alone would each scale their losses differently; use precision='bf16-mixed' or '32-true'"
        )
