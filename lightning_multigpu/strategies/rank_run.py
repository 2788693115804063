"""The launch of a strategy's ranks, and how a rank joins the others: guardian, process groups, signals and checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_multigpu._lightning_internals import IS_INTERACTIVE
from lightning_multigpu.engine.data_parallel.trained_parameters import check_embeddings, check_has_shapes
from lightning_multigpu.job.batch_feed import check_loaders
from lightning_multigpu.job.joining import check_model, table_of
from lightning_multigpu.job.launchers.script_launcher import ScriptLauncher
from lightning_multigpu.job.launchers.spawn_launcher import SpawnLauncher
from lightning_multigpu.job.process_groups import ProcessGroups
from lightning_multigpu.job.run_context import RunContext
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.steps.dry_run import check_takes_batch

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_multigpu.strategies.base import MultiGPUStrategy


def context_of(strategy: MultiGPUStrategy) -> RunContext:
    """The ranks, devices and limits of the run, as they are set now."""
    assert strategy.cluster_environment is not None
    return RunContext(
        environment=strategy.cluster_environment,
        devices=tuple(strategy.parallel_devices or ()),
        num_nodes=strategy.num_nodes,
        backend=strategy.process_group_backend,
        failure_timeout_s=strategy.failure_timeout_s,
        hang_report_s=strategy.hang_report_s,
        join_timeout_s=strategy.join_timeout_s,
    )


def launcher_of(strategy: MultiGPUStrategy) -> ScriptLauncher | SpawnLauncher:
    """The launcher of the ranks.

    Raises:
        ValueError: a setting of the Trainer does not fit, or there is no script that further ranks could run.
    """
    run, start_method = strategy.run_context, strategy._start_method
    option_checks.check_run(run, sync_batchnorm=strategy._layer_sync is not None)
    if start_method == "spawn" and IS_INTERACTIVE:
        start_method = "fork"  # a spawned process cannot import the code of a notebook
    if start_method == "popen" and IS_INTERACTIVE and not run.environment.creates_processes_externally:
        name = strategy.name_with_spawn
        spawning = f"{type(strategy).__name__}(start_method='spawn')" if name is None else repr(name)
        raise ValueError(
            f"in a notebook or a REPL there is no script that further ranks could run: use strategy={spawning}"
        )
    if start_method == "popen":
        return ScriptLauncher(run, strategy.joining, strategy.check_before_launch)
    return SpawnLauncher(strategy, run, strategy.joining, strategy.check_before_launch, start_method)


def check_before_launch(strategy: MultiGPUStrategy, trainer: pl.Trainer) -> None:
    """Raises ValueError if a callback refuses the run, or the strategy cannot run the module."""
    check_callbacks_before_launch(trainer)
    is_fit = trainer.state.fn == TrainerFn.FITTING
    if strategy.data_parallel_size > 1 and is_fit:
        check_embeddings(trainer.lightning_module)
    if is_fit and (strategy.tensor_parallel_size > 1 or strategy.share_proof.num_steps):
        check_takes_batch(trainer.lightning_module)
    if not is_overridden("configure_model", trainer.lightning_module):  # it makes the layers later
        if is_fit:
            check_has_shapes(trainer.lightning_module)
        strategy.steps.choose_layers(trainer)


def join(strategy: MultiGPUStrategy) -> None:
    """Connects this rank to the others, whose settings have to be alike; signals are deferred from then on."""
    run, watch = strategy.run_context, strategy.failure_watch
    reset_seed()
    trainer: Any = None if strategy.lightning_module is None else strategy.lightning_module._trainer
    callbacks = [] if trainer is None else trainer.callbacks
    settings = {
        "strategy": type(strategy),
        **{f"option {name}": value for name, value in strategy.options.items()},
        "precision": strategy.precision_plugin.precision,
        "accumulate_grad_batches": getattr(trainer, "accumulate_grad_batches", 1),
        **{
            type(c).__name__: dict(sorted(c.scheduling.items()))
            for c in callbacks
            if isinstance(c, GradientAccumulationScheduler)
        },
    }
    with strategy.joining.limited(run):
        groups = ProcessGroups(
            run.environment,
            strategy.root_device,
            (strategy.data_parallel_size, strategy.pipeline_parallel_size, strategy.tensor_parallel_size),
            backend=run.backend,
            timeout=strategy._timeout,
            store=strategy.joining.meet(run, table_of(run, settings)),
        )
        strategy._process_group_backend = groups.backend
        strategy.collectives.join(groups)
    watch.joined(groups.cut, run.world_size)
    strategy.meter.notes = watch.flight_recorder
    client = watch.client
    assert client is not None
    counts = strategy.signals.begin(
        run.environment,
        patience_s=run.failure_timeout_s,
        on_signal=client.signalled,
        on_stuck=watch.cut_loose,
    )
    if counts:
        client.counts_interrupts()


def check(strategy: MultiGPUStrategy, trainer: pl.Trainer) -> None:
    """Checks that ranks have the same model, in which layers have shapes, and loaders that can be shared out."""
    module, client, is_fit = strategy._module, strategy.failure_watch.client, trainer.state.fn == TrainerFn.FITTING
    if is_fit:
        check_has_shapes(module)
    check_loaders(trainer)
    if strategy.groups is not None:
        check_model(module, strategy.collectives.world)
    directory = str(trainer.log_dir or trainer.default_root_dir)  # a collective
    if client is not None and "://" not in directory:  # the guardian writes a failure's file to a local disk only
        client.report_to(directory, node_rank=strategy.node_rank if strategy.num_nodes > 1 else None)
    if strategy.data_parallel_size > 1 and is_fit:
        check_embeddings(module)  # those of configure_model too


def check_callbacks_before_launch(trainer: pl.Trainer) -> None:
    """Calls ``check_before_launch`` of the callbacks that have it."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if (check := getattr(callback, "check_before_launch", None)) is not None:
            check(trainer)
