"""Preparation of a split model for the batches of a run: tracing, uses of parameters, measured balance, and checks.

::

    first batch     split layers over a tensor group -> trace -> find the uses of parameters -> measure, split again
                    -> prove that steps equal those of one device
    other batches   the proof again, when it rests on something that has changed
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_multigpu.engine.micro_batches import cloned
from lightning_multigpu.engine.pipeline.measuring.layer_costs import layer_costs
from lightning_multigpu.engine.pipeline.measuring.uses import lacking
from lightning_multigpu.engine.pipeline.splitting.traced_chain import TracedChain
from lightning_multigpu.engine.step_state import preserved_values, seed_of, without_differentiation
from lightning_multigpu.engine.training_memory import held_bytes
from lightning_multigpu.planning.numbers import ms, size
from lightning_multigpu.planning.pipelines.balance import Bounds
from lightning_multigpu.planning.pipelines.stage_costs import MeasuredBalance, PartCost, StageCosts
from lightning_multigpu.strategies.pipeline.proof import Proof
from lightning_multigpu.strategies.steps.dry_run import without_trace
from lightning_multigpu.strategies.steps.step_logs import Record

if TYPE_CHECKING:
    from lightning_multigpu.strategies.pipeline.running_pipeline import RunningPipeline, TrainingBatch


class Preparation:
    """Splits a pipeline's model by its first batch, and checks its steps; all methods are collectives."""

    def __init__(self, pipeline: RunningPipeline) -> None:
        self._pipeline, self._model, self._options = pipeline, pipeline.model, pipeline.options
        self._world, self._tensor_axis = pipeline.strategy.collectives.world, pipeline.tensor_axis
        self._will_train = self._model.module.trainer.state.fn == TrainerFn.FITTING
        measures = self._will_train and self._model.group.num_ranks > 1
        self._balance_due = self._options.measured_balance if measures else None
        self._is_settled = False
        self._is_split = False
        self._prepared: set[Any] = set()  # the kinds of training steps, and the loaders of others
        self._lines: set[str] = set()

    def prepare(self, batch: TrainingBatch) -> None:
        """Does the work of the first batch before its step, and proves steps of another kind.

        Raises:
            ValueError: the losses or the gradients of the micro-batches do not add up to those of the batch.
            PipelineError: the step cannot be split, or depends on values that an earlier step has kept elsewhere.
        """
        trainer = self._model.module.trainer
        # What a proof that steps equal those of one device rests on; the second epoch may train in another way.
        kind = (batch.trainable, tuple(map(id, trainer.optimizers)), min(trainer.current_epoch, 1))
        if kind in self._prepared:
            return
        proof = Proof(self._pipeline, batch) if self._options.verify_steps > 0 and batch.counts else None
        splits = self._tensor_axis is not None and not self._is_split  # after that no rank has whole layers
        if proof is not None and splits:
            proof.compute()
        if not self._is_split:
            self._is_split = True
            self._split(batch)
        if proof is not None and splits:
            self._compare(proof)
        elif proof is not None:
            self.prove(batch)
        if batch.counts:
            self._prepared.add(kind)

    def prove(self, batch: TrainingBatch) -> None:
        """Proves the step of a batch, unless layers are split over a tensor group; errors as for :meth:`prepare`."""
        if self._tensor_axis is None:
            proof = Proof(self._pipeline, batch)
            proof.compute()
            self._compare(proof)

    def _compare(self, proof: Proof) -> None:
        proof.compare()
        if proof.line and proof.line not in self._lines:  # a later proof would only repeat it
            self._lines.add(proof.line)
            rank_zero_info(f"{proof.line}.")

    def prepare_evaluation(self, hook: str, *args: Any, **kwargs: Any) -> None:
        """Traces the model, unless that is done, and finds the uses of parameters by the first step of a loader."""
        if (loader := (hook, *args[2:])) in self._prepared:
            return
        self._model.ownership.check_places()
        if not self._model.chain.is_arranged:
            self._trace(hook, *args, will_train=self._will_train, **kwargs)
        self._find_uses(hook, *args, **kwargs)
        self._prepared.add(loader)

    # The split

    def _split(self, batch: TrainingBatch) -> None:
        part, others = cloned(batch.parts[0]), batch.others
        if self._tensor_axis is not None:
            self._tensor_axis.split(lambda: self._pipeline.loss_of(cloned(part), others), self._world)
        with self._pipeline.strategy.precision_plugin.train_step_context():
            if not self._model.chain.is_arranged:
                self._trace("training_step", part, *others, will_train=True)
            with without_differentiation():
                self._find_uses("training_step", part, *others)
            if self._balance_due is not None:
                balance, self._balance_due = self._balance_due, None
                self._split_by_costs(balance, batch)
                with without_differentiation():
                    self._find_uses("training_step", part, *others)  # of layers that other ranks have now

    def _split_again(self, bounds: Bounds) -> None:
        self._model.split_again(bounds)
        self._pipeline.runner = self._pipeline.new_runner(self._pipeline.recorder)

    def _trace(self, hook: str, *args: Any, will_train: bool, **kwargs: Any) -> None:
        """Traces a step of the module, and gives each rank the parameters that its stages use."""

        def step() -> Any:
            with self._pipeline.logs.recording(pass_on=False):
                return self._pipeline.call(hook, *args, **kwargs)

        chain = self._model.chain
        assert isinstance(chain, TracedChain)
        with without_trace(self._model.module):
            chain.arrange(step, will_train=will_train)
        self._model.split_again(self._model.ownership.bounds)

    def _find_uses(self, hook: str, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Runs a step until no stage lacks a parameter, and prints the split, later on if it changes."""
        model, options, is_first = self._model, self._options, not self._is_settled
        self._is_settled = True
        records: list[Record] = []

        def step() -> Any:
            with self._pipeline.logs.recording(pass_on=False) as found:
                output = self._pipeline.call(hook, cloned(batch), *args, **kwargs)
            records[:] = found
            return output

        def left() -> Any:
            return [record.value for record in records], [vars(part) for part in model.module.modules()]

        everyone = self._world if self._will_train else model.stages
        balances = hook == "training_step" and options.measured_balance is None
        has_moved = False
        with nullcontext() if self._tensor_axis is None else self._tensor_axis.group.alone():
            while model.group.num_ranks > 1 and any(holding.is_outside for holding in model.ownership.holdings):
                with without_trace(model.module), preserved_values(model.ownership.held()):
                    uses = lacking(model.ownership, step, left, seed_of(self._pipeline.seed, 4))
                model.chain.learn(everyone.gather_objects(uses))
                if model.split_again(model.ownership.bounds):
                    has_moved = True
                    continue
                # The old split counted moved parameters elsewhere; other layers may need others.
                bounds = options.bounds(model.chain, model.group.num_ranks) if has_moved and balances else None
                if bounds is None or bounds == model.ownership.bounds:
                    break
                self._split_again(bounds)
        if (is_first or has_moved) and self._balance_due is None and model.group.num_ranks > 1:
            rank_zero_info(model.describe())

    def _split_by_costs(self, balance: MeasuredBalance, batch: TrainingBatch) -> None:
        """Measures the layers, splits them to minimise the largest cost of a rank, and prints the prediction."""
        model, before = self._model, self._model.ownership.bounds
        costs = self._measured_costs(batch)
        self._split_again(self._world.broadcast_object(costs.bounds(balance), 0))
        model.meter.discard()

        def predicted(bounds: Bounds) -> str:
            most = size(costs.largest_bytes(bounds))
            return f"{ms(costs.step_s(bounds))}, at most {most} for the stages of a rank"

        rank_zero_info(
            f"Pipeline over {model.chain.name!r}, {costs.num_layers} layers in {len(model.ownership.bounds)} stages by "
            f"balance={balance!r}; per micro-batch, as measured on the first batch:\n"
            f"{costs.describe(model.ownership.bounds, model.group.ranks)}\n"
            f"  predicted for a batch of {costs.num_micro_batches} micro-batches, without the optimizer: "
            f"{predicted(model.ownership.bounds)}\n  by balance='parameters' it would be: {predicted(before)}\n"
            f"{model.describe_ranks()}"
        )

    def _measured_costs(self, batch: TrainingBatch) -> StageCosts:
        """The costs of the layers, the same on all stages."""
        model, pipeline, part = self._model, self._pipeline, cloned(batch.parts[0])
        with without_trace(model.module), preserved_values(model.ownership.held()):
            step = partial(pipeline.loss_of, part, batch.others)
            found = layer_costs(model.ownership, step, pipeline.seed, pipeline.recompute)
        parts: dict[int, PartCost] = {}
        for of_rank in model.stages.gather_objects(found):
            parts |= of_rank
        optimizers = model.module.trainer.optimizers
        first, last = model.ownership.at_ends()
        before, after = (held_bytes(own, optimizers).total for own in (first, last))
        return StageCosts(
            [parts.get(part, PartCost()) for part in range(len(model.chain) + 2)],
            [before, *model.chain.training_bytes(optimizers), after],
            schedule=self._options.schedule,
            num_ranks=model.group.num_ranks,
            stages_per_rank=self._options.num_stages_of_rank,
            num_micro_batches=len(batch.parts),
        )
