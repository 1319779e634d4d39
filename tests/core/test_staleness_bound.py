"""``max_staleness``, the bound of model updates: as examples, then over random schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_abs.core.clocks import Clock, CountClock, IntervalClock, SyncClock, TargetBatchClock
from horovod_abs.core.engine import Action, Engine
from horovod_abs.core.ledger import Column, Entry, Flag
from horovod_abs.sim.cluster import Program
from tests.core.schedules import Schedule, Witness, epoch, loop, run, schedules

# -- examples --------------------------------------------------------------------------------------------------------


def engine(staleness: int, clock: Clock | None = None, **options: Any) -> Engine:
    return Engine(1, clock or SyncClock(), max_staleness=staleness, **options)


def compute(rank: Engine, times: int, now: float = 0.0) -> Action:
    """Compute so many micro-batches, each of which the engine must ask for, and return what is next."""
    for number in range(times):
        if number:
            assert rank.next_action(now) is Action.COMPUTE
        rank.micro_batch_done(16, 16, 0.1)
    return rank.next_action(now)


def launch(rank: Engine, now: float = 0.0) -> Entry:
    assert rank.next_action(now) is Action.LAUNCH
    entry = Entry(rank.launches, rank.row()[None])
    rank.launched()
    return entry


def merge(rank: Engine, entry: Entry, now: float = 0.0) -> None:
    rank.exchange_complete()
    assert rank.next_action(now) is Action.MERGE
    rank.merged(entry, now)


def bounded(entry: Entry) -> bool:
    return entry.ranks_with(Flag.BOUNDED) == (0,)


def test_a_rank_waits_at_its_greatest_staleness() -> None:
    """Two steps are on their way and two more are done: that is as far as τ = 4 lets it go."""
    rank = engine(4, min_micro_batches=2)
    assert compute(rank, 2) is Action.LAUNCH
    first = launch(rank)
    assert rank.staleness == 2
    assert compute(rank, 2) is Action.WAIT
    assert rank.staleness == 4
    merge(rank, first)
    assert rank.staleness == 2, "those of the round are not in the central model"
    second = launch(rank)
    assert bounded(second)
    assert not bounded(first)


def test_a_rank_with_nothing_to_hand_over_goes_on_after_waiting() -> None:
    """All τ steps are on their way: the rank merges without a launch, and its round goes on."""
    rank = engine(3, CountClock(3))
    assert compute(rank, 3) is Action.LAUNCH
    first = launch(rank)
    assert rank.next_action(0) is Action.WAIT
    merge(rank, first)
    assert rank.next_action(0) is Action.COMPUTE
    assert (rank.staleness, rank.in_flight) == (0, False)
    assert compute(rank, 3) is Action.LAUNCH
    assert not bounded(launch(rank)), "it waited in the round before"


def test_half_of_a_least_round_goes_on_after_waiting() -> None:
    """The bound is reached before the round may be handed over: it is merged into, and goes on."""
    rank = engine(3, min_micro_batches=2)
    compute(rank, 2)
    first = launch(rank)
    assert compute(rank, 1) is Action.WAIT
    merge(rank, first)
    assert rank.next_action(0) is Action.COMPUTE
    assert rank.staleness == 1
    assert compute(rank, 1) is Action.LAUNCH
    assert not bounded(launch(rank)), "the clock ended it"


def test_without_a_bound_staleness_is_counted_all_the_same() -> None:
    rank = Engine(1, SyncClock())
    compute(rank, 1)
    launch(rank)
    compute(rank, 5)
    assert rank.staleness == 6


def test_a_round_that_the_clock_ends_at_the_bound_is_not_bounded() -> None:
    """Reaching the bound does no harm if the round ends at that boundary anyway."""
    rank = engine(4)
    compute(rank, 1)
    first = launch(rank)
    assert compute(rank, 2) is Action.COMPUTE
    rank.micro_batch_done(16, 16, 0.1)
    merge(rank, first)  # complete by then
    assert not bounded(launch(rank))


def test_a_round_that_the_bound_ends_while_nothing_is_in_flight_is_bounded() -> None:
    rank = engine(2, IntervalClock(10.0))
    assert compute(rank, 2) is Action.LAUNCH
    assert bounded(launch(rank))


def test_a_round_held_at_the_bound_until_after_its_tick_is_bounded() -> None:
    """It could have done more before the tick, had it been let."""
    rank = engine(2, IntervalClock(1.0))
    rank.next_action(0.0)
    rank.micro_batch_done(16, 16, 0.1)
    first = launch(rank, 1.0)
    assert not bounded(first)
    assert compute(rank, 1, 1.5) is Action.WAIT
    assert rank.next_action(3.0) is Action.WAIT
    merge(rank, first, 3.5)
    assert bounded(launch(rank, 3.5))


def test_a_round_that_waits_for_its_clock_is_not_bounded() -> None:
    """Algorithm 2: β steps on their way and β done are τ, but it is the clock that lets the rank do no more."""
    rank = engine(6, CountClock(3))
    compute(rank, 3)
    first = launch(rank)
    assert compute(rank, 3) is Action.WAIT
    assert rank.staleness == 6
    merge(rank, first)
    assert not bounded(launch(rank))


def test_a_target_clocks_integrator_is_frozen_in_bounded_rounds() -> None:
    """A batch that the bound has kept below its target says nothing about the interval."""

    def corrections(flag: Flag) -> set[float]:
        rank = Engine(1, TargetBatchClock(640))
        found = set()
        for number in range(6):
            rank.micro_batch_done(16, 16, 0.1)
            rank.close()
            rank.next_action(0)
            row = rank.row()
            row[Column.FLAGS] = int(row[Column.FLAGS]) | flag
            rank.launched()
            merge(rank, Entry(number, row[None]))
            found.add(rank.clock.state_dict()["correction"])
        return found

    assert corrections(Flag.BOUNDED) == {1.0}
    assert len(corrections(Flag(0))) > 1


@pytest.mark.parametrize(("least", "staleness"), [(1, 0), (1, -1), (2, 1), (3, 2)])
def test_a_bound_below_the_least_round_is_refused(least: int, staleness: int) -> None:
    with pytest.raises(ValueError, match=f"min_micro_batches <= max_staleness, got {least} and {staleness}"):
        engine(staleness, min_micro_batches=least)


@pytest.mark.parametrize("count", [5, 9])
def test_a_count_beyond_the_bound_is_refused(count: int) -> None:
    """It would wait for itself."""
    with pytest.raises(ValueError, match=r"a round may hold \(4\).*max_staleness, of ModelUpdates"):
        engine(4, CountClock(count))
    engine(4, CountClock(4))


# -- over random schedules -------------------------------------------------------------------------------------------


few = settings(max_examples=150)


@few
@given(schedules(delays=st.just(1), bounded=True))
def test_the_rules_hold_with_a_bound(schedule: Schedule) -> None:
    """All rules of the engine, staleness never above τ, and the flag of bounded rounds: see :class:`Witness`."""
    run(schedule, lambda rank: loop(schedule.steps(rank, schedule.batches(rank.rank, 0, 12))))


@few
@given(schedules(delays=st.just(1), bounded=True))
def test_epochs_end_with_a_bound(schedule: Schedule) -> None:
    def program(rank: Witness) -> Program:
        for number in range(2):
            yield from epoch(rank, schedule.steps(rank, schedule.batches(rank.rank, number, 40)), rounds=6)

    run(schedule, program)


@few
@given(schedules(delays=st.just(1), bounded=True, clocks=st.just(SyncClock()), starving=False))
def test_a_staleness_of_1_never_overlaps(schedule: Schedule) -> None:
    """τ = 1: no rank computes while its last micro-batch is on its way."""
    schedule = replace(schedule, max_staleness=1, min_micro_batches=1)
    done = run(schedule, lambda rank: loop(schedule.steps(rank, schedule.batches(rank.rank, 0, 12))))
    for rank in done.ranks:
        assert rank.greatest == 1
        assert all(len(seen.micro_batches) <= 1 for seen in rank.contributions)


@few
@given(schedules(delays=st.just(1), bounded=True, starving=False), st.integers(1, 6))
def test_algorithm_2(schedule: Schedule, beta: int) -> None:
    """CountClock(β) with τ = 2β: exactly β micro-batches a round, and never a bounded round."""
    schedule = replace(
        schedule, clock=CountClock(beta), max_staleness=2 * beta, min_micro_batches=1, max_micro_batches=64
    )
    done = run(schedule, lambda rank: loop(schedule.steps(rank, schedule.batches(rank.rank, 0, 4 * beta))))
    counts = np.array([entry.column(Column.MICRO_BATCHES) for entry in done.entries])
    assert counts.tolist() == [[beta] * schedule.size] * 4 + [[0] * schedule.size]
    assert max(rank.greatest for rank in done.ranks) <= 2 * beta
    assert not any(entry.ranks_with(Flag.BOUNDED) for entry in done.entries)
