"""Ranks that take steps of their own, and meet every few steps, before validation, in checkpoints and at the end."""

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD, Adam

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.engine.data_parallel.averaging import ModelAverager
from tests.fake_gpu import DEVICE, FakeGPU
from tests.modules import Normalised
from tests.strategies.tasks import (
    Case,
    Classifier,
    eval_loader,
    fit_module,
    make_strategy,
    make_trainer,
    state,
    train_loader,
)
from tests.world import World, init_group, rank

EVERY = 3
PARAMETER_BYTES = (16 * 6 + 16 + 3 * 16 + 3) * 8
NUM_PARAMETERS = 4


class Recorder(Callback):
    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.at_validation: list[dict[str, Tensor]] = []
        self.after_steps: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.batches.append([value.clone() for value in batch])

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.after_steps.append(state(module))

    def on_validation_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.at_validation.append(state(module))


def train(
    directory: str,
    *,
    num_samples: int = 61,
    options: dict[str, Any] | None = None,
    changes: Sequence[Callback] = (),
    ckpt_path: str | None = None,
    make: type[Classifier] = Classifier,
    **trainer_options: Any,
) -> dict[str, Any]:
    case = Case(num_samples=num_samples, max_epochs=1, trainer=trainer_options)
    strategy = make_strategy("ring_ddp", **{"average_every": EVERY, **(options or {})})
    recorder, module = Recorder(), make()
    saver = ModelCheckpoint(directory, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    data, given = (train_loader(case, 2), eval_loader()), {"callbacks": [*changes, recorder, saver]}
    trainer = fit_module(module, strategy, 2, case, *data, enable_checkpointing=True, ckpt_path=ckpt_path, **given)
    trainer.save_checkpoint(f"{directory}/after.ckpt")
    trainer.save_checkpoint(f"{directory}/weights.ckpt", weights_only=True)
    strategy.meter.flush()
    return {
        "batches": recorder.batches,
        "after_steps": recorder.after_steps,
        "at_validation": recorder.at_validation,
        "weights": state(module),
        "transfers": [[(t.count, t.size_bytes) for t in s.of("all_reduce", "data")] for s in strategy.meter.steps],
        "messages": [{t.operation: t.count for t in s.operations if t.group == "data"} for s in strategy.meter.steps],
        "sent": [sum(t.sent_bytes for t in s.of("all_reduce", "data")) for s in strategy.meter.steps],
    }


def by_hand(
    batches: list[list[Any]], meetings: set[int], outer: dict[str, Any] | None = None, saves: Collection[int] = ()
) -> list[dict[str, Tensor]]:
    """All ranks in this process; the ranks' weights after the last step.

    With ``outer``, the options of an outer optimizer, momentum is averaged when a checkpoint is saved, and the weights
    are halved after step 3, as :class:`Halves` does.
    """
    modules = [Classifier().double() for _ in batches]
    optimizers = [SGD(module.parameters(), lr=0.2, momentum=0.9) for module in modules]
    anchor = Classifier().double()
    outer_sgd = SGD(anchor.parameters(), nesterov=True, **(outer or {"lr": 0.7, "momentum": 0.9}))
    for step in range(len(batches[0])):
        for module, optimizer, mine in zip(modules, optimizers, batches, strict=True):
            x, y = mine[step]
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if step + 1 in meetings:
            for kept, *same in zip(*(module.parameters() for module in (anchor, *modules)), strict=True):
                buffers = [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, same, strict=True)]
                kept.grad = kept.detach() - mean_of(same)
                for tensors in (same, buffers) if outer is None else (buffers,) if step + 1 in saves else ():
                    mean = mean_of(tensors)
                    for tensor in tensors:
                        tensor.data.copy_(mean)
            if outer is not None:
                outer_sgd.step()
                for module in modules:
                    module.load_state_dict(anchor.state_dict())
        for module in (anchor, *modules) if outer is not None and step + 1 == 3 else ():
            halve(module)
    return [state(module) for module in modules]


def mean_of(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.detach() for tensor in tensors]).mean(0)


@torch.no_grad()
def halve(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.mul_(0.5)


class Halves(Callback):
    """Changes the weights on all ranks, right after an average."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == 3:
            halve(module)


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_weights_and_momentum_are_those_of_local_sgd_by_hand(world2: World, tmp_path: Path) -> None:
    """8 steps, the last of 3 and 2 samples: meetings after 3, at the checkpoint after 4, at 7, at that of 8.

    They send weights and momentum together, and four bytes a parameter to agree on whose momentum there is.
    """
    results = world2.run(train, str(tmp_path))
    expected = by_hand([result["batches"] for result in results], {3, 4, 7, 8})
    for result, weights in zip(results, expected, strict=True):
        assert_close(result["weights"], weights)
        assert result["transfers"][:3] == [[], [], [(2, 2 * PARAMETER_BYTES + 4 * NUM_PARAMETERS)]]
    torch.testing.assert_close(results[0]["weights"], results[1]["weights"], rtol=0, atol=0)
    alone = [result["after_steps"][1] for result in results]
    assert not torch.equal(*(weights["layers.0.weight"] for weights in alone)), "they are on their own between meetings"


def test_validation_checkpoints_and_the_end_see_the_average(world2: World, tmp_path: Path) -> None:
    results = world2.run(train, str(tmp_path), options={"average_every": 100}, num_samples=56, val_check_interval=5)
    batches = [result["batches"] for result in results]
    at_4, at_5, at_the_end = (by_hand([mine[:step] for mine in batches], {4, 5, 7})[0] for step in (4, 5, 7))
    for result in results:
        assert_close(result["weights"], at_the_end)
        assert_close(result["at_validation"][0], at_5)
    saved = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    assert_close(saved["state_dict"], at_4)
    assert len(saved["optimizer_states"][0]["state"]) == NUM_PARAMETERS


def test_statistics_of_the_batches_are_averaged_with_the_weights(world2: World, tmp_path: Path) -> None:
    """They were broadcast before each step, so that ranks which step alone met all the same."""
    results = world2.run(train, str(tmp_path), make=Normalised, num_samples=56, val_check_interval=5)
    means, at = [torch.zeros(6, dtype=torch.float64)] * 2, {}
    for step, batches in enumerate(zip(*(result["batches"] for result in results), strict=True), 1):
        means = [0.9 * mean + 0.1 * x.mean(0) for mean, (x, _) in zip(means, batches, strict=True)]
        if step in {3, 4, 5, 7}:
            means = [mean_of(means)] * 2
        at[step] = means
    saved = load(tmp_path / "step=4.ckpt")["state_dict"]
    for rank_, result in enumerate(results):
        found = {2: result["after_steps"][1], 4: saved, 5: result["at_validation"][0], 7: result["weights"]}
        for step, tensors in found.items():
            torch.testing.assert_close(tensors["normalise.running_mean"], at[step][rank_], rtol=1e-9, atol=1e-12)
        # Whose momentum there is, weights with momentum, means with variances; and the number of batches.
        assert result["messages"][:3] == [{}, {}, {"all_reduce": 3, "broadcast": 1}]


ENTRY = "outer_optimizer"
load = partial(torch.load, weights_only=True)
OUTER = {"lr": 0.7, "momentum": 0.9}
INT8 = {"compression": "int8", "shared_memory": False}


def train_and_resume(directory: str, *of_cases: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """For each case a run and, without compression, one that resumes from its checkpoint after step 4."""
    found = []
    for number, options in enumerate(of_cases):
        run = partial(train, f"{directory}/{number}", options=options, changes=[Halves()])
        found.append([run()])
        if "compression" not in options:
            found[-1].append(run(ckpt_path=f"{directory}/{number}/step=4.ckpt"))
    return found


def test_an_outer_optimizer_steps_with_the_mean_change_and_resumes(world2: World, tmp_path: Path) -> None:
    """In 64 bits as one process does it by hand, and to the same bits when resumed.

    The default options, and a mapping; averages are after 3 steps, at the checkpoint after 4, at 7, at that of 8.
    """
    options = [{"outer_optimizer": "nesterov"}, {"outer_optimizer": {"lr": 0.5, "momentum": 0.8}}]
    compressed = {"outer_optimizer": "nesterov", **INT8}
    runs = world2.run(train_and_resume, str(tmp_path), *options, compressed)
    for case, outer in enumerate([OUTER, {"lr": 0.5, "momentum": 0.8}]):
        batches = [of_rank[case][0]["batches"] for of_rank in runs]
        for of_rank, weights in zip(runs, by_hand(batches, {3, 4, 7, 8}, outer, saves={4, 8}), strict=True):
            assert_close(of_rank[case][0]["weights"], weights)
    for of_rank in runs:
        for whole, resumed in of_rank[:2]:
            assert len(resumed["batches"]) == 4
            torch.testing.assert_close(resumed["weights"], whole["weights"], rtol=0, atol=0)
    exact, *_, int8 = (case[0] for case in runs[0])
    assert exact["transfers"][:3] == [[], [], [(1, PARAMETER_BYTES)]]
    assert int8["sent"][2] == PARAMETER_BYTES / 8 + 2 * 4, "a byte for each number and a scale for each half"
    case = Case(num_samples=61, max_epochs=1)
    for number in range(3):
        at_8, after, weights = (load(tmp_path / f"{number}/{name}.ckpt") for name in ("step=8", "after", "weights"))
        torch.testing.assert_close(at_8[ENTRY], after[ENTRY], rtol=0, atol=0)
        torch.testing.assert_close(at_8["optimizer_states"], after["optimizer_states"], rtol=0, atol=0)
        assert len(at_8[ENTRY]) == NUM_PARAMETERS
        assert ENTRY not in weights
    on_one_device = fit_module(Classifier(), None, 1, case, ckpt_path=tmp_path / "0/step=4.ckpt")
    assert on_one_device.global_step == 8


def test_an_outer_optimizer_steps_on_one_rank_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "NODE_RANK"):  # which the strategy sets
        monkeypatch.setenv(name, "0")
    case, recorder, module = Case(num_samples=61, max_epochs=1), Recorder(), Classifier()
    strategy = make_strategy("ring_ddp", average_every=EVERY, outer_optimizer="nesterov")
    fit_module(module, strategy, 1, case, train_loader(case, 1), callbacks=[Halves(), recorder])
    dist.destroy_process_group()
    assert_close(state(module), by_hand([recorder.batches], {3, 6, 8}, OUTER)[0])


def two_moments() -> list[Tensor]:
    """Two parameters; rank 1 has no state of the second one."""
    init_group()
    parameters = [nn.Parameter(torch.full((3,), float(rank()))), nn.Parameter(torch.full((2,), 10.0 * rank()))]
    optimizer = SGD(parameters, lr=1.0, momentum=0.9)
    optimizer.state[parameters[0]] = {"momentum_buffer": torch.full((3,), 1.0 + rank()), "step": torch.tensor(5.0)}
    if rank() == 0:
        optimizer.state[parameters[1]] = {"momentum_buffer": torch.full((2,), 7.0)}

    def average(tensor: Tensor) -> None:
        dist.all_reduce(tensor)
        tensor /= 2

    averager = ModelAverager(2, average)
    assert not averager.average(parameters, [optimizer]), "nobody has stepped"
    assert [averager.stepped(), averager.stepped()] == [False, True]
    assert averager.average(parameters, [optimizer])
    assert not averager.stepped(), "the count begins anew"
    second = optimizer.state[parameters[1]].get("momentum_buffer", torch.empty(0))
    return [*[p.detach() for p in parameters], optimizer.state[parameters[0]]["momentum_buffer"], second]


def test_state_that_one_rank_lacks_stays_as_it_is(world2: World) -> None:
    first, second = world2.run(two_moments)
    for of_one in (first, second):
        assert of_one[0].tolist() == [0.5] * 3
        assert of_one[1].tolist() == [5.0] * 2
        assert of_one[2].tolist() == [1.5] * 3
    assert first[3].tolist() == [7.0] * 2
    assert second[3].numel() == 0


def test_nccl_is_given_tensors_of_the_gpu_only(fake_gpu: FakeGPU) -> None:
    """NCCL refuses a tensor in the host's memory, such as the flags of who has state, or Adam's count of steps."""
    parameters = [nn.Parameter(torch.ones(3, device=DEVICE)), nn.Parameter(torch.ones((), device=DEVICE))]
    optimizer = Adam(parameters, foreach=False)
    for parameter in parameters:
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(parameter)}
    given: list[tuple[str, int]] = []
    averager = ModelAverager(1, lambda flat: given.append((flat.device.type, flat.numel())))
    averager.stepped()
    assert averager.average(parameters, [optimizer])
    assert given == [("cuda", 2), ("cuda", 8), ("cuda", 1)]
    assert optimizer.state[parameters[1]]["step"].device.type == "cpu"


def test_losses_that_ranks_would_scale_differently_are_refused() -> None:
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="average_every=2 with precision='16-mixed'"):
        make_trainer(Case(), RingDDPStrategy(average_every=2), 2, precision=None, plugins=[scaler])
