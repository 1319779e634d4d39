"""``ReplayClock``: other speeds and networks, the same rounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_abs.core.clocks import Clock, Progress, ReplayClock
from horovod_abs.core.engine import Engine
from horovod_abs.core.ledger import Column, Entry
from horovod_abs.sim.cluster import Compute, Open, Pause, Program, Starve, Synchronize, VirtualCluster
from tests.core.schedules import Schedule, schedules

AGREED = [Column.WEIGHT, Column.DRAWN, Column.MICRO_BATCHES]


def program(engine: Engine, schedule: Schedule, speeds: int) -> Program:
    """An epoch as a binding runs it, at a speed that ``speeds`` chooses; what it computes does not depend on that."""
    shape, times = schedule.random("shape", engine.rank), schedule.random("times", engine.rank, speeds)
    yield Open()
    for batch in schedule.batches(engine.rank, 0, shape.randint(1, 30)):
        if times.random() < 0.2:
            yield Pause(times.choice((1.0, 5.0, 40.0)))
        yield Compute(batch.samples, times.expovariate(1), drawn=0)
        engine.data_drawn(batch.samples)
        if engine.checkpoint_due and not engine.ending:
            yield Synchronize()
        if engine.ending:
            break
        if shape.random() < schedule.starving:
            yield Starve()
    while engine.epoch_open and not engine.ending:
        engine.exhausted = True
        yield Synchronize() if engine.checkpoint_due else Starve()
    yield Synchronize()


def run(schedule: Schedule, clock: Clock, speeds: int) -> list[Entry]:
    engines = [
        Engine(
            schedule.size,
            clock,
            rank=rank,
            delay=schedule.delay,
            min_micro_batches=schedule.min_micro_batches,
            max_micro_batches=schedule.max_micro_batches,
        )
        for rank in range(schedule.size)
    ]
    times = schedule.random("network", speeds)
    cluster = VirtualCluster(
        engines,
        [program(engine, schedule, speeds) for engine in engines],
        lambda exchange: times.choice((0.1, 1.0, 10.0)),
        max_events=50_000,
    )
    cluster.run()
    return cluster.entries


@given(schedules(), st.integers(1, 1000))
def test_a_record_is_repeated_at_other_speeds(schedule: Schedule, speeds: int) -> None:
    schedule = replace(schedule, dropping=0.0)
    recorded = run(schedule, schedule.clock, 0)
    again = run(schedule, ReplayClock(recorded), speeds)
    assert len(again) == len(recorded)
    for one, other in zip(recorded, again, strict=True):
        np.testing.assert_array_equal(one.rows[:, AGREED], other.rows[:, AGREED])


def test_a_round_that_ended_for_want_of_data_ends_where_data_are_wanted() -> None:
    """The last batch was counted as drawn: the rank asked for another one before its round ended."""
    row = np.zeros((1, len(Column)))
    row[0, AGREED] = 32, 32, 2
    clock = ReplayClock([Entry(0, row)])
    before, after = Progress(0, 0, 2, 0.0, drawn=16.0), Progress(0, 0, 2, 0.0, drawn=32.0)
    assert not clock.is_due(before)
    assert clock.limit(before) > 2
    assert clock.is_due(after)
    assert clock.limit(after) == 2


def test_a_round_without_work_is_left_to_the_program() -> None:
    """Nothing may be computed in it, but the program must get the chance to find out that there are no data."""
    clock = ReplayClock([Entry(0, np.zeros((1, len(Column))))])
    assert clock.limit(Progress(0, 0, 0, 0.0)) > 0


def test_a_run_that_leaves_its_record_says_where() -> None:
    row = np.zeros((2, len(Column)))
    row[1, Column.WEIGHT] = 16
    clock = ReplayClock([Entry(0, row)])
    with pytest.raises(ValueError, match="in round 0: rank 1 has weight 0, recorded 16"):
        clock.replayed(Entry(0, np.zeros((2, len(Column)))))


@pytest.mark.parametrize("entries", [[], [Entry(3, np.zeros((1, len(Column))))]])
def test_a_record_without_its_beginning_is_refused(entries: list[Entry]) -> None:
    with pytest.raises(ValueError, match="all rounds from 0 on"):
        ReplayClock(entries)
