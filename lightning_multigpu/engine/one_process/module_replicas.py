"""Replicas of a module, one for each device; each batch gets new ones, as in torch's DataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from lightning_multigpu.communication.tensors import size_bytes
from lightning_multigpu.engine.data_parallel.trained_parameters import check_has_shapes


class ModuleReplicas:
    """The replicas of a module: the module itself on the first device, and shallow copies on the other devices.

    A copy has the attributes that the module has at that moment, so that a change of the module (train or eval, a
    frozen layer, an attribute that a hook sets) reaches every replica with the next batch::

                        module, replica 0     replica 1, 2, ... on CPUs     replica 1, 2, ... on GPUs
        parameters      its own               the same objects              copies from the first GPU
        buffers         its own               copies                        copies from the first GPU
        attributes      its own               those of the module           those of the module
        lists of        its own               lists of copies               lists of copies
          modules

    Changes of buffers and attributes in other replicas than the first are lost, as under torch's DataParallel.

    Args:
        module: the module, on the first device.
        devices: the devices of the replicas, all of one type.
        substitute: returns the module that replaces a submodule in the replica of this number; None for a shallow copy.

    Raises:
        ValueError: the module has a part that cannot be copied.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        substitute: Callable[[nn.Module, int], nn.Module | None] = lambda part, number: None,
    ) -> None:
        check_can_be_copied(module)
        self._module = module
        self._devices = devices
        self._substitute = substitute
        self._containers = [
            (part, name)
            for part in module.modules()
            for name, value in vars(part).items()
            if name not in _OF_TORCH and any(isinstance(entry, nn.Module) for entry in tree_iter(value))
        ]

    def make(self, count: int) -> list[nn.Module]:
        """The ``count`` replicas for the next batch; the first is the module itself."""
        originals = _travelling(self._module, self._devices[0].type)
        tensors = [_copied_tensors(originals, device) for device in self._devices[1:count]]
        return [self._module, *(self._copy(number, tensors[number - 1]) for number in range(1, count))]

    def size_bytes(self) -> int:
        """Bytes that are copied to each device but the first for a batch."""
        return sum(size_bytes(tensor) for tensor in _travelling(self._module, self._devices[0].type))

    def _copy(self, number: int, tensors: dict[int, Tensor]) -> nn.Module:
        copies: dict[int, nn.Module] = {}
        substitutes: set[int] = set()

        def copied(part: nn.Module) -> nn.Module:
            if id(part) not in copies:
                substitute = self._substitute(part, number)
                if substitute is None:
                    copies[id(part)] = part._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
                    fill(part, copies[id(part)])
                else:
                    copies[id(part)] = substitute
                    substitutes.add(id(part))
            return copies[id(part)]

        def fill(part: nn.Module, copy: nn.Module) -> None:
            for name, child in part._modules.items():
                copy._modules[name] = None if child is None else copied(child)
            for name, parameter in part._parameters.items():
                if parameter is None:
                    copy._parameters[name] = None
                else:
                    setattr(copy, name, tensors.get(id(parameter), parameter))  # recurrent layers keep lists of them
            for name, buffer in part._buffers.items():
                copy._buffers[name] = None if buffer is None else tensors.get(id(buffer), buffer)

        def bound(value: object) -> object:
            if isinstance(value, MethodType) and id(value.__self__) in copies:
                return MethodType(value.__func__, copies[id(value.__self__)])
            return value

        whole = copied(self._module)
        for part, name in self._containers:  # threads would share modules that are kept in a plain list
            if id(part) not in substitutes and name in vars(part):
                of_copies = tree_map_only(nn.Module, copied, vars(part)[name])
                object.__setattr__(copies[id(part)], name, of_copies)
        for copy in copies.values():
            for name, value in [*vars(copy).items()]:
                # A bound method in an attribute or a hook would use the module's own tensors.
                if isinstance(value, MethodType):
                    object.__setattr__(copy, name, bound(value))
                elif isinstance(value, dict) and "_hooks" in name:  # a step may register hooks on the replica
                    object.__setattr__(copy, name, type(value)((key, bound(hook)) for key, hook in value.items()))
        return whole


_OF_TORCH = vars(nn.Module()).keys()


def check_can_be_copied(module: nn.Module) -> None:
    """Raises ValueError for a submodule that a shallow copy would not copy: scripted, compiled or lazy ones."""
    check_has_shapes(module)
    for name, part in module.named_modules():
        problem = None
        if isinstance(part, torch.jit.ScriptModule):
            problem = "is a ScriptModule; pass the module that it was made from"
        elif "_orig_mod" in part._modules or part._compiled_call_impl is not None:
            problem = "is compiled, for the tensors of one device; pass the module without torch.compile"
        if problem is not None:
            raise ValueError(
                f"{name or type(part).__name__} cannot be copied to the devices: it {problem}, or use devices=1"
            )


def _travelling(module: nn.Module, device_type: str) -> list[Tensor]:
    """The tensors that are copied to each device but the first, in order; shared tensors count once."""
    tensors: Iterable[Tensor] = module.buffers()
    if device_type != "cpu":
        tensors = [*module.parameters(), *tensors]
    return list(tensors)


def _copied_tensors(originals: Iterable[Tensor], device: torch.device) -> dict[int, Tensor]:
    """Copies for a device by the ``id`` of their originals; replicas that share a GPU have copies of their own."""
    copies: dict[int, Tensor] = {}
    # Tensors made in inference mode could not be trained afterwards.
    with torch.inference_mode(mode=False), torch.no_grad():
        for original in originals:
            copy = original.to(device, non_blocking=True, copy=True)
            if isinstance(original, nn.Parameter):
                copy = nn.Parameter(copy, requires_grad=original.requires_grad)
            copies[id(original)] = copy
    return copies
