"""The object that ``DistributedOptimizer`` makes, on one rank without a launcher; see ``scenarios`` for several."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as horovod
import pytest
import torch
from horovod.torch.optimizer import _DistributedOptimizer

import horovod_abs.torch as hvd
from tests.torch.scenario import flat, small_model

pytestmark = pytest.mark.usefixtures("single_rank")


class Demanding(torch.optim.Optimizer):
    """An optimizer of a user's own: an argument that it needs, and a method that torch's have not."""

    def __init__(self, params: Iterable[torch.Tensor], rate: float) -> None:
        super().__init__(params, {"lr": rate})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad

    def describe(self) -> str:
        return f"{self.steps} steps"


MAKERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "Demanding": lambda model: Demanding(model.parameters(), 0.1),
}
every_optimizer = pytest.mark.parametrize("name", list(MAKERS))
SYNCHRONOUS = {"exchange": hvd.Gradients(delay=0), "clock": hvd.CountClock(1)}


def distributed(name: str = "SGD", **options: Any) -> tuple[torch.nn.Module, Any]:
    """A small model and its optimizer."""
    model = small_model()
    return model, hvd.DistributedOptimizer(MAKERS[name](model), model.named_parameters(), **options)


def backward(model: torch.nn.Module, seed: int = 0, samples: int = 4) -> None:
    """Gradients of a mean over some samples."""
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(samples, 6, dtype=torch.float64, generator=generator)).square().mean().backward()


# -- the class -------------------------------------------------------------------------------------------------------


@every_optimizer
def test_it_is_of_the_users_class_and_of_horovods(name: str) -> None:
    model, optimizer = distributed(name)
    assert isinstance(optimizer, type(MAKERS[name](model)))
    assert isinstance(optimizer, _DistributedOptimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert type(optimizer).__name__ == name
    assert type(optimizer).__module__ == "horovod.torch.optimizer"


@every_optimizer
def test_nothing_of_horovods_own_is_left_to_be_called_by_mistake(name: str) -> None:
    _, optimizer = distributed(name)
    user_class = type(optimizer).__mro__[1]
    assert type(optimizer).__init__ is user_class.__init__
    inherited = {name for name, value in vars(_DistributedOptimizer).items() if callable(value) or _is_method(value)}
    assert {"step", "synchronize", "skip_synchronize", "_make_hook", "_allreduce_grad_async"} <= inherited
    for method in inherited - {"__init__"}:
        used = inspect.getattr_static(type(optimizer), method)
        assert used is not vars(_DistributedOptimizer)[method], f"{method} would be Horovod's"


def _is_method(value: object) -> bool:
    return isinstance(value, (staticmethod, classmethod, property))


@pytest.mark.parametrize(
    "method",
    [
        "_register_hooks",
        "_make_hook",
        "_allreduce_grad_async",
        "_grouped_allreduce_grad_async",
        "_sparse_allreduce_grad_async",
        "find_duplicates",
    ],
)
def test_horovods_inner_parts_refuse_to_be_called(method: str) -> None:
    _, optimizer = distributed()
    with pytest.raises(RuntimeError, match=r"not used here: gradients travel by rounds"):
        getattr(optimizer, method)("anything")


@every_optimizer
def test_state_that_is_there_is_kept(name: str) -> None:
    model = small_model()
    plain = MAKERS[name](model)
    backward(model)
    plain.step()
    state, groups = plain.state, plain.param_groups
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    assert optimizer.state is state
    assert optimizer.param_groups is groups
    assert optimizer.defaults == plain.defaults


def test_a_users_optimizer_keeps_its_attributes_and_methods() -> None:
    model, optimizer = distributed("Demanding", **SYNCHRONOUS)
    backward(model)
    optimizer.step(samples=4)
    assert optimizer.describe() == "1 steps"
    assert optimizer.steps == 1


@every_optimizer
def test_on_one_rank_it_is_the_plain_optimizer(name: str) -> None:
    model, optimizer = distributed(name, **SYNCHRONOUS)
    twin = small_model()
    plain = MAKERS[name](twin)
    for seed in range(5):
        backward(model, seed)
        assert optimizer.step(samples=4)
        backward(twin, seed)
        plain.step()
        plain.zero_grad()
        torch.testing.assert_close(flat(model), flat(twin), rtol=0, atol=1e-12)


def test_on_one_rank_a_delay_is_one_round() -> None:
    model, optimizer = distributed("Demanding", clock=hvd.CountClock(1))
    parameters = [flat(model)]
    gradients = []
    for seed in range(4):
        backward(model, seed)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
        optimizer.step(samples=4)
        parameters.append(flat(model))
    optimizer.synchronize()
    parameters.append(flat(model))
    assert torch.equal(parameters[1], parameters[0])
    for k in range(1, 5):  # x_{k+1} = x_k − η ḡ^{k−1}
        torch.testing.assert_close(parameters[k + 1], parameters[k] - 0.1 * gradients[k - 1], rtol=0, atol=1e-12)


def test_epochs_work_on_one_rank() -> None:
    model, optimizer = distributed()
    data = torch.utils.data.TensorDataset(torch.randn(50, 6, dtype=torch.float64), torch.randn(50))
    seen = 0
    for x, _ in optimizer.epoch(torch.utils.data.DataLoader(data, batch_size=8)):
        model(x).square().mean().backward()
        optimizer.step()
        seen += len(x)
    assert optimizer.samples_seen == seen >= 50
    with optimizer.authoritative():
        model(torch.zeros(1, 6, dtype=torch.float64))
    assert optimizer.last_round == optimizer.history[-1]
    assert optimizer.dropped_rounds == (0,)


# -- schedulers, hooks, copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o, 1.0), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)], [0]
        ),
    ],
    ids=["StepLR", "LambdaLR", "SequentialLR"],
)
@pytest.mark.parametrize("before_wrapping", [False, True])
def test_schedulers_step_at_merges_without_a_warning(make: Any, before_wrapping: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = small_model()
        plain = MAKERS["SGD"](model)
        scheduler = make(plain) if before_wrapping else None
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **SYNCHRONOUS)
        scheduler = scheduler or make(optimizer)
        assert optimizer.on_merge(scheduler.step) == scheduler.step
        for seed in range(3):
            backward(model, seed)
            optimizer.step(samples=4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


def test_on_merge_serves_as_a_decorator() -> None:
    model, optimizer = distributed(**SYNCHRONOUS)
    merged = []

    @optimizer.on_merge  # type: ignore[untyped-decorator]
    def note() -> None:
        merged.append(optimizer.last_round.round)

    for seed in range(2):
        backward(model, seed)
        optimizer.step(samples=4)
    assert merged == [0, 1]


def test_torchs_step_hooks_run_once_a_merge() -> None:
    model, optimizer = distributed(clock=hvd.CountClock(3), exchange=hvd.Gradients(delay=0))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for seed in range(6):
        backward(model, seed)
        optimizer.step(samples=4)
    assert calls == ["before", "after"] * 2


def test_a_copy_says_why_it_cannot_step() -> None:
    model, optimizer = distributed("AdamW", **SYNCHRONOUS)
    backward(model)
    optimizer.step(samples=4)
    twin = copy.deepcopy(optimizer)
    assert isinstance(twin, torch.optim.AdamW)
    assert len(twin.state) == 4
    for action in (lambda: twin.step(samples=1), twin.synchronize, twin.state_dict, lambda: twin.epoch([])):
        with pytest.raises(RuntimeError, match=r"copy of a distributed optimizer.*load_state_dict"):
            action()
    backward(model)
    assert optimizer.step(samples=4)


# -- step ------------------------------------------------------------------------------------------------------------


def test_step_clears_gradients() -> None:
    model, optimizer = distributed()
    for samples in (4, 0, 4):
        backward(model)
        optimizer.step(samples=samples)
        assert all(p.grad is None for p in model.parameters())
    backward(model)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    optimizer.zero_grad(set_to_none=False)


def test_wrong_arguments_of_step() -> None:
    model, optimizer = distributed()
    backward(model)
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="needs samples="):
        optimizer.step()
    for samples in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must not be negative or infinite"):
            optimizer.step(samples=samples)
    assert optimizer.samples_seen == 0
    assert optimizer._rounds.driver.engine.closed


def test_a_fractional_weight_is_a_weight() -> None:
    model, optimizer = distributed("Demanding", clock=hvd.CountClock(2), exchange=hvd.Gradients(delay=0))
    before, gradients = flat(model), []
    for seed, samples in ((0, 0.5), (1, 1.5)):
        backward(model, seed)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
        optimizer.step(samples=samples)
    mean = (0.5 * gradients[0] + 1.5 * gradients[1]) / 2.0
    torch.testing.assert_close(flat(model), before - 0.1 * mean, rtol=0, atol=1e-12)


# -- Horovod's interface ---------------------------------------------------------------------------------------------


def test_all_of_horovod_torch_is_here() -> None:
    missing = [name for name in vars(horovod) if not name.startswith("_") and not hasattr(hvd, name)]
    assert missing == []
    own = {"DistributedOptimizer", "init", "join", "broadcast_optimizer_state"}
    replaced = {
        name
        for name, value in vars(horovod).items()
        if not name.startswith("_") and not inspect.ismodule(value) and getattr(hvd, name) is not value
    }
    assert replaced == own
    assert {name for name in vars(horovod) if not name.startswith("_")} <= set(hvd.__all__)


def test_keywords_are_horovods_in_horovods_order() -> None:
    theirs = list(inspect.signature(horovod.DistributedOptimizer).parameters.values())
    ours = list(inspect.signature(hvd.DistributedOptimizer).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_a_rate_that_is_to_be_scaled_must_be_there() -> None:
    class Rateless(torch.optim.Optimizer):
        def __init__(self, params: Iterable[torch.Tensor]) -> None:
            super().__init__(params, {})

    model = small_model()
    with pytest.raises(ValueError, match="lr_scaling='sqrt' needs an optimizer with a learning rate"):
        hvd.DistributedOptimizer(Rateless(model.parameters()), lr_scaling="sqrt", reference_batch_size=8)


def test_skip_synchronize_points_to_clip_grad_norm() -> None:
    _, optimizer = distributed()
    with pytest.raises(RuntimeError, match="clip_grad_norm="):
        optimizer.skip_synchronize()


def test_set_backward_passes_per_step_points_to_the_clock() -> None:
    _, optimizer = distributed()
    optimizer.set_backward_passes_per_step(1)
    with pytest.raises(ValueError, match=r"clock=CountClock\(n\)"):
        optimizer.set_backward_passes_per_step(2)


def test_join_is_refused_while_anything_is_pending() -> None:
    model, optimizer = distributed()
    backward(model)
    optimizer.step(samples=4)
    with pytest.raises(RuntimeError, match=r"hvd\.join\(\) during training.*optimizer\.epoch\(loader\)"):
        hvd.join()
    optimizer.synchronize()
    assert hvd.join() == 0


def test_broadcast_leaves_parameters_alone() -> None:
    model = small_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **SYNCHRONOUS)
    before = flat(model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(flat(model), before)
    assert all(p.grad is None for p in model.parameters())
    assert len(optimizer.state) == 4
    assert not optimizer.history, "no exchange was needed"


def test_broadcast_of_a_plain_optimizer_is_horovods() -> None:
    model = small_model()
    plain = MAKERS["AdamW"](model)
    hvd.broadcast_optimizer_state(plain, root_rank=0)
    assert len(plain.state) == 4


# -- state -----------------------------------------------------------------------------------------------------------


def test_state_can_be_loaded_by_a_plain_optimizer_and_back() -> None:
    model, optimizer = distributed("AdamW", **SYNCHRONOUS)
    backward(model)
    optimizer.step(samples=4)
    optimizer.synchronize()
    plain = MAKERS["AdamW"](small_model())
    plain.load_state_dict(optimizer.state_dict())
    other, again = distributed("AdamW", **SYNCHRONOUS)
    again.load_state_dict(plain.state_dict())
    assert again.samples_seen == 0
    again.load_state_dict(optimizer.state_dict())
    assert again.samples_seen == 4
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], again.state[theirs]["exp_avg"])


def test_state_is_refused_while_pending() -> None:
    model, optimizer = distributed()
    state = optimizer.state_dict()
    backward(model)
    optimizer.step(samples=4)
    extra = {"params": [torch.nn.Parameter(torch.zeros(1))]}
    for name, action in {
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(state),
        "add_param_group": lambda: optimizer.add_param_group(extra),
    }.items():
        with pytest.raises(RuntimeError, match=rf"^{name}\(\) while rounds are pending: call synchronize\(\) first"):
            action()
    optimizer.synchronize()
    optimizer.add_param_group(extra)
    assert len(optimizer.param_groups) == 2
