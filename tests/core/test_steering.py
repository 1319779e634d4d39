"""Clocks that look at the time, in virtual time: when rounds end, and how well a target batch is held."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from horovod_abs.core.clocks import Clock, IntervalClock, TargetBatchClock
from horovod_abs.core.engine import Engine
from horovod_abs.sim.cluster import Compute, Program, Synchronize, VirtualCluster

BATCH = 16


def run(
    clock: Clock,
    seconds: Sequence[float],
    *,
    rounds: int = 80,
    exchange: float = 0.01,
    tick_seconds: float | None = 0.001,
    jitter: float = 0.03,
    slower: tuple[int, int] | None = None,
) -> VirtualCluster:
    """A virtual cluster whose ranks take ``seconds`` a micro-batch.

    Args:
        slower: ``(rank, round)``: from that round on the rank takes twice as long.
    """
    engines = [
        Engine(len(seconds), clock, rank=rank, max_micro_batches=10_000, min_micro_batches=1)
        for rank in range(len(seconds))
    ]

    def program(rank: int) -> Program:
        engine, noise = engines[rank], random.Random(rank)
        while engine.ledger.rounds < rounds:
            twice = slower is not None and slower[0] == rank and engine.ledger.rounds >= slower[1]
            yield Compute(BATCH, seconds[rank] * (2 if twice else 1) * max(0.2, noise.gauss(1, jitter)))
        yield Synchronize()

    programs = [program(rank) for rank in range(len(seconds))]
    cluster = VirtualCluster(engines, programs, lambda _: exchange, tick_seconds=tick_seconds)
    cluster.run()
    return cluster


def batches(cluster: VirtualCluster) -> np.ndarray:
    return np.array([entry.weight for entry in cluster.entries])


CLUSTERS = {
    "mixed": (0.02, 0.02, 0.04, 0.08),
    "equal": (0.02, 0.02, 0.02, 0.02),
    "extreme": (0.01, 0.1),
    "eight": (0.02, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08),
}


@pytest.mark.parametrize("tick_seconds", [0.001, None], ids=["rank 0 keeps the time", "each rank does"])
@pytest.mark.parametrize("micro_batches", [16, 24, 64])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_target_batch_is_held(cluster: str, micro_batches: int, tick_seconds: float | None) -> None:
    target = max(micro_batches, 4 * len(CLUSTERS[cluster])) * BATCH
    measured = batches(run(TargetBatchClock(target), CLUSTERS[cluster], tick_seconds=tick_seconds))[10:78]
    assert measured.mean() == pytest.approx(target, rel=0.05)
    assert np.mean(np.abs(measured / target - 1) <= 0.15) >= 0.95


@pytest.mark.parametrize("tick_seconds", [0.001, None], ids=["rank 0 keeps the time", "each rank does"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_target_batch_is_back_ten_rounds_after_a_rank_slows_down(rank: int, tick_seconds: float | None) -> None:
    target = 24 * BATCH
    measured = batches(run(TargetBatchClock(target), CLUSTERS["mixed"], slower=(rank, 30), tick_seconds=tick_seconds))[
        41:78
    ]
    assert measured.mean() == pytest.approx(target, rel=0.05)
    assert np.mean(np.abs(measured / target - 1) <= 0.15) >= 0.95


def test_a_target_below_what_the_exchange_allows_ends_rounds_as_soon_as_it_can() -> None:
    cluster = run(TargetBatchClock(16 * BATCH), (0.02, 0.02), exchange=1.0)
    waited = sum(rank.waiting for rank in cluster.ranks)
    assert batches(cluster)[10:78].mean() == pytest.approx(2 * BATCH / 0.02 * 1.0, rel=0.1)
    assert waited < 2 * 2 * 1.0 + 0.1, "each waits for the last two exchanges, and for no other"


def test_the_target_clock_is_the_same_on_all_ranks_and_learns_nothing_from_bounded_rounds() -> None:
    cluster = run(TargetBatchClock(320), CLUSTERS["mixed"])
    learnt = [rank.engine.clock.state_dict() for rank in cluster.ranks]
    assert learnt[0]["interval"] > 0
    assert all(state == learnt[0] for state in learnt)


def test_an_interval_is_kept_by_a_timer_of_its_own() -> None:
    """Rank 0's micro-batches are longer than the interval and do not delay the others' ticks."""
    cluster = run(IntervalClock(0.5), (0.3, 0.05, 0.05), jitter=0.0)
    lengths = np.diff([time for time, _ in cluster.ranks[1].launches])[5:70]
    assert 0.5 <= lengths.mean() < 0.5 + 0.3 + 0.05


def test_an_interval_shorter_than_the_exchange_waits_for_nobody() -> None:
    cluster = run(IntervalClock(0.001), (0.02, 0.02), exchange=0.1)
    assert sum(rank.waiting for rank in cluster.ranks) < 0.6


def test_local_time_keeps_the_interval_in_the_mean_and_makes_up_for_no_stall() -> None:
    cluster = run(IntervalClock(0.33), (0.05, 0.08), tick_seconds=None, jitter=0.0, slower=(1, 60))
    for rank in cluster.ranks:
        lengths = np.diff([time for time, _ in rank.launches])[5:50]
        assert lengths.mean() == pytest.approx(0.33, rel=0.02)
        assert np.all(np.abs(lengths - 0.33) < 0.08 + 1e-9)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_an_interval_must_be_positive(seconds: float) -> None:
    with pytest.raises(ValueError, match="positive number of seconds"):
        IntervalClock(seconds)


@pytest.mark.parametrize("samples", [0, -16, float("nan")])
def test_a_target_must_be_positive(samples: float) -> None:
    with pytest.raises(ValueError, match="positive number of samples"):
        TargetBatchClock(samples)
