"""Updates of optimizers by ranks, or workers, with the result of one device."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_multigpu.placement.owned_step import OwnedStep

Serve = Callable[[Optimizer], OwnedStep[Any]]
Updates = list[list[Tensor]]
Make = Callable[[Any], Optimizer]

# Each with the options under which most of its arithmetic is used.
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda groups: optim.Adam(groups, lr=0.1, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.1),
    "Adamax": lambda groups: optim.Adamax(groups, lr=0.1),
    "Adagrad": lambda groups: optim.Adagrad(groups, lr=0.1, lr_decay=0.1),
    "Adadelta": lambda groups: optim.Adadelta(groups, lr=0.5),
    "ASGD": lambda groups: optim.ASGD(groups, lr=0.1, t0=2),
    "NAdam": lambda groups: optim.NAdam(groups, lr=0.1),
    "RAdam": lambda groups: optim.RAdam(groups, lr=0.1),
    "RMSprop": lambda groups: optim.RMSprop(groups, lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda groups: optim.Rprop(groups, lr=0.1),
    "Adafactor": lambda groups: optim.Adafactor(groups, lr=0.1),
    "Muon": lambda groups: optim.Muon(groups, lr=0.1),
}
LOADED = ("AdamW", "Adafactor")
"""Those whose state of one device is loaded after half of the steps."""
STEPS = 4


class NormedSGD(optim.SGD):
    """It divides by the norm of all gradients together, so that it cannot be divided."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            norm = torch.linalg.vector_norm(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            for gradient in gradients:
                gradient.div_(norm)
        return super().step(closure)


class DecayingSGD(optim.SGD):
    """It keeps a number of its own in its groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["momentum"] = 0.9 * group["momentum"]
        return super().step(closure)


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(7, 5), (3, 3), (11, 2)]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def gradients(step: int, number: int) -> list[Tensor]:
    """Those of one of two ranks in a step; the average is what one device sees."""
    generator = torch.Generator().manual_seed(100 * step + number)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in weights()]


def groups_of(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.05}]


def averaged(step: int) -> list[Tensor]:
    return [(a + b) / 2 for a, b in zip(gradients(step, 0), gradients(step, 1), strict=True)]


def of_rank(number: int) -> Updates:
    return [gradients(step, number) for step in range(STEPS)]


def steps_of(
    optimizer: Optimizer,
    parameters: list[nn.Parameter],
    updates: Updates,
    serve: Serve | None = None,
    *,
    closures: bool = False,
    after_each: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """The weights after steps with these gradients; with ``closures`` every other step adds its gradients once more."""
    served = serve(optimizer) if serve else None
    for step, given in enumerate(updates):

        def closure(given: list[Tensor] = given) -> None:
            for parameter, gradient in zip(parameters, given, strict=True):
                assert parameter.grad is not None
                parameter.grad = parameter.grad + gradient

        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step(closure if closures and step % 2 else None)  # type: ignore[arg-type]
        after_each()
    if served is not None:
        served.close()
    return [parameter.detach() for parameter in parameters]


def on_one_device(make: Make, updates: Updates | None = None) -> tuple[list[Tensor], dict[str, Any]]:
    """The weights and the state after updates with these gradients, by default with the averages of ``STEPS`` steps."""
    optimizer = make(groups_of(parameters := weights()))
    found = steps_of(optimizer, parameters, [averaged(step) for step in range(STEPS)] if updates is None else updates)
    return found, optimizer.state_dict()


@contextlib.contextmanager
def hooks_of_all_optimizers() -> Iterator[list[tuple[Optimizer, str]]]:
    calls: list[tuple[Optimizer, str]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: calls.append((optimizer, "all before"))),
        register_optimizer_step_post_hook(lambda optimizer, *_: calls.append((optimizer, "all after"))),
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def hooked_steps(updates: Updates, calls: list[tuple[Optimizer, str]], serve: Serve | None = None) -> list[Tensor]:
    """Steps with hooks that change the gradients and the weights, element by element; every other has a closure."""
    parameters = weights()
    optimizer = optim.SGD(groups_of(parameters), lr=0.1, momentum=0.9)

    def before(*_: Any) -> None:
        calls.append((optimizer, "before"))
        nn.utils.clip_grad_value_(parameters, 0.3)

    def after(*_: Any) -> None:
        calls.append((optimizer, "after"))
        for parameter in parameters:
            parameter.data.clamp_(-0.5, 0.5)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    found = steps_of(optimizer, parameters, updates, serve, closures=True)
    assert [word for of, word in calls if of is optimizer] == ["all before", "before", "after", "all after"] * STEPS
    return found


def assert_equal(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


Trained = dict[str, tuple[list[Tensor], dict[str, Any], int]]


def every_optimizer(serve: Serve, number: int, held_by: Callable[[OwnedStep[Any]], int] = lambda _: 0) -> Trained:
    """The weights, the state as one device has it, and the elements of the state that are held here."""
    found: Trained = {}
    for name, make in OPTIMIZERS.items():
        begin = STEPS // 2 if name in LOADED else 0
        given, halfway = on_one_device(make, [averaged(step) for step in range(begin)])
        optimizer = make(groups_of(parameters := [nn.Parameter(each) for each in given]))
        server = serve(optimizer)
        if begin:
            server.load_state_dict(halfway)
        trained = steps_of(optimizer, parameters, of_rank(number)[begin:])
        assert not optimizer.state, "a device holds no state"
        found[name] = trained, server.state_dict(), held_by(server)
        server.close()
        assert "step" not in vars(optimizer), "the optimizer has its own step again"
    return found


def assert_as_on_one_device(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    for name, make in OPTIMIZERS.items():
        parameters, state = on_one_device(make)
        found, found_state, _ = first[name]
        assert_equal(found, parameters)
        torch.testing.assert_close(second[name][0], found, rtol=0, atol=0)
        assert found_state["param_groups"] == state["param_groups"]
        assert_equal(found_state["state"], state["state"])


def unusual_weights(updates: Updates, calls: list[tuple[Optimizer, str]], serve: Serve | None = None) -> dict[str, Any]:
    """The weights of one device, or of one of two ranks or workers, after steps with something unusual."""
    parameters = weights()
    found: dict[str, Any] = {
        "one updates all": steps_of(NormedSGD(groups_of(parameters), lr=0.1), parameters, updates, serve),
        "hooks": hooked_steps(updates, calls, serve),
    }
    parameters = weights()
    optimizer = optim.SGD(groups_of(parameters), lr=0.1, momentum=0.9)
    steps_of(optimizer, parameters[:1], [update[:1] for update in updates], serve)
    found["a group without gradients"] = [p.detach() for p in parameters]
    return found


def unusual_steps(serve: Serve, number: int, calls: list[tuple[Optimizer, str]]) -> dict[str, Any]:
    """What one of two ranks, or workers, gets from steps with something unusual."""
    found = {"weights": unusual_weights(of_rank(number), calls, serve)}
    optimizer = optim.SGD(groups_of(weights()), lr=0.1, momentum=0.9)
    server = serve(optimizer)
    optimizer.step()
    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late], "lr": 1.0})

    def step(gradient: float | None) -> list[float]:
        late.grad = None if gradient is None else torch.full((3,), gradient)
        optimizer.step()
        return late.tolist()

    found["a group that came later, on one rank"] = step(1.0 if number == 0 else None)
    late.data.zero_()  # as a hook may, on every rank
    optimizer.param_groups[2]["lr"] = 2.0  # as a scheduler does
    found["a weight and a rate that changed"] = step(1.0)
    optimizer.param_groups[2] |= {"lr": 1.0, "momentum": 0.0}
    late.data.zero_()
    found["a gradient that one rank no longer has"] = step(1.0 if number == 0 else None)
    late.data.zero_()
    for norm in (0.1, None, 0.2):
        server.clip_norm = None if norm is None else norm * 3**0.5
        step(1.0)
    server.clip_value = 0.25
    found["clipping"] = step(2.0 * number)
    server.close()
    return found


def assert_unusual(found: dict[str, Any]) -> None:
    with hooks_of_all_optimizers() as calls:
        assert_equal(found["weights"], unusual_weights([averaged(step) for step in range(STEPS)], calls))
    assert found["a group that came later, on one rank"] == [0.5] * 3, "the mean of 1 and of no gradient"
    # The momentum of the step before, 0.5 x 0.9, and the gradient.
    assert found["a weight and a rate that changed"] == pytest.approx([-2.0 * 1.45] * 3)
    assert found["a gradient that one rank no longer has"] == [-0.5] * 3
    assert found["clipping"] == pytest.approx([-0.1 - 1.0 - 0.2 - 0.25] * 3)
