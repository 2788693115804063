"""What hooks do to the state and the groups of an optimizer while ranks or servers hold parts of it."""

import copy
import functools
import io
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_multigpu.engine.errors import PipelineError
from tests.strategies.tasks import Case, Classifier, fit_module, make_strategy, state
from tests.world import World, rank

CASE = Case(max_epochs=3, num_samples=16)


class Changes(Classifier):
    def __init__(self, change: "Callable[[Changes, Any], object]") -> None:
        super().__init__()
        self.change = change
        self.shapes = [parameter.shape for parameter in self.parameters()]
        self.kept: Any = None
        self.found: list[float] = []

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.change(self, self.trainer.optimizers[0])


def clear(module: Changes, optimizer: Any) -> None:
    optimizer.state.clear()


def forget_a_layer(module: Changes, optimizer: Any) -> None:
    optimizer.state.pop(module.first.weight, None)
    optimizer.state[module.first.bias] = {}
    del optimizer.state[module.second.bias]


def put_states(module: Changes, optimizer: Any) -> None:
    for layer, size in ((module.first, 16), (module.second, 3)):
        optimizer.state[layer.bias] = {"momentum_buffer": torch.linspace(0, 0.1, size, dtype=torch.float64)}


def replace_the_mapping(module: Changes, optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def set_to_zero(module: Changes, optimizer: Any) -> None:
    for each in optimizer.state.values():
        each["momentum_buffer"].zero_()


def halve_every_tensor(module: Changes, optimizer: Any) -> None:
    for parameter, each in optimizer.state.items():
        for name in each:
            each[name] = optimizer.state[parameter][name] * 0.5


def construct_again(module: Changes, optimizer: Any) -> None:
    optimizer.__init__(module.parameters(), lr=0.1, momentum=0.8)


def load(module: Changes, optimizer: Any) -> None:
    values = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    groups = [{**values, "lr": 0.05, "params": [*range(4)]}]
    whole = [torch.linspace(0, 0.2, shape.numel(), dtype=torch.float64).view(shape) for shape in module.shapes]
    states = {number: {"momentum_buffer": tensor} for number, tensor in enumerate(whole)}
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def load_what_was_kept(module: Changes, optimizer: Any) -> None:
    if module.kept is None:
        module.kept = copy.deepcopy(optimizer.state_dict())
    else:
        optimizer.load_state_dict(module.kept)


def change_values(module: Changes, optimizer: Any) -> None:
    optimizer.param_groups[0].update(lr=0.05, momentum=0.5, weight_decay=0.01)


def make_two_groups(module: Changes, optimizer: Any) -> None:
    if len(optimizer.param_groups) == 1:
        optimizer.param_groups[0]["params"] = [*module.first.parameters()]
        optimizer.add_param_group({"params": [*module.second.parameters()], "lr": 0.05})


def leave_a_layer_out(module: Changes, optimizer: Any) -> None:
    for parameter in module.second.parameters():
        optimizer.state.pop(parameter, None)
    optimizer.param_groups[0]["params"] = [*module.first.parameters()]


def take_another(module: Changes, optimizer: Any) -> None:
    module.trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)]


def norm_of_all(module: Changes, optimizer: Any) -> None:
    module.found.append(float(sum(each["momentum_buffer"].norm() for each in optimizer.state.values())))


def norm_of_each(module: Changes, optimizer: Any) -> None:
    module.found += [float(optimizer.state[p]["momentum_buffer"].norm()) for p in module.parameters()]


def log_norm(module: Changes, optimizer: Any) -> None:
    module.log("norm", sum(each["momentum_buffer"].norm() for each in optimizer.state.values()), sync_dist=True)


def gather(module: Changes, optimizer: Any) -> None:
    whole = getattr(module.trainer.strategy, "whole", lambda value: value)
    module.found += [float(whole(each["momentum_buffer"]).norm()) for each in optimizer.state.values()]


def write(module: Changes, optimizer: Any) -> None:
    torch.save(optimizer.state_dict(), io.BytesIO())


FOLLOWED = (
    clear,
    forget_a_layer,
    put_states,
    replace_the_mapping,
    construct_again,
    load,
    change_values,
    make_two_groups,
    leave_a_layer_out,
)
IN_PLACE = (set_to_zero, halve_every_tensor, load_what_was_kept)
READS = (norm_of_all, norm_of_each, log_norm, gather, write)
SERVERS = ("cpu_ps", "sync_ps")
CHANGES = {
    **dict.fromkeys(SERVERS, FOLLOWED),
    **dict.fromkeys(("ddp_sharded", "gpipe"), FOLLOWED + IN_PLACE),
    "tensor_split": (*FOLLOWED, *IN_PLACE, take_another),
}


def strategy_of(name: str | None) -> Any:
    return make_strategy(name, pipeline_parallel_size=1) if name == "hybrid" else name


def train(changes: Sequence[Callable[..., object]], strategy: str | None, ranks: int) -> list[dict[str, Tensor]]:
    found = []
    for change in changes:
        module = Changes(change)
        fit_module(module, strategy_of(strategy), ranks, CASE)
        found.append(state(module))
    return found


@functools.cache
def on_one_device(change: Callable[..., object]) -> dict[str, Tensor]:
    return train([change], None, 1)[0]


@pytest.mark.parametrize("strategy", CHANGES)
def test_changes_of_state_and_groups_are_followed(strategy: str, world2: World) -> None:
    """Servers went on with the momentum that a hook had cleared, or replaced, and trained layers that had left."""
    for of_rank in world2.run(train, CHANGES[strategy], strategy, 2):
        for change, found in zip(CHANGES[strategy], of_rank, strict=True):
            name, expected = change.__name__, on_one_device(change)
            torch.testing.assert_close({name: found}, {name: expected}, rtol=0, atol=1e-12)


def read_all(strategy: str | None, ranks: int) -> list[float]:
    found: list[float] = []
    for change in READS:
        module = Changes(change)
        trainer = fit_module(module, strategy_of(strategy), ranks, CASE)
        found += [*module.found, *map(float, trainer.callback_metrics.values())]
    return found


@pytest.mark.parametrize("strategy", ["tensor_split", "hybrid"])
def test_states_of_split_layers_are_whole(strategy: str, world2: World) -> None:
    """Hooks read the norm of a rank's part."""
    expected = read_all(None, 1)
    for found in world2.run(read_all, strategy, 2):
        assert found == pytest.approx(expected, rel=1e-12)


def try_to_read(reads: Sequence[Callable[..., object]], words: str, strategy: str) -> None:
    def try_all(module: Changes, optimizer: Any) -> None:
        for read in reads:
            with pytest.raises((PipelineError, ValueError), match=words):
                read(module, optimizer)
        log_norm(module, optimizer)  # raises here, or where the value is reduced

    fit_module(Changes(try_all), strategy, 2, CASE)


@pytest.mark.parametrize("strategy", [*SERVERS, "ddp_sharded", "gpipe"])
def test_states_that_are_elsewhere_are_not_read(strategy: str, world2: World) -> None:
    """Hooks read an empty state under servers, and the norm of a rank's part elsewhere."""
    is_served = strategy in SERVERS
    words = r"this process does not have it.*optimizer\.state\.clear\(\)" if is_served else "optimizer('s state|.state)"
    reads = [*(IN_PLACE if is_served else ()), norm_of_all, norm_of_each, write]
    world2.run_raising((PipelineError, ValueError), words, try_to_read, reads, words, strategy)  # type: ignore[arg-type]


def of_one_rank(module: Changes, optimizer: Any) -> None:
    if rank() == 0:
        clear(module, optimizer)


@pytest.mark.parametrize("strategy", SERVERS)
def test_a_change_on_one_rank_is_refused(strategy: str, world2: World) -> None:
    world2.run_raising(Exception, r"on all (ranks|workers)", train, [of_one_rank], strategy, 2)


def take_one_that_couples(module: Changes, optimizer: Any) -> None:
    module.trainer.optimizers = [torch.optim.LBFGS(module.parameters())]


def test_an_optimizer_that_comes_later_is_checked_too(world2: World) -> None:
    """It trained with the gradients of each stage, or of each part, alone."""
    for strategy, words in (("gpipe", "works on all parameters at once"), ("tensor_split", "may need whole tensors")):
        world2.run_raising(ValueError, f"LBFGS {words}", train, [take_one_that_couples], strategy, 2)
