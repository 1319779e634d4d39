"""The virtual cluster: time, what its steps mean, and how it says that a run is stuck."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_abs.core.clocks import Clock, CountClock, IntervalClock, SyncClock, TargetBatchClock
from horovod_abs.core.engine import Engine
from horovod_abs.core.ledger import Column, Entry, Flag
from horovod_abs.sim.cluster import (
    Compute,
    Open,
    Pause,
    Program,
    Starve,
    Step,
    Stream,
    Synchronize,
    VirtualCluster,
    VirtualDeadlock,
    VirtualRank,
)
from horovod_abs.sim.speeds import Bursts, Cost, Noise, RankModel, RankSpeed, Stall
from tests.core.schedules import Schedule, Witness, loop, run, schedules


def program(steps: Iterable[Step]) -> Program:
    """A program that takes these steps, whatever happens."""
    yield from steps


def cluster(*steps: Sequence[Step], exchange_seconds: float = 0.5, delay: int = 1) -> VirtualCluster:
    """A cluster with one list of steps per rank."""
    engines = [Engine(len(steps), SyncClock(), delay=delay) for _ in steps]
    return VirtualCluster(engines, list(map(program, steps)), lambda exchange: exchange_seconds)


def test_an_exchange_takes_its_time_from_its_last_launch() -> None:
    """A timeline by hand: micro-batches of 1 and 2 seconds, exchanges of half a second."""
    fast: list[Step] = [Compute(1, 1.0)] * 5
    slow: list[Step] = [Compute(1, 2.0)] * 3
    virtual = cluster([*fast, Synchronize()], [*slow, Synchronize()])
    virtual.run()
    # Exchange 0 is launched at 1 and 2, complete at 2.5, and seen at the next boundaries, 3 and 4.
    assert virtual.ranks[0].launches[:3] == [(1.0, 0), (3.0, 1), (5.0, 2)]
    assert virtual.ranks[1].launches[:3] == [(2.0, 0), (4.0, 1), (6.0, 2)]
    assert virtual.ranks[0].merges[:2] == [(3.0, 0), (5.0, 1)]
    assert virtual.ranks[1].merges[:2] == [(4.0, 0), (6.0, 1)]
    # Both have closed: what remains are waits. Exchange 2 completes at 6.5, and 3, which all close with, at 7.
    assert [rank.merges[2:] for rank in virtual.ranks] == [[(6.5, 2), (7.0, 3)]] * 2
    assert [rank.ended for rank in virtual.ranks] == [7.0, 7.0]
    assert [(rank.computing, rank.waiting) for rank in virtual.ranks] == [(5.0, 2.0), (6.0, 1.0)]
    assert [entry.column(Column.WEIGHT).tolist() for entry in virtual.entries] == [[1, 1], [2, 1], [2, 1], [0, 0]]
    assert virtual.entries[3].column(Column.WAIT_SECONDS).tolist() == [1.5, 0.5]


def test_with_delay_zero_everyone_waits_for_the_slowest_and_the_exchange() -> None:
    virtual = cluster(*([*[Compute(1, seconds)] * 3, Synchronize()] for seconds in (1.0, 2.0)), delay=0)
    virtual.run()
    assert virtual.ranks[0].merges[:3] == virtual.ranks[1].merges[:3] == [(2.5, 0), (5.0, 1), (7.5, 2)]
    assert virtual.ranks[0].waiting == 3 * 1.5 + 0.5  # the last half second is the exchange that closes
    assert virtual.ranks[1].waiting == 3 * 0.5 + 0.5


def test_steps_count_for_what_they_say() -> None:
    virtual = cluster([Compute(16, 1.0, weight=0), Compute(16, 1.0, drawn=4), Compute(8, 1.0), Synchronize()])
    virtual.run()
    ledger = virtual.ranks[0].engine.ledger
    assert ledger.weight.tolist() == [24]
    assert ledger.drawn.tolist() == [28]


def test_a_pause_takes_time_and_nobody_looks_at_the_engine() -> None:
    steps: list[Step] = [*[Compute(1, 1.0)] * 2, Pause(10.0), Compute(1, 1.0), Synchronize()]
    virtual = cluster(steps, exchange_seconds=1.5)
    virtual.run()
    assert virtual.ranks[0].merges[0] == (13.0, 0)  # complete since 2.5, seen at the next boundary
    assert virtual.ranks[0].computing == 3.0


def test_a_starving_rank_waits_for_the_next_merge() -> None:
    virtual = cluster([Starve(), Synchronize()], [Compute(1, 3.0), Synchronize()])
    virtual.run()
    assert virtual.ranks[0].launches[0] == (0.0, 0)
    assert virtual.ranks[0].merges[0] == (3.5, 0)
    assert virtual.ranks[0].waiting >= 3.5


def test_an_epoch_ends_at_its_target() -> None:
    virtual = cluster([Open(3, exact=True), *[Compute(1, 1.0)] * 3, Starve(), Compute(1, 1.0), Synchronize()])
    virtual.run()
    assert virtual.entries[2].column(Column.DRAWN).tolist() == [1]  # the third; what follows is another segment
    assert virtual.ranks[0].merges[2] == (3.5, 2)
    assert virtual.ranks[0].launches[3] == (4.5, 3)


def test_programs_may_end_by_rounds() -> None:
    engine = Engine(1, CountClock(2), delay=0)

    def program() -> Program:
        yield Open(rounds_target=3)
        while not engine.ending:
            yield Compute(1, 1.0)
        yield Synchronize()

    virtual = VirtualCluster([engine], [program()], lambda exchange: 0.0)
    virtual.run()
    assert engine.ledger.weight.tolist() == [6]


def test_leaving_is_told_to_all() -> None:
    virtual = cluster([Compute(1, 1.0), Synchronize(Flag.LEAVING)], [Compute(1, 1.0), Synchronize()])
    virtual.run()
    assert [entry.ranks_with(Flag.LEAVING) for entry in virtual.entries] == [(), (0,)]


def test_hooks_see_every_launch_and_merge() -> None:
    launches: list[tuple[int, int]] = []
    merges: list[tuple[int, Entry]] = []
    steps: list[Step] = [Compute(1, 1.0), Synchronize()]
    engines = [Engine(2, SyncClock()), Engine(2, SyncClock())]
    virtual = VirtualCluster(
        engines,
        [program(steps), program(steps)],
        lambda exchange: 0.5,
        on_launch=lambda rank, exchange: launches.append((rank, exchange)),
        on_merge=lambda rank, entry: merges.append((rank, entry)),
    )
    virtual.run()
    assert launches == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [(rank, entry.round) for rank, entry in merges] == launches
    assert all(entry is virtual.entries[entry.round] for _, entry in merges)


def test_a_rank_that_ends_without_closing_is_a_deadlock_that_names_it() -> None:
    virtual = cluster([Compute(1, 1.0)], [Compute(1, 1.0), Synchronize()])
    with pytest.raises(
        VirtualDeadlock, match=r"deadlock at 1\.500 s: rank 0 has ended, 1 launched, 0 merged; rank 1 is"
    ):
        virtual.run()


def test_a_program_that_goes_on_for_ever_is_a_livelock() -> None:
    def forever() -> Program:
        while True:
            yield Starve()

    virtual = VirtualCluster([Engine(1, SyncClock())], [forever()], lambda exchange: 0.0, max_events=5000)
    with pytest.raises(VirtualDeadlock, match=r"livelock at 0\.000 s"):
        virtual.run()


def test_many_steps_without_time_passing_are_no_recursion() -> None:
    virtual = cluster([Synchronize()] * 5000, exchange_seconds=0.0)
    virtual.run()
    assert len(virtual.entries) == 5000


def test_a_bug_in_a_program_is_not_swallowed() -> None:
    def program() -> Program:
        yield Compute(1, 1.0)
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        VirtualCluster([Engine(1, SyncClock())], [program()], lambda exchange: 0.0).run()


def test_every_rank_needs_a_program() -> None:
    with pytest.raises(ValueError, match="zip"):
        VirtualCluster([Engine(1, SyncClock())], [], lambda exchange: 0.0)


def shares_of_ideal(speeds: list[float], delay: int) -> float:
    """Samples per second of a mixed cluster in 200 s, as a share of what its ranks do alone."""
    virtual = cluster(
        *([*[Compute(1, seconds)] * int(200 / seconds), Synchronize()] for seconds in speeds), delay=delay
    )
    virtual.run()
    ended = max(rank.ended or 0 for rank in virtual.ranks)
    done = sum(entry.weight for entry in virtual.entries if entry.column(Column.WEIGHT).all())
    last = max(time for time, number in virtual.ranks[0].merges if virtual.entries[number].column(Column.WEIGHT).all())
    assert last <= ended
    return done / last / sum(1 / seconds for seconds in speeds)


def test_delay_one_keeps_a_mixed_cluster_busy_and_delay_zero_does_not() -> None:
    assert shares_of_ideal([1.0, 1.0, 2.0, 4.0], delay=1) > 0.97
    assert shares_of_ideal([1.0, 1.0, 2.0, 4.0], delay=0) < 0.35  # 4 samples every 4.5 s, of 2.75 a second


@given(schedules())
def test_the_time_of_a_rank_adds_up(schedule: Schedule) -> None:
    """A rank computes, pauses or waits, and merges nothing before it is complete."""
    paused = [0.0] * schedule.size

    def program(rank: Witness) -> Program:
        for step in loop(schedule.steps(rank, schedule.batches(rank.rank, 0, 6))):
            paused[rank.rank] += step.seconds if isinstance(step, Pause) else 0
            yield step

    virtual = run(schedule, program).cluster
    for rank, pauses in zip(virtual.ranks, paused, strict=True):
        assert rank.ended == pytest.approx(rank.computing + rank.waiting + pauses)
    check_times(virtual, schedule)


def test_the_same_programs_give_the_same_run() -> None:
    schedule = Schedule(
        size=4,
        delay=1,
        clock=SyncClock(),
        min_micro_batches=1,
        max_micro_batches=8,
        spread=8,
        jitter=2.0,
        pauses=0.1,
        starving=0.1,
        dropping=0.1,
        exchange_seconds=3.0,
        late=True,
        seed=1,
    )

    def times() -> list[tuple[object, ...]]:
        seen = run(schedule, lambda rank: loop(schedule.steps(rank, schedule.batches(rank.rank, 0, 50))))
        return [(rank.ended, rank.merges, rank.launches) for rank in seen.cluster.ranks]

    assert times() == times()


def check_times(virtual: VirtualCluster, schedule: Schedule) -> None:
    """No rank merges an exchange before it is complete, and a waiting one merges it at that moment."""

    def at(rank: VirtualRank, what: str, exchange: int) -> float:
        times: list[tuple[float, int]] = getattr(rank, what)
        return times[exchange][0]

    for entry in virtual.entries:
        launched = max(at(rank, "launches", entry.round) for rank in virtual.ranks)
        done = launched + schedule.exchange_time(entry.round)
        assert all(at(rank, "merges", entry.round) >= done for rank in virtual.ranks)
        if schedule.delay == 0 and schedule.pauses == 0:
            assert all(at(rank, "merges", entry.round) == done for rank in virtual.ranks)


CLOCKS: dict[str, Callable[[], Clock]] = {
    "sync": SyncClock,
    "count": lambda: CountClock(5),
    "interval": lambda: IntervalClock(0.37),
    "target": lambda: TargetBatchClock(400),
}


@given(
    st.sampled_from(sorted(CLOCKS)),
    st.integers(0, 1),
    st.lists(st.sampled_from((1.0, 0.7, 0.25, 0.03)), min_size=1, max_size=5),
    st.sampled_from((0.001, 0.2, 1.5)),
    st.sampled_from((None, 5, 13)),
    st.sampled_from((None, 0.0, 0.004)),
    st.integers(0, 1000),
)
def test_a_stream_is_as_many_single_micro_batches(
    clock: str,
    delay: int,
    speeds: Sequence[float],
    exchange: float,
    max_staleness: int | None,
    tick_seconds: float | None,
    seed: int,
) -> None:
    """The engines decide the same, at the same times, whether they are told of micro-batches one by one or in bulk."""
    models = [
        RankModel(Cost(0.002, 0.001), speed, Noise(0.2, 0.05), (Bursts(2.0, 1.0, 3.0),), (Stall(4.0, 1.5),))
        for speed in speeds
    ]

    def play(*, in_bulk: bool) -> VirtualCluster:
        def one_by_one(rank: int) -> Program:
            while virtual.now < 10.0:
                yield Compute(16, speed[rank].seconds(16, virtual.now))
            yield Synchronize()

        def stream(rank: int) -> Program:
            yield Stream(16, speed[rank].until, 10.0)
            yield Synchronize()

        speed = [RankSpeed(model, (seed, rank)) for rank, model in enumerate(models)]
        engines = [
            Engine(len(speeds), CLOCKS[clock](), rank=rank, delay=delay, max_staleness=max_staleness)
            for rank in range(len(speeds))
        ]
        programs = [(stream if in_bulk else one_by_one)(rank) for rank in range(len(speeds))]
        virtual = VirtualCluster(engines, programs, lambda _: exchange, tick_seconds=tick_seconds)
        virtual.run()
        return virtual

    single, bulk = play(in_bulk=False), play(in_bulk=True)
    assert len(bulk.entries) == len(single.entries) >= 2
    for one, other in zip(single.entries, bulk.entries, strict=True):
        assert other.rows == pytest.approx(one.rows, abs=1e-9)
    for a, b in zip(single.ranks, bulk.ranks, strict=True):
        assert np.array(b.launches) == pytest.approx(np.array(a.launches), abs=1e-9)
        assert np.array(b.merges) == pytest.approx(np.array(a.merges), abs=1e-9)
        assert (b.computing, b.waiting, b.ended) == pytest.approx((a.computing, a.waiting, a.ended), abs=1e-9)
