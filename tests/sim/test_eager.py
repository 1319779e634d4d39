from __future__ import annotations

from dataclasses import replace

import pytest

from horovod_abs.sim.eager import EagerSGD
from tests.sim.test_servers import cluster

EXCHANGE = 0.0625


class Counted:
    """Replicas whose gradient is the number of micro-batches in it by that of the workers, and whose model its sum."""

    def __init__(self, size: int) -> None:
        self.held = [0] * size
        self.collected: list[list[int]] = []
        self.models = [0.0] * size
        self.averages = 0

    def compute(self, rank: int) -> None:
        self.held[rank] += 1

    def collect(self) -> float:
        self.collected.append(self.held)
        mean = sum(self.held) / len(self.held)
        self.held = [0] * len(self.held)
        return mean

    def apply(self, rank: int, gradient: float) -> None:
        self.models[rank] += gradient

    def average(self) -> None:
        self.averages += 1
        self.models = [sum(self.models) / len(self.models)] * len(self.models)


def run(*seconds: float, trigger: str, **options: int) -> tuple[Counted, EagerSGD]:
    replicas = Counted(len(seconds))
    eager = EagerSGD(cluster(*seconds).sampler(), EXCHANGE, replicas, trigger=trigger, overlap=False, **options)  # type: ignore[arg-type]
    eager.run(20.0)
    return replicas, eager


def test_alone_the_first_that_arrives_begins_and_the_late_one_puts_in_nothing_or_what_is_stale() -> None:
    replicas, _ = run(0.25, 1.0, trigger="solo", average_every=1000)
    assert len(replicas.collected) == int(20 / (0.25 + EXCHANGE)), "the quick one waits for the exchange alone"
    assert all(fast == 1 for fast, _ in replicas.collected)
    assert {slow for _, slow in replicas.collected} == {0, 1}


def test_what_a_late_worker_misses_is_lost_to_it() -> None:
    replicas, _ = run(0.25, 1.0, trigger="solo", average_every=1000)
    assert replicas.models[1] < 0.5 * replicas.models[0]


def test_every_micro_batch_is_in_the_sum_once() -> None:
    replicas, eager = run(0.25, 0.4, 1.0, trigger="majority", average_every=1000)
    applied = sum(sum(each) for each in replicas.collected)
    assert 0 <= applied - eager.samples <= 6, "at most the exchange that was on its way at the end"


def test_one_chosen_at_random_begins_for_the_majority_so_that_each_sum_holds_more() -> None:
    solo, majority = (run(0.2, 0.24, 0.3, 1.0, trigger=trigger)[0].collected for trigger in ("solo", "majority"))
    assert len(majority) < 0.8 * len(solo)
    held = [sum(map(sum, found)) / len(found) for found in (solo, majority)]
    assert held[1] > held[0]
    assert any(min(each) > 0 for each in majority), "those whom the slow one begins have all of them"


def test_models_are_averaged_from_time_to_time() -> None:
    replicas, _ = run(0.25, 1.0, trigger="solo", average_every=10)
    assert replicas.averages == pytest.approx(len(replicas.collected) // 10, abs=1)
    assert replicas.models[1] > 0.6 * replicas.models[0]


@pytest.mark.parametrize("trigger", ["solo", "majority"])
def test_the_others_go_on_without_a_worker_that_leaves(trigger: str) -> None:
    whole = cluster(0.25, 0.4, 1.0)
    left = replace(whole, ranks=(*whole.ranks[:2], replace(whole.ranks[2], leaves=5.0)))
    replicas = Counted(3)
    eager = EagerSGD(left.sampler(), EXCHANGE, replicas, trigger=trigger, average_every=10)  # type: ignore[arg-type]
    eager.run(30.0)
    assert len(replicas.collected) > 40
    assert replicas.averages == pytest.approx(len(replicas.collected) // 10, abs=1)
