"""Random schedules for a virtual cluster, and the rules that every one of them must keep.

A :class:`Witness` is an engine that checks its own answers against what it was told; :func:`run` lets programs run
on a cluster of them and then holds what happened against rules 1 to 5 of the design.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
from hypothesis import strategies as st

from horovod_abs.core.clocks import Clock, CountClock, Progress, SyncClock
from horovod_abs.core.engine import Action, Engine
from horovod_abs.core.ledger import Column, Entry, Flag
from horovod_abs.sim.cluster import Compute, Open, Pause, Program, Starve, Step, Synchronize, VirtualCluster

NONE = Flag(0)

kept = 0
"""Schedules that were run to their end so far, and kept every rule."""

# -- what is random --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """A micro-batch that a rank is going to compute; a dropped one is drawn and weighs nothing."""

    samples: int
    dropped: bool = False


@dataclass(frozen=True)
class Schedule:
    """Ranks, network and rules of one run; all that is random in it follows from ``seed``.

    Attributes:
        spread: The slowest rank takes up to so many times as long as the fastest.
        jitter: Random share of a micro-batch's time; with 0 all times are whole and many events coincide.
        pauses: Probability of a pause before a micro-batch.
        starving: Probability that a rank has no data for a moment.
        dropping: Probability that a micro-batch is dropped.
        exchange_seconds: Mean time of an exchange, in micro-batches of the fastest rank.
        late: Indices are counted as drawn when the next batch is requested, as a binding does.
        max_staleness: Micro-batches that a rank does beyond the last exchange it has merged; ``None`` for no bound.
    """

    size: int
    delay: int
    clock: Clock
    min_micro_batches: int
    max_micro_batches: int
    spread: int
    jitter: float
    pauses: float
    starving: float
    dropping: float
    exchange_seconds: float
    late: bool
    seed: int
    max_staleness: int | None = None

    def random(self, *what: object) -> Random:
        return Random(f"{self.seed} {what}")

    def exchange_time(self, exchange: int) -> float:
        if self.jitter == 0:
            return self.exchange_seconds
        return self.exchange_seconds * self.random("exchange", exchange).choice((0.1, 1.0, 1.0, 5.0))

    def batches(self, rank: int, epoch: int, count: int) -> list[Batch]:
        random = self.random("batches", rank, epoch)
        return [Batch(random.choice((1, 7, 16, 32)), random.random() < self.dropping) for _ in range(count)]

    def steps(self, rank: Witness, batches: list[Batch]) -> Iterator[Step]:
        """The steps of a loop over ``batches``."""
        random = self.random("steps", rank.rank, rank.launches)
        speed = self.random("speed", rank.rank).randint(1, self.spread)
        for batch in batches:
            if random.random() < self.pauses:
                yield Pause(random.choice((1.0, 5.0, 40.0)))
            if random.random() < self.starving:
                yield Starve()
            seconds = speed * (1 + self.jitter * random.expovariate(1)) if self.jitter else float(speed)
            weight = 0 if batch.dropped else batch.samples
            yield Compute(batch.samples, seconds, weight=weight, drawn=0 if self.late else None)
            if self.late:
                rank.data_drawn(batch.samples)


class NeverClock(Clock):
    """Leaves it to ``max_micro_batches`` to end a round."""

    def is_due(self, progress: Progress) -> bool:
        return False


@st.composite
def schedules(
    draw: st.DrawFn,
    *,
    delays: st.SearchStrategy[int] = st.sampled_from((1, 1, 0)),  # noqa: B008
    clocks: st.SearchStrategy[Clock] | None = None,
    starving: bool = True,
    bounded: bool = False,
) -> Schedule:
    """Clusters of 1 to 16 ranks, quick and slow, steady and not; with a bound on staleness if they are ``bounded``."""
    least = draw(st.sampled_from((1, 1, 1, 2, 3)))
    most = draw(st.sampled_from((least, least + 1, 5, 64)))
    count = draw(st.integers(1, min(most, 6)))
    usual = st.sampled_from((SyncClock(), SyncClock(), CountClock(count), NeverClock()))
    clock = draw(usual if clocks is None else clocks)
    lowest = max(least, clock.micro_batches) if isinstance(clock, CountClock) else least
    return Schedule(
        size=draw(st.sampled_from((1, 2, 2, 3, 3, 4, 4, 5, 8, 16))),
        delay=draw(delays),
        clock=clock,
        min_micro_batches=least,
        max_micro_batches=most,
        spread=draw(st.sampled_from((1, 2, 8))),
        jitter=draw(st.sampled_from((0.0, 0.1, 2.0))),
        pauses=draw(st.sampled_from((0.0, 0.0, 0.1))),
        starving=draw(st.sampled_from((0.0, 0.0, 0.1, 0.5))) if starving else 0.0,
        dropping=draw(st.sampled_from((0.0, 0.0, 0.2, 1.0))),
        exchange_seconds=draw(st.sampled_from((0.0, 0.5, 1.0, 3.0, 30.0))),
        late=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
        max_staleness=lowest + draw(st.sampled_from((0, 0, 1, 2, 5, 20))) if bounded else None,
    )


# -- what the programs do ----------------------------------------------------------------------------------------------


class TroubleError(Exception):
    """The user's program raises."""


def loop(steps: Iterable[Step]) -> Program:
    """A loop without ``epoch()``, closed by ``synchronize()``."""
    yield from steps
    yield Synchronize()


def epoch(
    rank: Witness,
    steps: Iterable[Step],
    drawn: float = math.inf,
    rounds: float = math.inf,
    *,
    exact: bool = False,
    hesitates: float = 0,
) -> Program:
    """One epoch as a binding runs it: it ends when all are asked to, and early when this rank leaves or raises.

    Args:
        drawn: Indices that all ranks together draw in it.
        rounds: Exchanges that it takes at most.
        exact: See :meth:`Engine.open`.
        hesitates: Probability that the rank, asked to end, takes another step first.
    """
    random = Random(rank.rank)
    ledger = rank.ledger
    yield Open(float(ledger.drawn.sum()) + drawn, rounds_target=ledger.rounds + rounds, exact=exact)
    try:
        for step in steps:
            yield step
            if rank.checkpoint_due and not rank.ending:
                yield Synchronize()
            if not rank.epoch_open or (rank.ending and random.random() >= hesitates):
                break
        while rank.epoch_open and not rank.ending:
            yield Synchronize() if rank.checkpoint_due else Starve()
    except TroubleError:
        if rank.epoch_open:
            yield Synchronize(Flag.LEAVING)
        raise
    if rank.epoch_open:
        yield Synchronize()


def leaving(steps: Iterable[Step], after: int) -> Program:
    """The same steps, with an early ``break`` after so many of them, or after the last."""
    yield from itertools.islice(steps, after)
    yield Synchronize(Flag.LEAVING)


def raising(steps: Iterable[Step], after: int) -> Program:
    """The same steps, with an error in the middle of the batch that follows so many of them."""
    yield from itertools.islice(steps, after)
    yield Pause(0.5)
    raise TroubleError


def flagging(rank: Witness, steps: Iterable[Step], flag: Flag, after: int) -> Program:
    """The same steps, with a flag raised after so many of them, or after the last."""
    steps = iter(steps)
    yield from itertools.islice(steps, after)
    rank.raise_flag(flag)
    yield from steps


# -- what must hold ----------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What went into the round that a rank is computing."""

    micro_batches: list[tuple[int, int]] = field(default_factory=list)  # rank, number
    weight: float = 0
    drawn: float = 0
    seconds: float = 0
    flags: Flag = NONE
    versions: set[int] = field(default_factory=set)  # merges that the rank had seen when it computed
    held: bool = False  # whether but for a bound the rank would have computed on


class Witness(Engine):
    """An engine that checks each of its answers against the rules, from what it was told alone.

    Attributes:
        done: Micro-batches computed, over the whole run.
        contributions: What it put into each exchange, in order.
        merges: Exchanges merged, in order.
        closes: Those after which nothing was pending.
        raised: Whether the rank's program raised.
        greatest: Its greatest staleness so far.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        super().__init__(
            schedule.size,
            schedule.clock,
            rank=rank,
            delay=schedule.delay,
            min_micro_batches=schedule.min_micro_batches,
            max_micro_batches=schedule.max_micro_batches,
            max_staleness=schedule.max_staleness,
        )
        self.done = 0
        self.greatest = 0
        self.contributions: list[Seen] = []
        self.merges: list[int] = []
        self.closes: list[int] = []
        self.raised = False
        self._seen = Seen()
        self._has_closed = self._has_starved = self._is_complete = self._has_ended = False
        self._since = 0.0

    @property
    def pending(self) -> int:
        """Exchanges launched and not merged."""
        return len(self.contributions) - len(self.merges)

    def next_action(self, now: float) -> Action:
        action = super().next_action(now)
        assert super().next_action(now) is action, "asking twice gives the same answer"
        count = len(self._seen.micro_batches)
        progress = Progress(self.rank, len(self.contributions), count, now - self._since)
        no_work, due = self._has_closed or self._has_starved, self.clock.is_due(progress)
        at_limit = count >= max(self.min_micro_batches, self.clock.limit(progress))
        at_bound = count >= self.max_micro_batches or self._staleness() >= self.max_staleness
        idle = no_work or at_limit or at_bound
        may_end = idle or (count >= self.min_micro_batches and due)
        if at_bound and not self._has_ended:
            waits = no_work or (self.pending and (at_limit or self.delay == 0))
            ends = count >= self.min_micro_batches and due and (self._is_complete or not self.pending)
            self._seen.held = self._seen.held or not (waits or ends)
        assert self.pending in (0, 1), "at most one exchange is in flight"
        match action:
            case Action.COMPUTE:
                assert not self._has_ended, "computes between a merge and the launch that follows it"
                assert not idle, "a rank without work computes, or too much"
                assert not (self.pending and self.delay == 0), "computes at parameters that are about to change"
                assert not (may_end and (self._is_complete or not self.pending)), "goes on although the round may end"
            case Action.WAIT:
                assert (self.pending, self._is_complete) == (1, False), "waits for nothing"
                assert idle or self.delay == 0, "waits while it may compute"
            case Action.MERGE:
                assert (self.pending, self._is_complete) == (1, True), "merges what is not complete"
                assert may_end or self.delay == 0, "merges in the middle of a round"
                # and is launched at the same boundary, but for a rank at its bound with too little to hand over
                self._has_ended = self.delay == 1 and (no_work or count >= self.min_micro_batches)
            case Action.LAUNCH:
                assert not self.pending, "launches before the exchange before is merged"
                assert may_end or self._has_ended, "ends a round too early"
            case Action.CLOSED:
                assert (self.pending, count) == (0, 0), "closed with something pending"
        return action

    def micro_batch_done(self, weight: float, drawn: float, seconds: float) -> None:
        super().micro_batch_done(weight, drawn, seconds)
        seen = self._seen
        seen.micro_batches.append((self.rank, self.done))
        self.greatest = max(self.greatest, self._staleness())
        assert self._staleness() == self.staleness <= self.max_staleness
        seen.versions.add(len(self.merges))
        seen.weight += weight
        seen.drawn += drawn
        seen.seconds += seconds
        self.done += 1

    def data_drawn(self, drawn: float) -> None:
        super().data_drawn(drawn)
        self._seen.drawn += drawn

    def raise_flag(self, flag: Flag) -> None:
        super().raise_flag(flag)
        self._seen.flags |= flag

    def starve(self, *, for_good: bool = False) -> None:
        super().starve(for_good=for_good)
        self._has_starved = True

    def close(self, flags: Flag | None = None) -> None:
        super().close(flags)
        self._has_closed = True
        self._seen.flags |= flags or NONE

    def exchange_complete(self) -> None:
        super().exchange_complete()
        self._is_complete = True

    def launched(self) -> None:
        super().launched()
        if self._has_closed:
            self._seen.flags |= Flag.CLOSING
        self.contributions.append(self._seen)
        self._seen = Seen()
        self._is_complete = self._has_ended = False

    def merged(self, entry: Entry, now: float) -> Entry:
        entry = super().merged(entry, now)
        self.merges.append(entry.round)
        self._has_starved = False
        if not self._has_ended and self.delay == 1:
            self._seen.held = False  # the round that was held goes on
        self._since = now
        if self.closed:
            self.closes.append(entry.round)
            self._has_closed = self._has_ended = False
            self._seen.flags &= ~Flag.LEAVING
        return entry

    def _staleness(self) -> int:
        """Micro-batches that are not in the last exchange merged."""
        in_flight = [len(seen.micro_batches) for seen in self.contributions[len(self.merges) :]]
        return sum(in_flight) + len(self._seen.micro_batches)


@dataclass
class Run:
    """What happened on all ranks."""

    schedule: Schedule
    ranks: Sequence[Witness]
    cluster: VirtualCluster

    @property
    def entries(self) -> list[Entry]:
        return self.cluster.entries

    @property
    def segments(self) -> list[range]:
        """The exchanges between two closes."""
        ends = [0, *(end + 1 for end in self.ranks[0].closes)]
        return [range(first, end) for first, end in itertools.pairwise(ends)]

    def version(self, round: int) -> int:
        """The number of merges that the rounds' gradients are computed after."""
        first = any(round == segment.start for segment in self.segments)
        return round if first or self.schedule.delay == 0 else round - 1


def run(
    schedule: Schedule,
    program: Callable[[Witness], Program],
    *,
    on_launch: Callable[[int, int], None] = lambda rank, exchange: None,
    on_merge: Callable[[int, Entry], None] = lambda rank, entry: None,
    ranks: Sequence[Witness] | None = None,
) -> Run:
    """Run one program per rank to its end, and check rules 1 to 5."""

    def guarded(rank: Witness) -> Program:
        try:
            yield from program(rank)
        except TroubleError:
            rank.raised = True

    witnesses = ranks or [Witness(schedule, rank) for rank in range(schedule.size)]
    checked: set[int] = set()
    merged: dict[tuple[int, int], int] = {}  # micro-batch -> the exchange that it was merged with

    def check_merge(rank: int, entry: Entry) -> None:
        if entry.round not in checked:
            checked.add(entry.round)
            seen = [witness.contributions[entry.round] for witness in witnesses]
            rows = [(s.weight, s.drawn, len(s.micro_batches), s.seconds) for s in seen]
            columns = [Column.WEIGHT, Column.DRAWN, Column.MICRO_BATCHES, Column.COMPUTE_SECONDS]
            assert entry.rows[:, columns].tolist() == [list(row) for row in rows]
            for flag in (Flag.CLOSING, Flag.LEAVING, Flag.STOP, Flag.CHECKPOINT):
                assert entry.ranks_with(flag) == tuple(number for number, s in enumerate(seen) if flag in s.flags)
            assert entry.ranks_with(Flag.BOUNDED) == tuple(number for number, s in enumerate(seen) if s.held)
            assert entry.weight == sum(s.weight for s in seen)
            for micro_batch in itertools.chain.from_iterable(s.micro_batches for s in seen):
                assert merged.setdefault(micro_batch, entry.round) == entry.round, "a gradient counts twice"
        on_merge(rank, entry)

    cluster = VirtualCluster(
        witnesses,
        [guarded(witness) for witness in witnesses],
        schedule.exchange_time,
        on_launch=on_launch,
        on_merge=check_merge,
        max_events=50_000,
    )
    cluster.run()
    done = Run(schedule, witnesses, cluster)
    assert merged.keys() == {(rank.rank, number) for rank in witnesses for number in range(rank.done)}
    check_order(done)
    check_delay(done)
    check_closing(done)
    global kept
    kept += 1
    return done


def check_order(run: Run) -> None:
    """Rule 2, and no rank in an exchange of its own: all launch, merge and close the same, and nothing is pending."""
    exchanges = list(range(len(run.entries)))
    for rank, virtual in zip(run.ranks, run.cluster.ranks, strict=True):
        assert rank.merges == exchanges
        assert [exchange for _, exchange in virtual.merges] == exchanges
        assert [exchange for _, exchange in virtual.launches] == exchanges
        assert rank.closed
        assert not rank.in_flight
        assert rank.launches == rank.ledger.rounds == len(exchanges)
        assert rank.closes == run.ranks[0].closes
        assert np.array_equal(rank.ledger.weight, [sum(s.weight for s in r.contributions) for r in run.ranks])
        assert np.array_equal(rank.ledger.drawn, [sum(s.drawn for s in r.contributions) for r in run.ranks])
    assert not exchanges or run.ranks[0].closes[-1] == exchanges[-1]


def check_delay(run: Run) -> None:
    """Rule 3: a round's gradients are computed at the same parameters on all ranks, one round old when applied.

    With a bound on staleness a rank may merge within a round, and goes on with it.
    """
    for round in range(len(run.entries)):
        versions = set().union(*(rank.contributions[round].versions for rank in run.ranks))
        assert versions <= ({run.version(round)} if run.schedule.max_staleness is None else {run.version(round), round})


def check_closing(run: Run) -> None:
    """Rule 5: rounds end at the first exchange that everyone closes with, and nothing is contributed after closing."""
    for segment in run.segments:
        rows = [run.entries[number].rows for number in segment]
        for number, before, after in zip(segment, rows, rows[1:], strict=False):
            closing = before[:, Column.FLAGS].astype(int) & Flag.CLOSING != 0
            assert not closing.all(), f"all had closed at {number}"
            assert not after[closing][:, [Column.WEIGHT, Column.DRAWN, Column.MICRO_BATCHES]].any()
            assert (after[closing][:, Column.FLAGS].astype(int) & Flag.CLOSING).all(), "closing is taken back"
