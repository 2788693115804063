"""Checks of Trainer settings that Lightning would replace silently or refuse without a fix."""

from __future__ import annotations

from collections.abc import Mapping
from pydoc import locate
from typing import Any

import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_multigpu._suggest import did_you_mean
from lightning_multigpu.commands.usage import UsageError
from lightning_multigpu.registry import STRATEGIES
from lightning_multigpu.strategies import DataParallelStrategy, MultiGPUStrategy, option_checks

_PRECISION_ALIASES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


def check_trainer_settings(trainer: Mapping[str, Any]) -> None:
    """Checks the arguments of the Trainer as they were parsed, before it is made.

    Args:
        trainer: the ``trainer`` section; classes in it are mappings with a ``class_path``.

    Raises:
        UsageError: the message names the value, the limit and the fix.
    """
    try:
        check_strategy_name(trainer["strategy"])
        device_type = _device_type(trainer["accelerator"])
        if device_type in option_checks.DEVICE_TYPES:
            check_devices(trainer["devices"], device_type)
        if device_type is not None and _is_ours(trainer["strategy"]):
            precision = str(trainer["precision"])
            option_checks.check_precision(_PRECISION_ALIASES.get(precision, precision), device_type, explicit=False)
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_strategy_name(strategy: object) -> None:
    """Checks that a strategy given by name has a registered name.

    Raises:
        ValueError: it has another name; the message lists this pack's names and Lightning's.
    """
    if not isinstance(strategy, str):
        return
    ours = [row.name for row in STRATEGIES]
    lightnings = ["auto", *(name for name in StrategyRegistry.available_strategies() if name not in ours)]
    if strategy.lower() in (*ours, *lightnings):
        return
    names = [row.name for row in STRATEGIES if row.strategy.__name__ == strategy.rpartition(".")[2]]
    if names:
        raise ValueError(f"strategy={strategy!r} is a class; pass a name of it: {', '.join(names)}")
    raise ValueError(
        f"strategy={strategy!r} is unknown. {did_you_mean(strategy, [*ours, *lightnings])}\n"
        f"  this pack's: {', '.join(ours)}\n"
        f"  Lightning's: {', '.join(lightnings)}".replace(". \n", ".\n")
    )


def path_of_strategy_class(strategy: str) -> str | None:
    """The path of this pack's strategy class of that name, given with or without its modules; None for other names."""
    name = strategy.rpartition(".")[2]
    return f"lightning_multigpu.{name}" if any(row.strategy.__name__ == name for row in STRATEGIES) else None


def check_devices(devices: object, device_type: str) -> None:
    """Checks that ``devices`` (a number, a list of GPU indices, or ``"auto"``) are on this machine.

    Raises:
        ValueError: below 1, not a number, or GPUs that the machine does not have.
    """
    gpu_count = torch.cuda.device_count() if device_type == "cuda" else 0
    if device_type == "cuda" and gpu_count == 0:
        raise ValueError("accelerator='gpu': this machine has no GPU; pass accelerator='cpu' or 'auto'")
    if devices in ("auto", None):
        return
    number, indices = _number_and_indices(devices)
    if indices is not None and device_type == "cpu":
        raise ValueError(
            f"devices={devices!r} names devices; on CPU pass the number of ranks, devices={len(indices) or 1}"
        )
    if number == -1 and device_type == "cuda":
        return
    if number is None and not indices:
        raise ValueError(
            f"devices={devices!r} is neither a number nor a list of GPUs; pass devices=1 or more, or 'auto'"
        )
    if number is not None and number < 1:
        hint = " (-1, all devices, is for GPUs)" if number == -1 else ""
        raise ValueError(
            f"devices={number}: a run needs at least 1 rank on each host{hint}; pass devices=1 or more, or 'auto'"
        )
    if device_type == "cuda":
        wanted = range(number) if number is not None else indices or []
        gpus = [torch.device("cuda", index) for index in wanted]
        option_checks.check_devices(gpus, cpu_count=option_checks.available_cpu_count(), gpu_count=gpu_count)


def _number_and_indices(devices: object) -> tuple[int | None, list[int] | None]:
    """``devices`` as Lightning reads them: either a number, or indices; neither where it is not to be read."""
    if isinstance(devices, str):
        try:
            if "," in devices:
                return None, [int(index) for index in devices.split(",") if index.strip()]
            return int(devices), None
        except ValueError:
            return None, None
    if isinstance(devices, int) and not isinstance(devices, bool):
        return devices, None
    return None, list(devices) if isinstance(devices, list) else None


def _device_type(accelerator: object) -> str | None:
    """ "cpu", "cuda" or another device's type; None where only Lightning can tell."""
    if not isinstance(accelerator, str):
        return None
    name = accelerator.lower()
    if name in ("auto", "gpu") and torch.backends.mps.is_available():
        return "mps"
    if name == "auto":
        return "cuda" if torch.cuda.device_count() else "cpu"
    return "cuda" if name == "gpu" else name


def _is_ours(strategy: object) -> bool:
    if isinstance(strategy, str):
        return strategy.lower() in {row.name for row in STRATEGIES}
    path = strategy.get("class_path") if hasattr(strategy, "get") else None
    found = locate(path) if isinstance(path, str) else None
    return isinstance(found, type) and issubclass(found, MultiGPUStrategy | DataParallelStrategy)
