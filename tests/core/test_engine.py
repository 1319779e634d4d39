"""The engine: its theory of operation as examples with plain values, then its rules over random schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_abs.core.clocks import Clock, CountClock, Progress, SyncClock
from horovod_abs.core.engine import Action, Engine, EngineError
from horovod_abs.core.ledger import Column, Entry, Flag, Floats
from horovod_abs.sim.cluster import Program, Step
from tests.core.schedules import (
    NeverClock,
    Run,
    Schedule,
    Witness,
    epoch,
    flagging,
    leaving,
    loop,
    raising,
    run,
    schedules,
)

# -- examples --------------------------------------------------------------------------------------------------------


def compute(engine: Engine, times: int = 1, samples: float = 16) -> Action:
    """Compute so many micro-batches, each of which the engine must ask for, and return what is next."""
    for number in range(times):
        if number:
            assert engine.next_action(0) is Action.COMPUTE
        engine.micro_batch_done(samples, samples, 0.1)
    return engine.next_action(0)


def launch(*engines: Engine) -> Entry:
    """Launch an exchange on all ranks, and return what it will bring."""
    rows: list[Floats] = []
    for engine in engines:
        assert engine.next_action(0) is Action.LAUNCH
        rows.append(engine.row())
        engine.launched()
    return Entry(engines[0].launches - 1, np.stack(rows))


def merge(entry: Entry, *engines: Engine) -> None:
    """Complete an exchange and merge it on these ranks."""
    for engine in engines:
        engine.exchange_complete()
        assert engine.next_action(0) is Action.MERGE
        engine.merged(entry, 0)


def pair(clock: Clock | None = None, **options: int) -> tuple[Engine, Engine]:
    """The engines of two ranks."""
    return Engine(2, clock or SyncClock(), **options), Engine(2, clock or SyncClock(), **options)


def test_the_published_rule() -> None:
    """Micro-batches of round k are added up while exchange k−1 is under way, and launched when it is complete."""
    slow, fast = pair()

    assert compute(slow) is compute(fast) is Action.LAUNCH  # nothing is under way: the round ends at once
    first = launch(slow, fast)
    assert first.weight == 32

    assert compute(fast, 3) is Action.COMPUTE  # exchange 0 is under way, and nobody waits for it
    assert compute(slow, 1) is Action.COMPUTE
    for rank in (slow, fast):
        rank.exchange_complete()
        assert rank.next_action(0) is Action.MERGE
        rank.merged(first, now=1)
        assert rank.next_action(1) is Action.LAUNCH  # at the same boundary, before anything is computed
    second = launch(slow, fast)
    assert second.column(Column.WEIGHT).tolist() == [16, 48]
    assert second.column(Column.MICRO_BATCHES).tolist() == [1, 3]
    assert slow.ledger.rounds == 1
    assert slow.launches == 2
    assert slow.in_flight


def test_an_exchange_that_completes_before_a_micro_batch_waits_for_one() -> None:
    """An exchange is not merged before there is something to launch after it."""
    a, b = pair()
    compute(a)
    compute(b)
    launch(a, b)
    a.exchange_complete()
    assert a.next_action(0) is Action.COMPUTE
    assert compute(a) is Action.MERGE


def test_delay_zero_waits_for_its_own_exchange() -> None:
    a, b = pair(delay=0)
    compute(a)
    compute(b)
    entry = launch(a, b)
    assert a.next_action(0) is Action.WAIT
    merge(entry, a, b)
    assert a.next_action(0) is Action.COMPUTE
    assert not a.in_flight
    assert compute(a) is Action.LAUNCH


def test_min_micro_batches_are_done_before_a_round_ends() -> None:
    engine = Engine(1, SyncClock(), min_micro_batches=3)
    assert compute(engine, 2) is Action.COMPUTE
    assert compute(engine, 1) is Action.LAUNCH


def test_max_micro_batches_make_a_rank_wait() -> None:
    a, b = pair(max_micro_batches=2)
    assert compute(a) is Action.LAUNCH
    compute(b)
    entry = launch(a, b)
    assert compute(a, 2) is Action.WAIT
    with pytest.raises(EngineError, match=r"may not compute \(computing, 1 exchanges launched, 0 merged, 2 micro"):
        a.micro_batch_done(16, 16, 0.1)
    merge(entry, a)
    assert launch(a).rows[0, Column.MICRO_BATCHES] == 2
    assert a.next_action(0) is Action.COMPUTE


def test_max_micro_batches_end_a_round_that_no_clock_would_end() -> None:
    assert compute(Engine(1, NeverClock(), max_micro_batches=5), 5) is Action.LAUNCH


def test_count_clock_ends_a_round_after_its_count() -> None:
    a, b = pair(CountClock(2))
    assert compute(a, 1) is Action.COMPUTE
    assert compute(a, 1) is Action.LAUNCH
    compute(b, 2)
    entry = launch(a, b)
    a.exchange_complete()
    assert compute(a, 1) is Action.COMPUTE  # complete, but it is not time yet
    assert compute(a, 1) is Action.MERGE
    a.merged(entry, 0)
    assert a.next_action(0) is Action.LAUNCH


def test_a_clock_is_shown_the_round_its_micro_batches_and_the_time_since_the_last_merge() -> None:
    shown: list[Progress] = []

    class Recording(Clock):
        def is_due(self, progress: Progress) -> bool:
            shown.append(progress)
            return True

    engine = Engine(1, Recording(), delay=0)
    engine.next_action(10.0)
    engine.micro_batch_done(1, 1, 1)
    engine.next_action(12.0)
    entry = launch(engine)
    engine.exchange_complete()
    engine.next_action(13.0)
    engine.merged(entry, 13.0)
    engine.micro_batch_done(1, 1, 1)
    engine.micro_batch_done(1, 1, 1)
    engine.next_action(17.0)
    assert shown == [
        Progress(rank=0, round=0, micro_batches=1, elapsed=2.0, drawn=1),
        Progress(rank=0, round=1, micro_batches=2, elapsed=4.0, drawn=2),
    ]


def test_a_dropped_micro_batch_is_drawn_and_weighs_nothing() -> None:
    engine = Engine(1, SyncClock(), min_micro_batches=2)
    engine.micro_batch_done(weight=0, drawn=16, seconds=0.25)
    engine.micro_batch_done(weight=8, drawn=8, seconds=0.5)
    engine.data_drawn(4)
    engine.waited(2.0)
    row = engine.row(options=7)
    assert row[Column.WEIGHT] == 8
    assert row[Column.DRAWN] == 28
    assert row[Column.MICRO_BATCHES] == 2
    assert row[Column.COMPUTE_SECONDS] == 0.75
    assert row[Column.WAIT_SECONDS] == 2.0
    assert row[Column.FLAGS] == 0
    assert row[Column.OPTIONS] == 7
    launch(engine)
    assert not engine.row().any()  # a new round starts from nothing


def test_a_rank_without_data_takes_part_until_the_next_merge() -> None:
    a, b = pair()
    a.starve()
    compute(b)
    entry = launch(a, b)
    assert entry.column(Column.WEIGHT).tolist() == [0, 16]
    assert a.next_action(0) is Action.WAIT  # it has nothing to compute
    assert b.next_action(0) is Action.COMPUTE
    merge(entry, a)
    assert not a.starved
    launch(a)
    assert a.next_action(0) is Action.COMPUTE


def test_an_empty_round_counts_as_a_round() -> None:
    a, b = pair(delay=0)
    a.starve()
    b.starve()
    entry = launch(a, b)
    assert entry.weight == 0
    merge(entry, a, b)
    assert a.ledger.rounds == b.ledger.rounds == 1
    assert a.next_action(0) is Action.COMPUTE


def test_closing_when_one_rank_has_merged_and_launched_and_the_other_has_not_looked() -> None:
    """Waiting for what is in flight would deadlock here: ``ahead`` is in exchange 1, which ``behind`` never starts."""
    ahead, behind = pair()
    compute(ahead)
    compute(behind)
    zero = launch(ahead, behind)

    compute(ahead)
    merge(zero, ahead)
    row_of_ahead = launch(ahead).rows[0]
    compute(behind)
    behind.exchange_complete()
    ahead.close()  # both reach the end of their loops
    behind.close()

    assert ahead.next_action(0) is Action.WAIT
    assert behind.next_action(0) is Action.MERGE
    behind.merged(zero, 0)
    row_of_behind = launch(behind).rows[0]  # what it had accumulated, and that it is closing
    assert row_of_behind[Column.FLAGS] == Flag.CLOSING
    assert row_of_behind[Column.WEIGHT] == 16
    one = Entry(1, np.stack([row_of_ahead, row_of_behind]))
    assert not one.all_raised(Flag.CLOSING)

    merge(one, ahead, behind)
    two = launch(ahead, behind)
    assert two.all_raised(Flag.CLOSING)
    assert two.weight == 0
    assert ahead.next_action(0) is behind.next_action(0) is Action.WAIT
    merge(two, ahead, behind)
    assert ahead.next_action(0) is behind.next_action(0) is Action.CLOSED
    assert ahead.closed
    assert ahead.launches == behind.launches == 3


def test_a_rank_that_has_closed_takes_part_while_another_goes_on() -> None:
    early, late = pair()
    early.close()
    compute(late)
    for _ in range(3):
        entry = launch(early, late)
        assert early.next_action(0) is Action.WAIT
        compute(late)
        merge(entry, early, late)
        with pytest.raises(EngineError):
            early.micro_batch_done(16, 16, 0.1)
    late.close()
    entry = launch(early, late)
    assert entry.column(Column.WEIGHT).tolist() == [0, 16]
    merge(entry, early, late)
    assert early.closed
    assert late.closed


def test_closing_with_nothing_done_is_one_empty_exchange() -> None:
    engine = Engine(1, SyncClock())
    assert engine.next_action(0) is Action.CLOSED
    engine.close()
    entry = launch(engine)
    merge(entry, engine)
    assert entry.weight == 0
    assert engine.next_action(0) is Action.CLOSED


def test_the_engine_opens_again_after_closing() -> None:
    engine = Engine(1, SyncClock())
    for exchange in (0, 1):
        compute(engine)
        engine.close()
        entry = launch(engine)
        assert entry.round == exchange
        merge(entry, engine)
        assert engine.closed


@pytest.mark.parametrize("flag", [Flag.LEAVING, Flag.STOP])
def test_leaving_and_stop_ask_every_rank_to_end_at_the_same_exchange(flag: Flag) -> None:
    a, b = pair()
    a.open()
    b.open()
    compute(a)
    compute(b)
    a.raise_flag(flag)
    entry = launch(a, b)
    assert entry.ranks_with(flag) == (0,)
    assert not a.ending
    compute(a)
    compute(b)
    merge(entry, a, b)
    assert a.ending
    assert b.ending
    entry = launch(a, b)
    assert not entry.ranks_with(flag)  # told once
    assert b.next_action(0) is Action.COMPUTE  # its program may be in the middle of a batch
    b.close()
    assert b.next_action(0) is Action.WAIT


def test_a_checkpoint_closes_the_rounds_and_not_the_epoch() -> None:
    engine = Engine(1, SyncClock(), delay=0)
    engine.open(48, exact=True)
    engine.raise_flag(Flag.CHECKPOINT)
    compute(engine)
    entry = launch(engine)
    assert not engine.checkpoint_due
    merge(entry, engine)
    assert engine.checkpoint_due
    assert not engine.ending
    engine.close()
    merge(launch(engine), engine)
    assert engine.closed
    assert engine.epoch_open
    assert not engine.checkpoint_due  # nothing is pending: this is the moment to save
    for _ in range(2):
        compute(engine)
        merge(launch(engine), engine)
    assert engine.closed
    assert not engine.epoch_open  # 48


def test_stop_is_remembered_after_the_epoch_has_ended() -> None:
    engine = Engine(1, SyncClock(), delay=0)
    engine.open()
    engine.raise_flag(Flag.STOP)
    compute(engine)
    merge(launch(engine), engine)
    assert engine.stopped
    engine.close()
    merge(launch(engine), engine)
    assert engine.closed
    assert engine.stopped
    assert not engine.ending


@pytest.mark.parametrize("delay", [0, 1])
def test_an_exact_target_is_the_last_exchange(delay: int) -> None:
    engine = Engine(1, SyncClock(), delay=delay)
    engine.open(16, exact=True)
    compute(engine)
    entry = launch(engine)
    engine.starve()
    merge(entry, engine)
    assert engine.next_action(0) is Action.CLOSED


def test_the_drawn_target_asks_every_rank_to_end() -> None:
    a, b = pair()
    a.open(40)
    b.open(40)
    compute(a)
    compute(b)
    entry = launch(a, b)
    compute(a)
    compute(b)
    merge(entry, a, b)
    assert not a.ending  # 32 of 40
    entry = launch(a, b)
    compute(a)
    compute(b)
    merge(entry, a, b)
    assert a.ending
    assert b.ending
    entry = launch(a, b)
    assert entry.weight == 32  # nothing that was accumulated is lost
    a.close()
    b.close()
    merge(entry, a, b)
    merge(launch(a, b), a, b)
    assert a.closed
    assert not a.ending


def test_the_rounds_target_counts_from_the_beginning_of_the_run() -> None:
    engine = Engine(1, SyncClock(), delay=0)
    for target in (2, 4):
        engine.open(rounds_target=target)
        while not engine.ending:
            compute(engine)
            merge(launch(engine), engine)
        assert engine.ledger.rounds == target
        engine._close_for_good()


def test_a_rounds_target_is_not_exact() -> None:
    """What a rank has accumulated when the last round is merged must still be merged."""
    engine = Engine(1, SyncClock())
    engine.open(1000, rounds_target=1, exact=True)
    compute(engine)
    entry = launch(engine)
    compute(engine)
    merge(entry, engine)
    assert engine.ending
    assert launch(engine).weight == 16


def test_leaving_does_not_outlive_its_epoch() -> None:
    """A rank leaves while the exchange that ends the epoch is under way: the next epoch must not end for it."""
    engine = Engine(1, SyncClock())
    engine.open(16, exact=True)
    compute(engine)
    entry = launch(engine)
    engine.close(Flag.LEAVING)
    merge(entry, engine)
    assert engine.closed
    compute(engine)
    assert not launch(engine).ranks_with(Flag.LEAVING)


def test_asking_twice_changes_nothing() -> None:
    engine = Engine(1, SyncClock())
    assert [engine.next_action(t) for t in range(3)] == [Action.CLOSED] * 3
    compute(engine)
    assert [engine.next_action(t) for t in range(3)] == [Action.LAUNCH] * 3
    entry = launch(engine)
    compute(engine)
    engine.exchange_complete()
    engine.exchange_complete()
    assert [engine.next_action(t) for t in range(3)] == [Action.MERGE] * 3
    engine.merged(entry, 3)
    assert engine.ledger.rounds == 1


def test_a_bug_in_the_driver_is_named() -> None:
    engine = Engine(1, SyncClock())
    with pytest.raises(EngineError, match=r"no exchange is in flight \(closed, 0 exchanges launched"):
        engine.exchange_complete()
    with pytest.raises(EngineError, match="no launch was asked for"):
        engine.launched()
    with pytest.raises(EngineError, match="no merge was asked for"):
        engine.merged(Entry(0, np.zeros((1, len(Column)))), 0)
    compute(engine)
    with pytest.raises(EngineError, match=r"have not been closed \(launching, 0 exchanges launched, 0 merged, 1 micro"):
        engine.open()
    with pytest.raises(EngineError, match="may not compute"):  # a launch was asked for
        engine.micro_batch_done(16, 16, 0.1)


def test_delay_zero_may_not_compute_while_its_exchange_is_in_flight() -> None:
    engine = Engine(1, SyncClock(), delay=0)
    compute(engine)
    launch(engine)
    with pytest.raises(EngineError, match="may not compute"):
        engine.micro_batch_done(16, 16, 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"delay": 2}, "delay must be 0 or 1, got 2"),
        ({"min_micro_batches": 0}, "got 0 and 64"),
        ({"min_micro_batches": 5, "max_micro_batches": 4}, "got 5 and 4"),
        ({"clock": CountClock(9), "max_micro_batches": 8}, "pass max_micro_batches=9 or more"),
    ],
)
def test_arguments_are_checked_at_construction(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(**({"size": 1, "clock": SyncClock()} | options))  # type: ignore[arg-type]


def test_a_resumed_run_goes_on_counting_where_the_ledger_stands() -> None:
    before = Engine(1, SyncClock())
    compute(before)
    before.close()
    merge(launch(before), before)

    engine = Engine(1, SyncClock())
    engine.load_state_dict(before.state_dict())
    assert engine.launches == 1
    assert not engine.in_flight
    compute(engine)
    entry = launch(engine)
    assert entry.round == 1
    assert engine.in_flight
    compute(engine)
    merge(entry, engine)
    assert engine.ledger.rounds == 2


# -- properties ------------------------------------------------------------------------------------------------------


@given(schedules(), st.integers(1, 3))
def test_loops_that_close_at_different_rounds(schedule: Schedule, loops: int) -> None:
    """Loops without ``epoch()``, of a random length on each rank, some without any data."""

    def program(rank: Witness) -> Program:
        for number in range(loops):
            count = schedule.random("count", rank.rank, number).randint(0, 12)
            yield from loop(schedule.steps(rank, schedule.batches(rank.rank, number, count)))

    seen = run(schedule, program)
    assert len(seen.segments) == loops


def quotas(schedule: Schedule, number: int, empty: float) -> list[int]:
    """How many micro-batches each rank has in an epoch."""
    random = schedule.random("quotas", number)
    return [0 if random.random() < empty else random.randint(0, 12) for _ in range(schedule.size)]


@given(schedules(), st.integers(1, 3), st.sampled_from((0.0, 0.5, 1.0)))
def test_exact_epochs(schedule: Schedule, epochs: int, empty: float) -> None:
    """Each rank has its own share of the epoch, possibly none; the exchange that counts the last index is the last."""
    shares = [
        [schedule.batches(rank, number, count) for rank, count in enumerate(quotas(schedule, number, empty))]
        for number in range(epochs)
    ]
    totals = [sum(batch.samples for batches in share for batch in batches) for share in shares]

    def program(rank: Witness) -> Program:
        for share, total in zip(shares, totals, strict=True):
            yield from epoch(rank, schedule.steps(rank, share[rank.rank]), total, exact=True)

    seen = run(schedule, program)
    ends = np.cumsum([entry.column(Column.DRAWN).sum() for entry in seen.entries])
    assert [ends[segment[-1]] for segment in seen.segments] == np.cumsum(totals).tolist()
    for segment, total in zip(seen.segments, totals, strict=True):
        assert total == 0 or seen.entries[segment[-1]].column(Column.DRAWN).any(), "goes on after the end"


@given(schedules(), st.integers(1, 3), st.sampled_from((0.0, 0.5)), st.booleans(), st.sampled_from((0.0, 0.6)))
def test_epochs_that_end_for_all(
    schedule: Schedule, epochs: int, empty: float, by_rounds: bool, hesitates: float
) -> None:
    """Ranks that always have data, and ranks that never have any, until so many indices or rounds are through."""
    random = schedule.random("epochs")
    targets = [(math.inf, random.randint(1, 8)) if by_rounds else (random.randint(0, 500), 40) for _ in range(epochs)]
    shares = [
        [
            schedule.batches(rank, number, 400 if rank == 0 or random.random() >= empty else 0)
            for rank in range(schedule.size)
        ]
        for number in range(epochs)
    ]

    def program(rank: Witness) -> Program:
        for share, (drawn, rounds) in zip(shares, targets, strict=True):
            steps = schedule.steps(rank, share[rank.rank])
            yield from epoch(rank, steps, drawn, rounds, hesitates=hesitates)

    seen = run(schedule, program)
    assert len(seen.segments) == epochs
    for segment, (drawn, rounds) in zip(seen.segments, targets, strict=True):
        sums = np.cumsum([seen.entries[number].column(Column.DRAWN).sum() for number in segment])
        filled = min(rounds, 1 + int(np.argmax(sums >= drawn)) if sums[-1] >= drawn else math.inf)
        assert len(segment) > filled or schedule.size == 1
        if not hesitates:
            assert len(segment) == filled + 1 + schedule.delay, "all answer at once"


class Shares:
    """What every rank has in each of a few epochs, and who does something unusual in it.

    Args:
        count: Micro-batches of rank 0 in an epoch; the others have up to so many.
    """

    def __init__(self, schedule: Schedule, epochs: int, count: int) -> None:
        random = schedule.random("shares")
        ranks = range(schedule.size)
        counts = [[count, *(random.randint(0, count) for _ in ranks[1:])] for _ in range(epochs)]
        self.batches = [[schedule.batches(r, number, counts[number][r]) for r in ranks] for number in range(epochs)]
        self.totals = [sum(batch.samples for share in epoch for batch in share) for epoch in self.batches]
        # The unusual happens on rank 0 for certain, and perhaps on others: after which of their steps.
        self.after = [
            {r: random.randint(0, 2 * count) for r in ranks if r == 0 or random.random() < 0.3} for _ in range(epochs)
        ]


@given(schedules(), st.integers(1, 3), st.booleans())
def test_leaving_early_ends_the_epoch_for_all(schedule: Schedule, epochs: int, exact: bool) -> None:
    """Some ranks ``break`` out of their epochs at random moments. The last epoch is complete all the same."""
    shares = Shares(schedule, epochs + 1, 12)

    def program(rank: Witness) -> Program:
        for number in range(epochs + 1):
            steps: Iterable[Step] = schedule.steps(rank, shares.batches[number][rank.rank])
            if number < epochs and rank.rank in shares.after[number]:
                steps = leaving(steps, shares.after[number][rank.rank])
            is_exact = exact or number == epochs
            yield from epoch(rank, steps, shares.totals[number] if is_exact else math.inf, exact=is_exact)

    seen = run(schedule, program)
    assert len(seen.segments) == epochs + 1
    for segment in seen.segments[:-1]:
        check_promptness(seen, segment, Flag.LEAVING)
    last = [seen.entries[number].column(Column.DRAWN).sum() for number in seen.segments[-1]]
    assert sum(last) == shares.totals[-1], "an early end of the epoch before leaks into this one"


def check_promptness(seen: Run, segment: range, flag: Flag) -> None:
    """After the first entry with the flag all close at once."""
    shown = next((number for number in segment if seen.entries[number].ranks_with(flag)), segment[-1])
    assert segment[-1] <= shown + 1 + seen.schedule.delay


@given(schedules(), st.integers(0, 2), st.booleans())
def test_a_rank_that_raises_takes_part_until_all_have_ended(schedule: Schedule, before: int, exact: bool) -> None:
    """Its error leaves the epoch after a last common exchange, so the others end too instead of hanging."""
    shares = Shares(schedule, before + 1, 12)

    def program(rank: Witness) -> Program:
        for number in range(before + 1):
            steps: Iterable[Step] = schedule.steps(rank, shares.batches[number][rank.rank])
            if number == before and rank.rank in shares.after[number]:
                steps = raising(steps, shares.after[number][rank.rank])
            is_exact = exact or number < before
            yield from epoch(rank, steps, shares.totals[number] if is_exact else math.inf, exact=is_exact)

    seen = run(schedule, program)
    check_promptness(seen, seen.segments[-1], Flag.LEAVING)
    assert any(rank.raised for rank in seen.ranks) or exact
    told = {r for number in seen.segments[-1] for r in seen.entries[number].ranks_with(Flag.LEAVING)}
    assert told <= {rank.rank for rank in seen.ranks if rank.raised}
    assert exact or len(told) == sum(rank.raised for rank in seen.ranks)


@given(schedules(), st.integers(1, 3), st.booleans())
def test_stop_from_any_rank_ends_the_run_on_all(schedule: Schedule, stops_in: int, exact: bool) -> None:
    """STOP and CHECKPOINT are raised at any moment; every rank learns of them from the same exchanges."""
    shares = Shares(schedule, 4, 12)
    stopped: dict[int, list[int]] = {rank: [] for rank in range(schedule.size)}

    def program(rank: Witness) -> Program:
        for number in range(4):
            steps: Iterable[Step] = schedule.steps(rank, shares.batches[number][rank.rank])
            if rank.rank in shares.after[number]:
                flag = Flag.STOP if number >= stops_in else Flag.CHECKPOINT
                steps = flagging(rank, steps, flag, shares.after[number][rank.rank])
            is_exact = exact or number < stops_in
            yield from epoch(rank, steps, shares.totals[number] if is_exact else math.inf, exact=is_exact)
            if rank.stopped:
                stopped[rank.rank].append(rank.ledger.rounds)
                return

    seen = run(schedule, program)
    assert bool(stopped[0]) == any(entry.ranks_with(Flag.STOP) for entry in seen.entries)
    assert all(stopped[rank] == stopped[0] for rank in stopped)
    assert stopped[0] or exact, "nothing else ends an epoch without a target"


@given(schedules(), st.integers(1, 3))
def test_a_checkpoint_drains_the_rounds_and_the_epoch_goes_on(schedule: Schedule, epochs: int) -> None:
    """Asked for by any rank at any moment; every rank finds nothing pending after the same exchange."""
    shares = Shares(schedule, epochs, 12)

    def program(rank: Witness) -> Program:
        for number in range(epochs):
            steps: Iterable[Step] = schedule.steps(rank, shares.batches[number][rank.rank])
            if rank.rank in shares.after[number]:
                steps = flagging(rank, steps, Flag.CHECKPOINT, shares.after[number][rank.rank])
            yield from epoch(rank, steps, shares.totals[number], exact=True)

    seen = run(schedule, program)
    for segment in seen.segments:
        check_promptness(seen, segment, Flag.CHECKPOINT)
    drawn = np.cumsum([entry.column(Column.DRAWN).sum() for entry in seen.entries])
    assert set(np.cumsum(shares.totals)) <= {drawn[segment[-1]] for segment in seen.segments}
    assert drawn[-1] == sum(shares.totals), "an epoch ends early"


@given(schedules(starving=False), st.integers(1, 4), st.integers(0, 20), st.data())
def test_count_clock_is_deterministic_where_it_bounds_the_round(
    schedule: Schedule, count: int, batches: int, data: st.DataObject
) -> None:
    """With as many micro-batches at most, the same rounds come out whatever the speeds, pauses and the network."""
    schedule = replace(schedule, clock=CountClock(count), min_micro_batches=1, max_micro_batches=count)
    drawn = data.draw(schedules(starving=False))
    other = replace(schedule, spread=drawn.spread, jitter=drawn.jitter, pauses=drawn.pauses)
    other = replace(other, exchange_seconds=drawn.exchange_seconds)

    def rounds(schedule: Schedule) -> list[list[list[float]]]:
        def program(rank: Witness) -> Program:
            yield from loop(schedule.steps(rank, schedule.batches(rank.rank, 0, batches + rank.rank % 3)))

        columns = [Column.WEIGHT, Column.DRAWN, Column.MICRO_BATCHES, Column.FLAGS]
        return [entry.rows[:, columns].tolist() for entry in run(schedule, program).entries]

    assert rounds(schedule) == rounds(other)


RATE, SAMPLES, DIMENSIONS = 0.05, 2048, 3


class Trainer(Witness):
    """A rank that minimises Σ a/2 |x − c|² over its own samples, as a binding would, with plain SGD."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        super().__init__(schedule, rank)
        self.x = np.zeros(DIMENSIONS)
        self.accumulator = np.zeros(DIMENSIONS)
        self.samples = 0

    def micro_batch_done(self, weight: float, drawn: float, seconds: float) -> None:
        super().micro_batch_done(weight, drawn, seconds)
        self.accumulator += gradient(self.x, self.rank, self.samples, int(weight))
        self.samples += int(weight)


def gradient(x: Floats, rank: int, first: int, count: int) -> Floats:
    """The sum of the gradients of so many of a rank's samples."""
    samples = np.arange(first, first + count) + SAMPLES * rank
    a, c = 0.5 + samples % 7 / 7, np.sin(np.multiply.outer(samples, 1.0 + np.arange(DIMENSIONS)))
    return cast(Floats, (a[:, None] * (x - c)).sum(axis=0))


def replay(seen: Run) -> Floats:
    """The formula of [ABS-SGD] in a single process, x_{k+1} = x_k − η ḡ^{k−1}, from the ledger alone."""
    x, position = np.zeros(DIMENSIONS), np.zeros(seen.schedule.size, dtype=int)
    for segment in seen.segments:
        mean_before = np.zeros(DIMENSIONS)
        for number in segment:
            weights = seen.entries[number].column(Column.WEIGHT).astype(int)
            total = sum((gradient(x, r, position[r], n) for r, n in enumerate(weights)), np.zeros(DIMENSIONS))
            mean = total / max(weights.sum(), 1)
            position += weights
            x = x - RATE * (mean_before if seen.schedule.delay else mean)
            mean_before = mean
        x = x - RATE * (mean_before if seen.schedule.delay else 0)
    return x


@given(schedules(), st.integers(1, 3))
def test_training_equals_the_published_formula(schedule: Schedule, epochs: int) -> None:
    """Every rank's parameters are those of a single process that replays the ledger, and equal after each merge."""
    shares = Shares(schedule, epochs, 12)
    ranks = [Trainer(schedule, rank) for rank in range(schedule.size)]
    in_flight: dict[tuple[int, int], Floats] = {}
    after: dict[int, Floats] = {}

    def on_launch(rank: int, exchange: int) -> None:
        in_flight[exchange, rank] = ranks[rank].accumulator
        ranks[rank].accumulator = np.zeros(DIMENSIONS)

    def on_merge(rank: int, entry: Entry) -> None:
        if entry.weight:
            total = sum(in_flight[entry.round, r] for r in range(schedule.size))
            ranks[rank].x = ranks[rank].x - RATE * total / entry.weight
        assert np.array_equal(after.setdefault(entry.round, ranks[rank].x), ranks[rank].x)

    def program(rank: Witness) -> Program:
        for number in range(epochs):
            steps: Iterable[Step] = schedule.steps(rank, shares.batches[number][rank.rank])
            if number % 2 and rank.rank in shares.after[number]:
                steps = leaving(steps, shares.after[number][rank.rank])
            yield from epoch(rank, steps, shares.totals[number], exact=not number % 2)

    seen = run(schedule, program, on_launch=on_launch, on_merge=on_merge, ranks=ranks)
    np.testing.assert_allclose(ranks[0].x, replay(seen), rtol=0, atol=1e-12)
