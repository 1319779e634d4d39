"""A cluster of ranks in virtual time, each running the production engine.

What is simulated is the ranks' programs, the network and the time; what is decided is decided by
:class:`horovod_abs.core.engine.Engine`. A rank's program is a generator that yields what the rank does next
(:class:`Compute`, :class:`Starve`, …) and goes on when it is done, as a user's training loop would::

    def program(rank):
        for _ in range(100):
            yield Compute(samples=16, seconds=0.02)
        yield Synchronize()
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from horovod_abs.core.engine import Action, Engine
from horovod_abs.core.ledger import Entry, Flag, Floats


@dataclass(frozen=True)
class Open:
    """Begin an epoch; see :meth:`Engine.open`."""

    drawn_target: float = math.inf
    rounds_target: float = math.inf
    exact: bool = False


@dataclass(frozen=True)
class Compute:
    """Compute a micro-batch of so many samples, for so many seconds.

    ``weight`` and ``drawn`` say what it counts for, where that is not ``samples``.
    """

    samples: float
    seconds: float
    weight: float | None = None
    drawn: float | None = None


@dataclass(frozen=True)
class Stream:
    """Compute micro-batches one after the other until a time, and tell the engine of many at once.

    What the engine decides is what it would decide with as many steps of :class:`Compute`: it is told of them, and
    asked, at the first boundary after anything that it may act upon.

    Args:
        samples: Of each micro-batch.
        until: Called as ``until(samples, begin, end, most)``; says how many micro-batches it takes to reach ``end``,
            at most ``most``, and when the last of them is over. See :meth:`horovod_abs.sim.speeds.RankSpeed.until`.
        ends: When no further micro-batch is begun, in seconds.
    """

    samples: float
    until: Callable[[float, float, float, int], tuple[int, float]]
    ends: float


@dataclass(frozen=True)
class Pause:
    """Do something else for so many seconds, without looking at the engine."""

    seconds: float


@dataclass(frozen=True)
class Starve:
    """Have no data until the next merge."""


@dataclass(frozen=True)
class Synchronize:
    """Close, and go on when all ranks have closed; ``flags`` as for an early ``break`` (LEAVING)."""

    flags: Flag | None = None


Step = Open | Compute | Stream | Pause | Starve | Synchronize
Program = Generator[Step, None, None]
ExchangeTime = Callable[[int], float]


class VirtualDeadlock(RuntimeError):
    """Some ranks wait and nothing will ever happen; the message says where each of them stands."""


class VirtualRank:
    """One rank: its engine, its program, and what happened to it.

    Attributes:
        merges: ``(time, exchange)`` of each merge.
        launches: ``(time, exchange)`` of each launch.
        computing: Seconds spent computing.
        waiting: Seconds spent waiting.
        ended: When its program ended, in seconds, or ``None``.
    """

    def __init__(self, engine: Engine, program: Program) -> None:
        self.engine = engine
        self.program = program
        self.merges: list[tuple[float, int]] = []
        self.launches: list[tuple[float, int]] = []
        self.computing = 0.0
        self.waiting = 0.0
        self.ended: float | None = None
        self.current: Step | None = None
        self.waiting_since: float | None = None
        self.computing_since: float | None = None  # in a stream, until something happens
        self.unasked = 0  # micro-batches that it may do until then
        self.busy_until = 0.0  # with its last merge
        self.computed: tuple[int, float] | None = None  # of a stream, when the step is over: micro-batches and seconds


class Happening(NamedTuple):
    """What an event is about: a round whose end is called, a change, the end of a merge, or that a step is over."""

    tick: int | None = None
    change: bool = False
    merged: bool = False


STEP_IS_OVER = Happening()
CHANGE = Happening(change=True)
MERGED = Happening(merged=True)


@dataclass
class _Exchange:
    rows: dict[int, Floats] = field(default_factory=dict)
    done: float | None = None


class VirtualCluster:
    """Runs the programs of all ranks to their end, in virtual time.

    Args:
        engines: One engine for each rank.
        programs: One program for each rank.
        exchange_seconds: Duration of exchange k, from its last launch to its completion.
        on_launch: Called as ``on_launch(rank, exchange)`` when a rank launches.
        on_merge: Called as ``on_merge(rank, entry)`` when a rank merges.
        merge_seconds: Time that a rank needs for a merge, and in which it does not compute.
        tick_seconds: How long a tick of rank 0 takes to the others; ``None`` if ranks keep the time themselves, as
            without MPI.
        max_events: More events than this are a livelock.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        programs: Sequence[Program],
        exchange_seconds: ExchangeTime,
        *,
        on_launch: Callable[[int, int], None] = lambda rank, exchange: None,
        on_merge: Callable[[int, Entry], None] = lambda rank, entry: None,
        merge_seconds: float = 0.0,
        tick_seconds: float | None = None,
        max_events: int = 1_000_000,
    ) -> None:
        self.ranks = [VirtualRank(engine, program) for engine, program in zip(engines, programs, strict=True)]
        self.entries: list[Entry] = []
        self.now = 0.0
        self._exchange_seconds = exchange_seconds
        self._on_launch = on_launch
        self._on_merge = on_merge
        self._merge_seconds = merge_seconds
        self._tick_seconds = tick_seconds
        self._timed_round, self._tick_at = -1, 0.0
        self._max_events = max_events
        self._exchanges: dict[int, _Exchange] = {}
        self._events: list[tuple[float, int, int | None, Happening]] = []  # time, order, rank or all of them
        self._order = itertools.count()

    def run(self) -> None:
        """Run until every program has ended.

        Raises:
            VirtualDeadlock: nothing will ever happen, or too much does.
        """
        for rank in range(self.size):
            if self._tick_seconds is not None:
                self.ranks[rank].engine.tick(-1)
            self._schedule(0.0, rank)
        for _ in range(self._max_events):
            if not self._events:
                break
            self.now, _, whose, happening = heapq.heappop(self._events)
            if happening is STEP_IS_OVER and whose is not None:
                self._step_over(whose)
                continue
            if happening is MERGED and whose is not None:
                self._compute_or_advance(whose)
                continue
            for rank in range(self.size) if whose is None else (whose,):
                self._notice(rank, happening)
        if any(rank.ended is None for rank in self.ranks):
            what = "livelock" if self._events else "deadlock"
            raise VirtualDeadlock(f"{what} at {self.now:.3f} s: " + "; ".join(map(self._describe, range(self.size))))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def _step_over(self, index: int) -> None:
        """The rank's current step has taken its time: tell the engine, and see what comes next."""
        rank = self.ranks[index]
        if rank.computed is not None:
            self._tell(index)
            return self._drive(index)
        match rank.current:
            case Open(drawn_target, rounds_target, exact):
                rank.engine.open(drawn_target, rounds_target=rounds_target, exact=exact)
            case Compute(samples, seconds, weight, drawn):
                rank.computing += seconds
                rank.engine.micro_batch_done(
                    samples if weight is None else weight, samples if drawn is None else drawn, seconds
                )
            case Starve():
                rank.engine.starve()
            case Synchronize(flags):
                rank.engine.close(flags)
            case Stream() | Pause() | None:
                return self._advance(index)
        return self._drive(index)

    def _notice(self, index: int, happening: Happening) -> None:
        """Something happens while the rank computes or waits."""
        rank = self.ranks[index]
        if rank.computing_since is not None:
            self._end_bulk(index, self.now)
        if happening.tick is not None:
            rank.engine.tick(happening.tick)
        elif rank.waiting_since is not None:
            self._drive(index)

    def _compute_on(self, index: int, stream: Stream) -> None:
        """Begin a bulk of micro-batches. It lasts until an exchange is complete, or as long as is known already."""
        rank = self.ranks[index]
        rank.computing_since = self.now
        rank.unasked = rank.engine.unasked
        if rank.unasked == 1:
            return self._end_bulk(index, self.now)
        if rank.engine.in_flight and not self._is_complete(rank.engine.ledger.rounds):
            return None
        end = stream.ends
        if self._tick_seconds is not None and rank.engine.clock.interval is not None:
            begun = self._timed_round == rank.engine.launches
            end = min(end, self._tick_at + (self._tick_seconds if index else 0.0)) if begun else self.now
        return self._end_bulk(index, end)

    def _end_bulk(self, index: int, end: float) -> None:
        """The bulk that the rank computes ends at the first boundary from ``end`` on.

        Where the rank may not compute for so long it has been waiting since an earlier one.
        """
        rank = self.ranks[index]
        stream, begin = rank.current, rank.computing_since
        assert isinstance(stream, Stream) and begin is not None
        end = max(end, math.nextafter(begin, math.inf))  # it has begun a micro-batch
        count, over = stream.until(stream.samples, begin, end, rank.unasked)
        rank.computing_since = None
        rank.computed = count, over - begin
        if over >= self.now:
            self._schedule(over, index)
            return
        self._tell(index)
        if rank.engine.next_action(over) is not Action.WAIT:
            raise AssertionError(f"a rank that may not compute does not wait: {self._describe(index)}")
        rank.waiting_since = over

    def _tell(self, index: int) -> None:
        """Tell the engine of the bulk that is over."""
        rank = self.ranks[index]
        assert isinstance(rank.current, Stream) and rank.computed is not None
        count, seconds = rank.computed
        rank.computed = None
        rank.computing += seconds
        samples = count * rank.current.samples
        rank.engine.micro_batches_done(count, samples, samples, seconds)

    def _advance(self, index: int) -> None:
        """Let the rank's program say what it does next."""
        rank = self.ranks[index]
        rank.current = next(rank.program, None)
        match rank.current:
            case None:
                rank.ended = self.now
            case Compute(seconds=seconds) | Pause(seconds):
                self._schedule(self.now + seconds, index)
            case Stream(ends=ends) if self.now < ends:
                self._schedule(ends, index, CHANGE)
                self._compute_on(index, rank.current)
            case _:
                self._schedule(self.now, index)

    def _drive(self, index: int) -> None:
        """Do what the engine asks for until the rank may compute or must wait."""
        rank, engine = self.ranks[index], self.ranks[index].engine
        if rank.waiting_since is not None:
            rank.waiting += self.now - rank.waiting_since
            engine.waited(self.now - rank.waiting_since)
            rank.waiting_since = None
        while True:
            if engine.in_flight and self._is_complete(engine.ledger.rounds):
                engine.exchange_complete()
            match engine.next_action(self.now):
                case Action.LAUNCH:
                    self._launch(index)
                case Action.MERGE:
                    self._merge(index)
                case Action.WAIT:
                    rank.waiting_since = self.now
                    break
                case Action.COMPUTE | Action.CLOSED:
                    self._start_timer(index)
                    if rank.busy_until > self.now:
                        self._schedule(rank.busy_until, index, MERGED)
                    else:
                        self._compute_or_advance(index)
                    break

    def _compute_or_advance(self, index: int) -> None:
        """Go on with the stream that the rank is in, or with what its program does next."""
        rank = self.ranks[index]
        if isinstance(rank.current, Stream) and self.now < rank.current.ends:
            self._compute_on(index, rank.current)
        else:
            self._advance(index)

    def _is_complete(self, number: int) -> bool:
        exchange = self._exchanges.get(number)
        return exchange is not None and exchange.done is not None and exchange.done <= self.now

    def _start_timer(self, index: int) -> None:
        """Rank 0's timer, as :class:`horovod_abs.mpi.Ticker` keeps it for real."""
        engine = self.ranks[index].engine
        interval = engine.clock.interval
        if index > 0 or self._tick_seconds is None or interval is None or self._timed_round == engine.launches:
            return
        self._timed_round = engine.launches
        self._tick_at = self.now + interval
        tick = Happening(tick=engine.launches)
        self._schedule(self._tick_at, 0, tick)
        self._schedule(self._tick_at + self._tick_seconds, None, tick)

    def _launch(self, index: int) -> None:
        rank = self.ranks[index]
        number = rank.engine.launches
        exchange = self._exchanges.setdefault(number, _Exchange())
        exchange.rows[index] = rank.engine.row()
        rank.engine.launched()
        rank.launches.append((self.now, number))
        self._on_launch(index, number)
        if len(exchange.rows) == self.size:
            exchange.done = self.now + self._exchange_seconds(number)
            self.entries.append(Entry(number, np.stack([exchange.rows[i] for i in range(self.size)])))
            self._schedule(exchange.done, None, CHANGE)

    def _merge(self, index: int) -> None:
        rank = self.ranks[index]
        entry = self.entries[rank.engine.ledger.rounds]
        rank.engine.merged(entry, self.now)
        rank.merges.append((self.now, entry.round))
        rank.busy_until = self.now + self._merge_seconds
        self._on_merge(index, entry)

    def _schedule(self, time: float, rank: int | None, happening: Happening = STEP_IS_OVER) -> None:
        heapq.heappush(self._events, (time, next(self._order), rank, happening))

    def _describe(self, index: int) -> str:
        rank = self.ranks[index]
        doing = "has ended" if rank.ended is not None else f"is at {rank.current}"
        return f"rank {index} {doing}, {rank.engine.launches} launched, {rank.engine.ledger.rounds} merged"
