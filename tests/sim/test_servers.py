from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from horovod_abs.sim.models import ClusterModel
from horovod_abs.sim.network import Network
from horovod_abs.sim.servers import (
    AsynchronousSGD,
    BackupWorkers,
    DynamicStaleSynchronous,
    StaleSynchronous,
    Strategy,
)
from horovod_abs.sim.speeds import Cost, RankModel

TRANSFER = 0.0625


def cluster(*seconds: float) -> ClusterModel:
    """Micro-batches of one sample that take so long on each worker."""
    return ClusterModel("test", tuple(RankModel(Cost(each, 0.0)) for each in seconds), Network(), samples=1)


class Noted:
    """A learner that learns nothing, and remembers what it was asked."""

    def __init__(self) -> None:
        self.pulled: list[int] = []
        self.computed: list[int] = []
        self.given: list[int] = []
        self.updates: list[int] = []

    def pull(self, rank: int) -> None:
        self.pulled.append(rank)

    def compute(self, rank: int) -> None:
        self.computed.append(rank)

    def give(self, rank: int) -> None:
        self.given.append(rank)

    def update(self, count: int) -> None:
        self.updates.append(count)


def ahead(strategy: AsynchronousSGD, until: float) -> int:
    """How many steps the fastest is ever ahead of the slowest."""
    found = 0

    def look() -> None:
        nonlocal found
        found = max(found, max(strategy.steps) - min(strategy.steps))

    strategy.on_update.append(look)
    strategy.run(until)
    return found


def test_nobody_waits_for_anybody_and_each_gradient_is_applied() -> None:
    """Pull 1/16 s, compute; the push of 1/16 s is hidden behind the backward pass."""
    noted = Noted()
    strategy = AsynchronousSGD(cluster(0.25, 1.0).sampler(), TRANSFER, noted)
    strategy.run(10.0)
    assert strategy.steps == [int(10 / (0.25 + TRANSFER)), int(10 / (1.0 + TRANSFER))]
    assert noted.updates == [1] * sum(strategy.steps)
    assert strategy.samples == sum(strategy.steps)


def test_without_overlap_the_push_takes_its_time() -> None:
    strategy = AsynchronousSGD(cluster(0.25).sampler(), TRANSFER, Noted(), overlap=False)
    strategy.run(10.0)
    assert strategy.steps == [int(10 / (0.25 + 2 * TRANSFER))]


def test_one_server_serves_one_worker_after_the_other() -> None:
    """Eight workers that compute in no time share two links of a quarter second each way; sharded links do not wait."""
    swift = cluster(*[1e-6] * 8)
    shared, sharded = (
        AsynchronousSGD(swift.sampler(), 0.25, Noted(), shared=shared, overlap=False) for shared in (True, False)
    )
    shared.run(100.0)
    sharded.run(100.0)
    assert sum(shared.steps) == pytest.approx(100 / 0.25, rel=0.02)
    assert sum(sharded.steps) == pytest.approx(8 * 100 / 0.5, rel=0.02)


def test_a_worker_is_at_most_so_many_steps_ahead() -> None:
    assert ahead(StaleSynchronous(cluster(0.1, 1.0).sampler(), 0.0, Noted()), 60.0) == StaleSynchronous.bound + 1
    assert ahead(AsynchronousSGD(cluster(0.1, 1.0).sampler(), 0.0, Noted()), 60.0) > 100


def test_extra_steps_shorten_the_wait_and_stay_within_the_upper_bound() -> None:
    slow = cluster(0.3, 1.0)
    rigid, dynamic = (kind(slow.sampler(), 0.0, Noted()) for kind in (StaleSynchronous, DynamicStaleSynchronous))
    furthest = ahead(dynamic, 100.0)
    rigid.run(100.0)
    assert StaleSynchronous.bound + 1 < furthest <= DynamicStaleSynchronous.most + 1
    assert dynamic.steps[0] >= rigid.steps[0]


def test_the_grant_is_the_number_of_steps_after_which_the_wait_is_shortest() -> None:
    """The slowest pushed at 0 and 10, so next at 20; the fastest at 8.5 and 11.5: after 3 more it is there at 20.5,
    after which the next push is at 30; after 6 more at 29.5.
    """
    strategy = DynamicStaleSynchronous(cluster(3.0, 10.0).sampler(), 0.0, Noted())
    strategy.steps, strategy._least = [5, 1], 1
    strategy._pushed = [[8.5, 11.5], [0.0, 10.0]]
    assert strategy._grant(0) == 6


def test_the_first_gradients_of_a_round_count_and_the_others_are_thrown_away() -> None:
    """The slow one takes five rounds for a micro-batch, and is always late."""
    noted = Noted()
    strategy = BackupWorkers(cluster(0.1, 0.1, 0.1, 0.5).sampler(), 0.01, noted)
    strategy.run(10.0)
    assert set(noted.updates) == {3}
    assert 3 in noted.computed
    assert 3 not in noted.given
    assert strategy.samples == 3 * len(noted.updates) == len(noted.given) // 3 * 3
    assert noted.pulled.count(3) == pytest.approx(10 / 0.51, abs=1), "it takes the fresh model each time"


def test_who_is_not_late_is_not_thrown_away_for_ever() -> None:
    noted = Noted()
    BackupWorkers(cluster(0.1, 0.1, 0.1, 0.1).sampler(), 0.01, noted).run(10.0)
    assert len(noted.updates) > 80


@pytest.mark.parametrize("kind", [AsynchronousSGD, StaleSynchronous, DynamicStaleSynchronous, BackupWorkers])
def test_the_others_go_on_without_workers_that_leave(kind: Callable[..., Strategy]) -> None:
    whole = cluster(0.1, 0.1, 0.15, 0.2)
    left = replace(whole, ranks=(*whole.ranks[:2], *(replace(rank, leaves=5.0) for rank in whole.ranks[2:])))
    noted = Noted()
    kind(left.sampler(), 0.01, noted).run(20.0)
    assert noted.given[-40:].count(0) + noted.given[-40:].count(1) == 40
    assert len(noted.given) > 150


def test_there_must_be_a_worker_that_is_not_spare() -> None:
    with pytest.raises(ValueError, match="at most 1 can be spare"):
        BackupWorkers(cluster(0.1, 0.1).sampler(), 0.01, Noted(), spare=2)


@pytest.mark.parametrize("kind", [AsynchronousSGD, StaleSynchronous, DynamicStaleSynchronous, BackupWorkers])
def test_runs_are_repeatable(kind: Callable[..., Strategy]) -> None:
    def run() -> tuple[float, list[int]]:
        noted = Noted()
        strategy = kind(cluster(0.1, 0.17, 0.31).sampler(), 0.05, noted)
        strategy.run(20.0)
        return strategy.samples, noted.given

    assert run() == run()
