"""Hugging Face models: their lists of blocks, their caches of keys and values, and their generation of text.

``transformers`` is not imported; its models are recognised by their attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.nn import Module, ModuleList

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.replaced_attributes import replaced


def models_in(module: Module) -> dict[str, Module]:
    """Names and modules of the Hugging Face models in ``module``, inner ones included."""
    return {
        path: part
        for path, part in module.named_modules()
        if hasattr(part, "base_model_prefix") and hasattr(part, "config")
    }


def block_lists(module: Module) -> list[str]:
    """Names of the lists of blocks of the Hugging Face models in ``module``.

    These are the lists in a model's ``base_model_pp_plan``. Without a plan, they are the lists of classes that must not
    be split (``_no_split_modules``).
    """
    found = []
    for path, model in models_in(module).items():
        if getattr(model, "base_model", None) is not model:
            continue
        plan = getattr(model.config, "base_model_pp_plan", None)
        blocks = set(getattr(model, "_no_split_modules", None) or ())
        for name, part in model.named_modules():
            planned = name in plan if plan else {type(layer).__name__ for layer in part.children()} <= blocks
            if isinstance(part, ModuleList) and len(part) > 0 and planned:
                found.append(f"{path}.{name}" if path else name)
    return found


@contextmanager
def models_in_stages(module: Module) -> Iterator[None]:
    """Within the block the Hugging Face models in a module cache nothing and refuse to generate.

    A stage would fill the cache of keys and values for its own blocks only, and a block that is computed again in
    backward would find the keys and values of its first run.
    """
    hook = partial(without_cache, "each stage of a pipeline would fill the cache for its own blocks only")
    with ExitStack() as undo:
        for model in caching_models(module):
            undo.callback(model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
        for model in models_in(module).values():
            if callable(getattr(model, "generate", None)):
                undo.enter_context(replaced(model, generate=_refuse_to_generate))
        yield


def caching_models(module: Module) -> list[Module]:
    """The Hugging Face models in ``module`` that can cache keys and values."""
    return [m for m in models_in(module).values() if "use_cache" in inspect.signature(m.forward).parameters]


def without_cache(
    problem: str, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """A hook before the forward pass of a model: the model then caches no keys and values.

    Raises:
        PipelineError: the model is asked to cache them, which would cause ``problem``.
    """
    if kwargs.get("use_cache"):
        raise PipelineError(f"{type(model).__name__} is called with use_cache=True, and {problem}; leave it out")
    return args, {**kwargs, "use_cache": False}


def _refuse_to_generate(*args: Any, **kwargs: Any) -> Any:
    raise PipelineError(
        "generate() runs the model once for every token, and the stages of a pipeline run it once a step; save a "
        "checkpoint, load it on one device and generate there"
    )
