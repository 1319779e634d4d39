"""When a round ends: the clocks, as rules over a rank's progress.

The engine asks a clock only when the round may end at all: the previous exchange is complete and the rank has done
its least number of micro-batches. A clock never blocks and never looks at the time itself; it is shown it. What it
learns from the ledger it learns the same on every rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

import numpy as np

from horovod_abs.core.ledger import Column, Entry, Flag, Ledger


@dataclass(slots=True)
class Progress:
    """How far one rank has come in its current round.

    Attributes:
        rank: Whose progress it is.
        round: Number of the round, from 0.
        micro_batches: Micro-batches done in it.
        elapsed: Seconds since the round began, by the rank's own time.
        tick: Number of the last round whose end was called by rank 0; ``None`` where ranks keep the time themselves.
        drawn: Indices of the data set used up in it.
    """

    rank: int
    round: int
    micro_batches: int
    elapsed: float
    tick: int | None = None
    drawn: float = 0.0


class Clock(ABC):
    """Decides when a round ends. Two ranks' clocks are the same if their ``repr`` is."""

    @abstractmethod
    def is_due(self, progress: Progress) -> bool:
        """Whether a rank that has come this far ends its round now."""

    def validate(self, max_micro_batches: int) -> None:  # noqa: B027  (most clocks have no bound)
        """Raise :class:`ValueError` if the clock cannot work within the bound on a round."""

    @property
    def interval(self) -> float | None:
        """Seconds that the current round is to last; ``None`` if time has no say."""
        return None

    def limit(self, progress: Progress) -> float:
        """Micro-batches after which the rank waits in this round, besides the bound on every round."""
        return math.inf

    def replayed(self, entry: Entry) -> Entry:
        """The entry to be merged in place of ``entry``."""
        return entry

    def merged(self, ledger: Ledger) -> None:  # noqa: B027  (most clocks learn nothing)
        """Learn from the entry that was merged last."""

    def state_dict(self) -> dict[str, float]:
        """What the clock has learnt."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:  # noqa: B027
        """Take over what a clock of the same kind has learnt."""


@dataclass(frozen=True)
class SyncClock(Clock):
    """Ends the round as soon as the next exchange can start: the published rule, no parameter.

    >>> SyncClock().is_due(Progress(rank=0, round=5, micro_batches=1, elapsed=0.02))
    True

    References:
        [ABS-SGD] Zhou, Chen, Wu, arXiv 2308.15164, section 3.
    """

    def is_due(self, progress: Progress) -> bool:
        return True


@dataclass(frozen=True)
class CountClock(Clock):
    """Ends the round after a fixed number of micro-batches; a rank that is there first waits for the exchange.

    Deterministic; for baselines and tests.

    >>> clock = CountClock(4)
    >>> [clock.is_due(Progress(rank=0, round=0, micro_batches=n, elapsed=0.02 * n)) for n in (3, 4)]
    [False, True]

    Args:
        micro_batches: Micro-batches in a round, on every rank.

    Raises:
        ValueError: ``micro_batches`` is not a whole number of at least 1, or exceeds the optimizer's bound.

    References:
        [NoDelay] Talyansky et al., "Asynchronous SGD without gradient delay", algorithm 2 (the cycle length β).
    """

    micro_batches: int

    def __post_init__(self) -> None:
        if not isinstance(self.micro_batches, int) or self.micro_batches < 1:
            raise ValueError(f"CountClock takes a whole number of micro-batches >= 1, not {self.micro_batches!r}")

    def is_due(self, progress: Progress) -> bool:
        return progress.micro_batches >= self.micro_batches

    def limit(self, progress: Progress) -> float:
        return self.micro_batches

    def validate(self, max_micro_batches: int) -> None:
        if self.micro_batches > max_micro_batches:
            raise ValueError(
                f"{self} asks for more micro-batches than a round may hold ({max_micro_batches}): "
                f"pass max_micro_batches={self.micro_batches} or more (and max_staleness, of ModelUpdates)"
            )


@dataclass
class IntervalClock(Clock):
    """Ends the round at a tick, a fixed time after the one before.

    Under MPI rank 0 (the first of the process set) keeps the time with a timer of its own, so that a slow micro-batch
    there does not delay the tick, and calls the end of the round on all ranks; they hear it at their next micro-batch
    boundary. Under Gloo each rank takes the time itself, from the moment at which its last round was due: timers that
    began together stay together, but each rank's stalls and clock are its own.

    A round never ends before the exchange before it is complete; an interval shorter than that is as ``SyncClock``.

    >>> clock = IntervalClock(0.5)
    >>> [clock.is_due(Progress(rank=0, round=0, micro_batches=9, elapsed=seconds)) for seconds in (0.49, 0.5)]
    [False, True]

    Args:
        seconds: Length of a round.

    Raises:
        ValueError: ``seconds`` is not positive.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise ValueError(f"IntervalClock takes a positive number of seconds, not {self.seconds!r}")

    @property
    def interval(self) -> float | None:
        return self.seconds

    def is_due(self, progress: Progress) -> bool:
        return _time_is_up(progress, self.seconds)


@dataclass
class TargetBatchClock(Clock):
    """Ends the round so that the global batch comes out at a target.

    As :class:`IntervalClock`, with the interval steered by the ledger: what the ranks' measured speeds ask for, times
    a correction that integrates what the batches miss the target by (ranks end a round at a micro-batch boundary,
    somewhat after the tick). Until the first entry is merged, rounds end as soon as they can.

    >>> from horovod_abs.sim.play import play
    >>> steered = play(TargetBatchClock(960), [1, 1, 0.5, 0.25], seconds=20)
    >>> [int(batch) for batch in steered.global_batches[-4:]]
    [960, 944, 912, 960]

    Args:
        samples: The global batch, at least 16 micro-batches and some for each rank: it comes in whole micro-batches.

    Raises:
        ValueError: ``samples`` is not positive.
    """

    GAIN = 0.15
    WINDOW = 4

    samples: float
    _interval: float = field(default=0.0, init=False, repr=False)
    _correction: float = field(default=1.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not (self.samples > 0 and math.isfinite(self.samples)):
            raise ValueError(f"TargetBatchClock takes a positive number of samples, not {self.samples!r}")

    @property
    def interval(self) -> float | None:
        return self._interval

    def is_due(self, progress: Progress) -> bool:
        return _time_is_up(progress, self._interval)

    def merged(self, ledger: Ledger) -> None:
        speed = _samples_per_second(tuple(islice(reversed(ledger.recent), self.WINDOW)))
        batch, bounded = ledger.recent[-1].weight, ledger.recent[-1].any_raised(Flag.BOUNDED)
        if speed == 0 or batch == 0:
            return
        if self._interval and not bounded:  # a round that could not reach the target says nothing about the interval
            self._correction *= min(2.0, max(0.5, self.samples / batch)) ** self.GAIN
            self._correction = min(2.0, max(0.25, self._correction))
        self._interval = self._correction * self.samples / speed

    def state_dict(self) -> dict[str, float]:
        return {"interval": self._interval, "correction": self._correction}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._interval, self._correction = state["interval"], state["correction"]


def _time_is_up(progress: Progress, seconds: float) -> bool:
    return progress.elapsed >= seconds if progress.tick is None else progress.tick >= progress.round


@lru_cache(maxsize=8)  # many ranks in one process ask for the same rounds
def _samples_per_second(entries: tuple[Entry, ...]) -> float:
    """What all ranks do together while they compute, over some rounds."""
    samples = np.sum([entry.column(Column.WEIGHT) for entry in entries], axis=0)
    seconds = np.sum([entry.column(Column.COMPUTE_SECONDS) for entry in entries], axis=0)
    return float(np.sum(samples[seconds > 0] / seconds[seconds > 0]))


class ReplayClock(Clock):
    """Repeats the schedule of a recorded run, on as many ranks: the same micro-batches in each round of each rank.

    The recorded times stand in for the measured ones, so that ranks are handed the same samples; where the recorded
    run was stopped or took a checkpoint, this one drains its rounds as well and goes on. After the record's end the
    rounds end as with ``SyncClock``.

    A recorded round that ended because the rank had no data, or was closing, did so when the program asked for its
    next batch, by which the one before was counted as drawn. Such a round is left to end there again.

    >>> log = hvd.read_run_log("runs/mnist.jsonl")
    >>> optimizer = hvd.DistributedOptimizer(
    ...     torch.optim.SGD(model.parameters(), lr=0.05), clock=hvd.ReplayClock(log.entries)
    ... )

    Args:
        entries: The recorded entries, from round 0.

    Raises:
        ValueError: the record is empty, or does not begin with round 0.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        if not entries or [entry.round for entry in entries] != list(range(len(entries))):
            raise ValueError("a record holds the entries of all rounds from 0 on")
        self.entries = list(entries)

    def __repr__(self) -> str:
        last = self.entries[-1]
        return f"ReplayClock({len(self.entries)} rounds, {len(last.rows)} ranks, {last.rows.sum():.17g})"

    def is_due(self, progress: Progress) -> bool:
        return progress.round >= len(self.entries) or progress.micro_batches >= self.limit(progress)

    def limit(self, progress: Progress) -> float:
        if progress.round >= len(self.entries):
            return math.inf
        row = self.entries[progress.round].rows[progress.rank]
        left_to_the_program = row[Column.MICRO_BATCHES] == 0 or progress.drawn < row[Column.DRAWN]
        return math.inf if left_to_the_program else float(row[Column.MICRO_BATCHES])

    def replayed(self, entry: Entry) -> Entry:
        if entry.round >= len(self.entries):
            return entry
        recorded, rows = self.entries[entry.round].rows, entry.rows.copy()
        for column in (Column.WEIGHT, Column.DRAWN, Column.MICRO_BATCHES):
            others = np.flatnonzero(recorded[:, column] != rows[:, column])
            if len(others):
                rank = int(others[0])
                raise ValueError(
                    f"the run has left its record in round {entry.round}: rank {rank} has {column.name.lower()} "
                    f"{rows[rank, column]:g}, recorded {recorded[rank, column]:g}. Replay it with the same data, "
                    "seeds, loaders and ranks"
                )
        rows[:, Column.COMPUTE_SECONDS] = recorded[:, Column.COMPUTE_SECONDS]
        asked = recorded[:, Column.FLAGS].astype(np.int64) & int(Flag.STOP | Flag.CHECKPOINT)
        rows[:, Column.FLAGS] = rows[:, Column.FLAGS].astype(np.int64) | np.where(asked, int(Flag.CHECKPOINT), 0)
        return Entry(entry.round, rows)
