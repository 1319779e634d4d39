from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from horovod_abs.bench.learners import Central, Replicated

RATE = 0.5


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE)


def square(model: nn.Module) -> None:
    """The gradient is the model itself."""
    model.zero_grad()
    sum((p**2).sum() for p in model.parameters()).div(2).backward()  # type: ignore[union-attr]


def weight(model: nn.Module) -> torch.Tensor:
    return next(model.parameters()).detach().clone()


def test_a_stale_gradient_is_applied_to_the_model_as_it_is_now() -> None:
    central = Central(linear(), 2, square, sgd)
    first = weight(central.model)
    central.pull(0), central.pull(1)
    for rank in (0, 1):  # both at the first model
        central.compute(rank)
        central.give(rank)
        central.update(1)
    torch.testing.assert_close(weight(central.model), first - 2 * RATE * first)


def test_an_update_by_several_takes_their_mean() -> None:
    central = Central(linear(), 2, square, sgd)
    first = weight(central.model)
    for rank in (0, 1):
        central.compute(rank)
        central.give(rank)
    central.update(2)
    torch.testing.assert_close(weight(central.model), first - RATE * first)


@pytest.mark.parametrize("kind", ["constant", "adaptive"])
def test_a_late_gradient_is_compensated_as_the_paper_says(kind: str) -> None:
    central = Central(linear(), 2, square, sgd, compensation=kind, strength=0.3)  # type: ignore[arg-type]
    old = weight(central.model)
    central.compute(0), central.give(0), central.update(1)  # at distance 0 nothing is added
    now = weight(central.model)
    torch.testing.assert_close(now, old - RATE * old)
    central.compute(1), central.give(1), central.update(1)
    mean = 0.05 * old**2 * (1 + 0.95)
    strength = 0.3 / (mean + 1e-7).sqrt() if kind == "adaptive" else 0.3
    torch.testing.assert_close(weight(central.model), now - RATE * (old + strength * old * old * (now - old)))


def test_replicas_share_what_was_collected_and_what_is_left_out_comes_with_the_next() -> None:
    first = linear()
    replicas = Replicated(copy.deepcopy(first), 2, square, sgd)
    replicas.compute(0)
    gradient = replicas.collect()
    torch.testing.assert_close(gradient[0], weight(first) / 2)
    assert not any(part.any() for part in replicas.collect())
    replicas.apply(0, gradient)
    torch.testing.assert_close(weight(replicas.model), weight(first) * (1 - RATE / 2))
    replicas.average()
    torch.testing.assert_close(weight(replicas.model), weight(first) * (1 - RATE / 4))
