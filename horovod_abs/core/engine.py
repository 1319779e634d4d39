"""The round state machine of one rank, sans I/O.

Two house rules. Nothing here blocks, sleeps, tells the time, or calls a library that does. And every decision that
must come out the same on all ranks is made from merged ledger entries alone.

Theory of operation
-------------------
A rank computes micro-batches and adds them up. All that it computes between two launches is a *round*. At a
micro-batch boundary its driver tells the engine what has happened (``micro_batch_done``, ``exchange_complete``, …)
and asks ``next_action`` until the answer is COMPUTE::

        ┌────────────── COMPUTING ◄──────────────────────────────┐
        │ the round ends and the exchange before it is complete  │
        ▼                                                        │
     MERGING ──── the driver reads exchange k−1, calls merged() ─┤ delay 0, or nothing left to launch
        │                                                        │
        ▼                                                        │
    LAUNCHING ─── the driver starts exchange k, calls launched() ┘

    CLOSED    ─── nothing in flight, nothing accumulated; the next micro-batch opens the engine again

At most one exchange is in flight. With ``delay=1`` a rank merges k−1 and launches k at the same boundary, so that
every sample of a round is computed at the same parameters and the delay is exactly one round; with ``delay=0`` it
launches k and waits for it.

*When a round ends.* Never before the previous exchange is complete. Then at once if the rank has no work (it is
closing, or its data have run out), or has reached a bound (``max_micro_batches``, ``max_staleness``); else, from
``min_micro_batches`` on, when the clock says so. A rank waits only where it may not compute: with ``delay=0`` while
the exchange is in flight, at a bound or the clock's limit, and without work.

*Closing.* One rank may have merged k and launched k+1 while another has not looked yet, so "wait for what is in
flight" would deadlock. A rank that wants to close raises CLOSING in its next launches and goes on taking part,
with weight 0, until a *merged* entry shows the flag from all ranks; that exchange is the last, for everyone.

*Time.* The engine is shown the time and, where rank 0 keeps it, told its ticks; tick k ends round k.

*Ending.* An entry that fills the epoch, or shows LEAVING or STOP from anyone or EXHAUSTED from all, sets ``ending``
on every rank at the same exchange. It is a request to the program, which may be in the middle of a batch: rounds go
on as usual until the program answers with ``close``. Only where nobody can hold anything back (an ``exact`` target)
is that exchange itself the last. CHECKPOINT asks for a ``close`` that does not end the epoch.

References:
    [ABS-SGD] Zhou, Chen, Wu, arXiv 2308.15164. [NoDelay] Talyansky et al., ICLR 2019 submission.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

from horovod_abs.core.clocks import Clock, Progress
from horovod_abs.core.ledger import Column, Entry, Flag, Floats, Ledger

_ENDING = Flag.LEAVING | Flag.STOP


class EngineError(RuntimeError):
    """The driver told the engine of something that cannot have happened: a bug in the driver, not in the run."""


class Action(Enum):
    """What the rank is to do next."""

    COMPUTE = auto()
    """Compute another micro-batch."""
    WAIT = auto()
    """Wait until the exchange in flight is complete: there is nothing that may be computed."""
    MERGE = auto()
    """Read the completed exchange, tell :meth:`Engine.merged`, and apply its result."""
    LAUNCH = auto()
    """Start an exchange of what was accumulated, with :meth:`Engine.row`, and tell :meth:`Engine.launched`."""
    CLOSED = auto()
    """Nothing is pending, on any rank."""


class Phase(Enum):
    """Where in a round the rank stands."""

    COMPUTING = auto()
    MERGING = auto()
    LAUNCHING = auto()
    CLOSED = auto()


@dataclass(slots=True)
class _Round:
    """What the current round has added up so far."""

    weight: float = 0.0
    drawn: float = 0.0
    micro_batches: int = 0
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0


class Engine:
    """Decides when one rank computes, launches, merges and waits.

    >>> from horovod_abs.core.clocks import SyncClock
    >>> engine = Engine(2, SyncClock())
    >>> engine.open()
    >>> engine.micro_batch_done(weight=16, drawn=16, seconds=0.02)
    >>> engine.next_action(now=0.02).name
    'LAUNCH'
    >>> engine.launched()
    >>> engine.next_action(now=0.02).name  # the exchange is under way, and nobody waits for it
    'COMPUTE'

    Args:
        size: Number of ranks.
        clock: Decides when a round ends; the engine works on a copy.
        rank: Number of this rank.
        delay: Rounds between computing a gradient and applying it, 0 or 1.
        min_micro_batches: Micro-batches that a rank with work does at least in a round.
        max_micro_batches: Micro-batches after which a rank waits for the exchange.
        max_staleness: τ of [NoDelay]: a rank waits when it has done so many micro-batches that are not in the last
            exchange it merged, in flight or in the current round; at least ``min_micro_batches``, or ``None`` for no
            such bound.

    Attributes:
        ledger: What was merged so far.
        in_flight: Whether an exchange was launched and not merged.
        epoch_open: Whether an epoch was begun and has not ended.
        ending: Whether a merged entry has asked every rank to end its epoch.
        checkpoint_due: Whether a merged entry has asked every rank to close for a checkpoint.
        stopped: Whether a merged entry has asked every rank to end the run.
        closing: Whether this rank contributes nothing more until all ranks have closed.
        starved: Whether the rank has no data until the next merge.
        exhausted: Whether the rank has no data until the epoch ends.

    Raises:
        ValueError: an argument out of range, or a clock that cannot work within ``max_micro_batches``.
    """

    def __init__(
        self,
        size: int,
        clock: Clock,
        *,
        rank: int = 0,
        delay: int = 1,
        min_micro_batches: int = 1,
        max_micro_batches: int = 64,
        max_staleness: int | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        if delay not in (0, 1):
            raise ValueError(f"delay must be 0 or 1, got {delay!r}")
        if not 1 <= min_micro_batches <= max_micro_batches:
            raise ValueError(
                f"need 1 <= min_micro_batches <= max_micro_batches, got {min_micro_batches} and {max_micro_batches}"
            )
        if max_staleness is not None and max_staleness < min_micro_batches:
            raise ValueError(f"need min_micro_batches <= max_staleness, got {min_micro_batches} and {max_staleness}")
        clock.validate(max_micro_batches if max_staleness is None else min(max_micro_batches, max_staleness))
        self.clock = copy.deepcopy(clock)
        self.rank = rank
        self.delay = delay
        self.min_micro_batches = min_micro_batches
        self.max_micro_batches = max_micro_batches
        self.max_staleness = math.inf if max_staleness is None else max_staleness
        self.ledger = Ledger(size)
        self.in_flight = False
        self.epoch_open = self.ending = self.checkpoint_due = self.stopped = False
        self.closing = False
        self.starved = False
        self.exhausted = False
        self._phase = Phase.CLOSED
        self._round = _Round()
        self._steps_in_flight = 0
        self._held_up = False  # the round would have ended if the exchange before it had been complete
        self._bounded = False  # but for a bound the rank would have computed on
        self._complete = False
        self._flags = Flag(0)
        self._drawn_target = math.inf
        self._rounds_target = math.inf
        self._target_is_exact = False
        self._begun: float | None = None
        self._tick: int | None = None

    # -- what the driver may ask -----------------------------------------------------------------------------------

    @property
    def launches(self) -> int:
        """Exchanges that this rank has launched since the beginning of the run: the number of the next one."""
        return self.ledger.rounds + self.in_flight

    @property
    def closed(self) -> bool:
        """Whether nothing is pending on any rank."""
        return self._phase is Phase.CLOSED

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the current round."""
        return self._round.micro_batches

    @property
    def staleness(self) -> int:
        """Micro-batches of this rank that are not in the last exchange it merged."""
        return self._steps_in_flight + self._round.micro_batches

    @property
    def unasked(self) -> int:
        """Micro-batches that a rank which is to compute may do before it must ask again.

        As long as no tick comes and no exchange completes: then it asks at its next boundary.
        """
        if self.closing or (self.in_flight and (self.delay == 0 or self.starved)):
            return 0
        limit = self._limit()
        room = self._room(limit)
        if self.in_flight and room <= 0:
            return 0
        by_time = self.clock.interval is not None
        if by_time and self._tick is None:
            return 1  # the rank keeps the time itself
        if by_time or limit < math.inf or (self.in_flight and not self._complete):
            return max(int(room), 1)
        return max(self.min_micro_batches - self._round.micro_batches, 1)

    def next_action(self, now: float) -> Action:
        """What to do at this boundary. Asking twice gives the same answer.

        Args:
            now: Seconds on any clock that does not go backwards.
        """
        if self._begun is None:
            self._begun = now
        if self._phase is Phase.COMPUTING:
            return self._boundary(now)
        if self._phase is Phase.MERGING:
            return Action.MERGE
        return Action.LAUNCH if self._phase is Phase.LAUNCHING else Action.CLOSED

    def row(self, options: int = 0) -> Floats:
        """This rank's row of the exchange to be launched, shape ``(len(Column),)``.

        Args:
            options: Fingerprint of the hyper-parameters, below 2**52.
        """
        done = self._round
        row = np.zeros(len(Column))
        row[: Column.OPTIONS + 1] = (  # in the order of Column
            done.weight,
            done.drawn,
            done.micro_batches,
            done.compute_seconds,
            done.wait_seconds,
            self._raised(),
            options,
        )
        return row

    # -- what the driver tells -------------------------------------------------------------------------------------

    def micro_batch_done(self, weight: float, drawn: float, seconds: float) -> None:
        """A micro-batch was added to the accumulator, or was dropped (``weight=0``).

        Args:
            weight: Samples that it adds to the average.
            drawn: Indices of the data set that it used up.
            seconds: Time that it took to compute.

        Raises:
            EngineError: no micro-batch may be computed now.
        """
        self.micro_batches_done(1, weight, drawn, seconds)

    def micro_batches_done(self, count: int, weight: float, drawn: float, seconds: float) -> None:
        """So many micro-batches were added, between which there was nothing to ask; see :attr:`unasked`.

        Args:
            count: How many.
            weight: Samples that they add to the average, together; and so on, as for :meth:`micro_batch_done`.
            drawn: Indices of the data set that they used up.
            seconds: Time that they took to compute.

        Raises:
            EngineError: not so many may be computed now.
        """
        self._open()
        if self._phase is not Phase.COMPUTING or not 1 <= count <= self.unasked:
            raise EngineError(f"computed {count} micro-batches, which the rank may not compute ({self._describe()})")
        done = self._round
        done.weight += weight
        done.drawn += drawn
        done.micro_batches += count
        done.compute_seconds += seconds

    def data_drawn(self, drawn: float) -> None:
        """Indices of the data set were used up, apart from a micro-batch."""
        self._round.drawn += drawn

    def starve(self, *, for_good: bool = False) -> None:
        """The rank has no data: let it take part with what it has, until the next merge may give it some.

        Args:
            for_good: Nothing can give it any in this epoch.
        """
        self._open()
        self.starved = True
        self.exhausted = self.exhausted or for_good

    def fed(self) -> None:
        """The rank has data again, although no merge has given it any."""
        self.starved = False

    def waited(self, seconds: float) -> None:
        """The rank has waited for an exchange."""
        self._round.wait_seconds += seconds

    def exchange_complete(self) -> None:
        """The exchange in flight is complete and can be read without waiting."""
        if not self.in_flight:
            raise EngineError(f"no exchange is in flight ({self._describe()})")
        self._complete = True

    def launched(self) -> None:
        """The exchange that LAUNCH asked for has been started; a new round begins."""
        if self._phase is not Phase.LAUNCHING:
            raise EngineError(f"no launch was asked for ({self._describe()})")
        self.in_flight = True
        self._complete = self._held_up = False
        self._flags = Flag(0)
        self._steps_in_flight = self._round.micro_batches
        self._bounded = False
        self._round = _Round()
        self._phase = Phase.COMPUTING

    def tick(self, round: int) -> None:
        """Rank 0 has called the end of a round; -1 at the start of a run in which it will."""
        self._tick = round if self._tick is None else max(self._tick, round)

    def merged(self, entry: Entry, now: float) -> Entry:
        """The exchange that MERGE asked for has been read.

        Args:
            entry: Its rows, the same on every rank.
            now: Seconds on the clock of :meth:`next_action`.

        Returns:
            The entry as it stands in the ledger now.
        """
        if self._phase is not Phase.MERGING:
            raise EngineError(f"no merge was asked for ({self._describe()})")
        entry = self.clock.replayed(entry)
        self._begun = self._next_beginning(now)
        self.ledger.append(entry)
        self.clock.merged(self.ledger)
        self.in_flight = False
        has_something = self.closing or self.starved or self._round.micro_batches >= self.min_micro_batches
        self._steps_in_flight = 0
        self.starved = False
        filled = self.ledger.total_drawn >= self._drawn_target
        if filled or self.ledger.rounds >= self._rounds_target or entry.any_raised(_ENDING):
            self.ending = True
        if entry.all_raised(Flag.EXHAUSTED):
            self.ending = True
        self.stopped = self.stopped or entry.any_raised(Flag.STOP)
        self.checkpoint_due = self.checkpoint_due or entry.any_raised(Flag.CHECKPOINT)
        if entry.all_raised(Flag.CLOSING) or (filled and self._target_is_exact):
            self._close_for_good()
        elif self.delay == 1 and has_something:
            self._phase = Phase.LAUNCHING
        else:
            self._phase = Phase.COMPUTING
            self._bounded = False
        return entry

    # -- what the user's program asks for --------------------------------------------------------------------------

    def open(self, drawn_target: float = math.inf, *, rounds_target: float = math.inf, exact: bool = False) -> None:
        """Begin an epoch.

        Args:
            drawn_target: The epoch ends, on all ranks at the same exchange, when the ledger's count of drawn
                indices, since the beginning of the run, has reached this.
            rounds_target: It ends when so many exchanges, since the beginning of the run, have been merged.
            exact: No rank can hold anything back when ``drawn_target`` is reached, because every index is counted
                only after its gradient: the exchange that reaches it is then the last.

        Raises:
            EngineError: an epoch, or a loop without one, has not been closed.
        """
        if self._phase is not Phase.CLOSED or self.epoch_open:
            raise EngineError(f"the rounds before have not been closed ({self._describe()})")
        self._drawn_target = drawn_target
        self._rounds_target = rounds_target
        self._target_is_exact = exact
        self.epoch_open = True
        self._open()

    def abandon_epoch(self) -> None:
        """End an epoch without a target, after all ranks have closed."""
        if self._phase is not Phase.CLOSED:
            raise EngineError(f"rounds are pending ({self._describe()})")
        self.epoch_open = False

    def close(self, flags: Flag | None = None) -> None:
        """Contribute nothing more, and take part until all ranks have closed.

        Args:
            flags: What to tell the others besides (LEAVING).
        """
        self._open()
        self.closing = True
        self._flags |= flags or Flag(0)

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on: the ledger, and what the clock has learnt."""
        return {"ledger": self.ledger.state_dict(), "clock": self.clock.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run ended.

        Raises:
            EngineError: rounds are pending.
            ValueError: the ledger is of another number of ranks.
        """
        if self._phase is not Phase.CLOSED:
            raise EngineError(f"rounds are pending ({self._describe()})")
        self.ledger.load_state_dict(state["ledger"])
        if state["clock"]:
            self.clock.load_state_dict(state["clock"])

    def raise_flag(self, flag: Flag) -> None:
        """Tell all ranks something with the next launch (STOP, CHECKPOINT)."""
        self._flags |= flag

    # -- inside ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._phase is Phase.CLOSED:
            self._phase = Phase.COMPUTING

    def _close_for_good(self) -> None:
        if self.ending:
            self._drawn_target = self._rounds_target = math.inf
            self._flags &= ~Flag.LEAVING  # what was to be left has ended
            self.epoch_open = self.exhausted = False
        self.ending = self.closing = self.checkpoint_due = False
        self._begun = None
        self._phase = Phase.CLOSED

    def _boundary(self, now: float) -> Action:
        if not self.in_flight:
            if not self._round_ends(now):
                return Action.COMPUTE
            self._phase = Phase.LAUNCHING
            return Action.LAUNCH
        ends = self.delay == 0 or self._round_ends(now)
        if self._complete and ends:
            self._phase = Phase.MERGING
            return Action.MERGE
        self._held_up = self._held_up or ends
        if not self._must_wait():
            return Action.COMPUTE
        self._bounded = self._bounded or not self._must_wait(bounded=False)
        return Action.WAIT

    def _round_ends(self, now: float) -> bool:
        if self.closing or self.starved:
            return True
        if self._round.micro_batches >= self.min_micro_batches and self.clock.is_due(self._progress(now)):
            return True
        self._bounded = self._bounded or self._at_bound()
        return self._bounded

    def _must_wait(self, *, bounded: bool = True) -> bool:
        """Whether the rank may not compute; with ``bounded=False`` for another reason than a bound."""
        if not self.in_flight:
            return False
        if self.delay == 0 or self.closing or self.starved:
            return True
        return self._round.micro_batches >= max(self.min_micro_batches, self._limit()) or (bounded and self._at_bound())

    def _limit(self) -> float:
        return self.clock.limit(self._progress(0.0))

    def _room(self, limit: float) -> float:
        """Micro-batches left until the clock's limit or a bound."""
        most = min(
            max(self.min_micro_batches, limit), self.max_micro_batches, self.max_staleness - self._steps_in_flight
        )
        return most - self._round.micro_batches

    def _at_bound(self) -> bool:
        return self._round.micro_batches >= self.max_micro_batches or self.staleness >= self.max_staleness

    def _next_beginning(self, now: float) -> float:
        """When the next round begins for a clock that this rank keeps itself.

        Rounds end at a micro-batch boundary, somewhat after their time. What they are late is taken off the next, so
        that ranks whose boundaries differ stay in step. A round that was late because of the exchange, or by more
        than its length, is not made up for.
        """
        interval = self.clock.interval
        if interval is None or self._begun is None or self._held_up:
            return now
        due = self._begun + interval
        return due if due <= now < due + interval else now

    def _progress(self, now: float) -> Progress:
        elapsed = now - (now if self._begun is None else self._begun)
        round = self.ledger.rounds + self.in_flight
        return Progress(self.rank, round, self._round.micro_batches, elapsed, self._tick, self._round.drawn)

    def _raised(self) -> Flag:
        raised = self._flags
        if self.closing:
            raised |= Flag.CLOSING
        if self.exhausted:
            raised |= Flag.EXHAUSTED
        if self._bounded:
            raised |= Flag.BOUNDED
        return raised

    def _describe(self) -> str:
        return (
            f"{self._phase.name.lower()}, {self.launches} exchanges launched, {self.ledger.rounds} merged, "
            f"{self._round.micro_batches} micro-batches in the round"
        )
