"""The rules of the algorithms that the benchmarks compare with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_abs.core.clocks import Progress
from horovod_abs.core.ledger import Column, Entry, Ledger
from horovod_abs.sim.baselines import ProportionalSteps, dynamic_batches, steered_batches

positive = st.floats(0.01, 100.0)


def entry(round: int, micro_batches: list[float], seconds: list[float]) -> Entry:
    rows = np.zeros((len(seconds), len(Column)))
    rows[:, Column.MICRO_BATCHES], rows[:, Column.COMPUTE_SECONDS] = micro_batches, seconds
    return Entry(round, rows)


def test_dynamic_batches_follow_the_measured_speeds() -> None:
    """Of 64 samples, ranks four times as quick get four times as many."""
    assert dynamic_batches([16, 16, 16, 16], np.array([0.1, 0.1, 0.2, 0.4])) == [23, 23, 12, 6]


@given(st.lists(st.tuples(st.integers(1, 200), positive), min_size=1, max_size=20))
def test_dynamic_batches_keep_their_sum_and_then_take_equally_long(ranks: list[tuple[int, float]]) -> None:
    batches, of_a_sample = [batch for batch, _ in ranks], np.array([seconds for _, seconds in ranks])
    following = dynamic_batches(batches, of_a_sample * batches)
    assert sum(following) == sum(batches)
    assert min(following) >= 1
    fair = sum(batches) / of_a_sample / (1 / of_a_sample).sum()
    if min(fair) >= 1:  # else the sum is kept by those with the most
        assert np.array(following) == pytest.approx(fair, abs=1.0)


def test_a_rank_that_does_not_compute_keeps_one_sample() -> None:
    assert dynamic_batches([8, 8, 8], np.array([0.1, 0.1, 0.0])) == [11, 12, 1]
    with pytest.raises(ValueError, match="no rank has computed"):
        dynamic_batches([8, 8], np.zeros(2))


def test_steered_batches_leave_small_differences_alone() -> None:
    assert steered_batches([16, 16], np.array([0.100, 0.104])) == [16, 16]
    # v = 160 and 80 samples/s, t̄ = 0.15 s: 16 + 160 · 0.05 and 16 − 80 · 0.05, scaled to a sum of 32 again.
    assert steered_batches([16, 16], np.array([0.1, 0.2])) == [21, 11]
    assert steered_batches([16, 16], np.array([0.1, 0.2]), most=18) == [19, 13]


@given(st.lists(st.sampled_from((1.0, 1.5, 2.0, 4.0)), min_size=2, max_size=8))
def test_steered_batches_come_to_equal_times(of_a_sample: list[float]) -> None:
    batches = [64] * len(of_a_sample)
    for _ in range(60):
        batches = steered_batches(batches, np.array(of_a_sample) * batches)
    assert sum(batches) == 64 * len(of_a_sample)
    times = np.array(of_a_sample) * batches
    assert times.max() <= times.min() * 1.15


def test_steps_in_proportion_to_the_last_measured_speed() -> None:
    clock, ledger = ProportionalSteps(8, 3), Ledger(3)
    assert [clock.limit(Progress(rank, 0, 0, 0.0)) for rank in range(3)] == [8, 8, 8]
    ledger.append(entry(0, [8, 8, 8], [1.0, 2.0, 4.0]))
    clock.merged(ledger)  # speeds 8, 4 and 2 a second, 14/3 on average
    assert clock.by_rank == [14, 7, 3]
    assert clock.is_due(Progress(2, 1, 3, 0.0))
    assert not clock.is_due(Progress(0, 1, 13, 0.0))
    ledger.append(entry(1, [14, 7, 0], [1.0, 1.0, 0.0]))
    clock.merged(ledger)
    assert clock.by_rank == [11, 5, 1]  # one that did nothing does one step
    ledger.append(entry(2, [0, 0, 0], [0.0, 0.0, 0.0]))
    clock.merged(ledger)
    assert clock.by_rank == [11, 5, 1]


def test_steps_must_be_steps() -> None:
    with pytest.raises(ValueError, match="at least 1 step"):
        ProportionalSteps(0, 2)
