"""The virtual cluster that really trains; ``tests/torch/test_updates.py`` puts model updates through it."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
import torch

from horovod_abs.bench.virtual import VirtualRank, VirtualTraining
from horovod_abs.core.clocks import Clock, CountClock, SyncClock
from horovod_abs.observe.schedule import RecordedRound
from horovod_abs.torch.exchanges import Gradients, ModelUpdates
from horovod_abs.torch.formulas import Rules, compute


def loss(model: torch.nn.Module, indices: list[int]) -> torch.Tensor:
    x = torch.tensor([[index % 7, index % 5, 1.0] for index in indices], dtype=torch.float64)
    return ((model(x) - x.sum(1, keepdim=True).sin()) ** 2).mean()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def ranks(model: torch.nn.Module, size: int, record: list[list[tuple[int, list[int]]]]) -> list[VirtualRank]:
    def rank(number: int) -> VirtualRank:
        own, random = copy.deepcopy(model), Random(number)

        def gradients() -> float:
            indices = [random.randrange(1000) for _ in range(random.choice((1, 4, 9)))]
            record[number].append((made[number].driver.engine.launches, indices))
            loss(own, indices).backward()
            return float(len(indices))

        return VirtualRank(own, sgd(own), gradients, lambda: random.uniform(1, 1 + number))

    made = [rank(number) for number in range(size)]
    return made


@pytest.mark.parametrize("exchange", [Gradients(), Gradients(staleness="lookahead"), Gradients(delay=0)])
@pytest.mark.parametrize("clock", [SyncClock(), CountClock(2)])
def test_gradients_equal_the_formulas(exchange: Gradients, clock: Clock) -> None:
    """ABS-SGD on three unequal ranks is what one process computes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    record: list[list[tuple[int, list[int]]]] = [[], [], []]
    cluster = ranks(model, 3, record)
    training = VirtualTraining(cluster, exchange, clock, lambda exchange: 2.5)
    training.run(lambda rank: rank.micro_batches < 20)
    launches = cluster[0].driver.engine.launches
    rounds = [
        RecordedRound([[i for k, i in own if k == number] for own in record], drained=number == 0)
        for number in range(launches)
    ]
    rules = Rules(delay=exchange.delay, staleness=exchange.staleness)
    compute(rounds, model, sgd(model), loss, rules)
    for rank in cluster:
        for mine, expected in zip(rank.model.parameters(), model.parameters(), strict=True):
            assert (mine - expected).abs().max() < 1e-10
    assert training.samples == sum(len(indices) for own in record for _, indices in own)


def test_time_is_spent_as_it_is_said_to_be() -> None:
    """Two equal ranks, micro-batches of 1 s and exchanges of 3 s that nobody may compute in: three of four seconds."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = torch.nn.Linear(1, 1)
        made.append(VirtualRank(layer, torch.optim.SGD(layer.parameters(), 0.1), lambda: 1.0, lambda: 1.0))
    training = VirtualTraining(made, ModelUpdates(1), SyncClock(), lambda exchange: 3.0)
    training.run(lambda rank: rank.micro_batches < 10)
    for rank in made:
        assert (rank.computing, rank.waiting) == (10, 27 + 3)
        assert rank.closing == 3, "the exchange that closes"
    assert training.now == 43


def test_ranks_that_begin_apart_are_refused() -> None:
    made: list[Any] = []
    for _ in range(2):
        layer = torch.nn.Linear(1, 1)
        made.append(VirtualRank(layer, torch.optim.SGD(layer.parameters(), 0.1), lambda: 1.0, lambda: 1.0))
    training = VirtualTraining(made, ModelUpdates(), SyncClock(), lambda exchange: 1.0)
    with pytest.raises(RuntimeError, match="drifted apart: give all the same"):
        training.run(lambda rank: rank.micro_batches < 3)
