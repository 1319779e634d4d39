"""Makes a real run heterogeneous on one machine: real compute, stretched by sleeping up to an emulated time.

Four workers that really compute on two cores measure nothing but contention. A GPU, however, leaves the processor idle
while it computes, and so does a rank that runs a small real forward and backward pass and sleeps for the rest.

>>> pace = from_speeds([1, 1, 0.5, 0.25], base_seconds=0.02, rank=hvd.rank())
>>> for x, y in optimizer.epoch(loader):
...     optimizer.zero_grad()
...     with pace:  # 20, 20, 40 and 80 ms
...         loss_fn(model(x), y).backward()
...     merged = optimizer.step(samples=len(x))  # costs what it really costs

Only host time is seen: on a device that computes asynchronously, synchronise inside the context.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

_RUNNING_OVERRUNS = 3
"""So many late micro-batches in a row are a wrong setting; a single one is the first, or a busy machine."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A stretch of time in which a rank is slower: a burst of other load, or a change of speed.

    Args:
        begin: Seconds since the first micro-batch.
        end: Seconds since the first micro-batch; infinite for a change that stays.
        factor: By what the emulated time is multiplied meanwhile.

    Raises:
        ValueError: the stretch is empty, or the factor is not positive.
    """

    begin: float
    end: float
    factor: float

    def __post_init__(self) -> None:
        if not (0 <= self.begin < self.end and self.factor > 0):
            raise ValueError(f"need 0 <= begin < end and factor > 0, got {self}")


class Pace:
    """Context manager that lasts an emulated time, whatever the real work inside it takes (if less).

    The *mean* is exact: what one sleep overshoots is taken off the next, up to one mean micro-batch. Neither work that
    takes longer than the emulated time nor anything outside the context is ever made up for.

    Args:
        seconds: Mean emulated time of a micro-batch.
        jitter: Standard deviation of the logarithm of the emulated time (lognormal, mean ``seconds``).
        slowdowns: Stretches of time in which the rank is slower.
        seed: Of the jitter; add the rank to it.
        rank: For the warning.
        now: Tells the time in seconds.
        sleep: Sleeps for so many seconds.

    Attributes:
        micro_batches: How often the context was left normally.
        late: Micro-batches whose real work took longer than the emulated time.

    Raises:
        ValueError: ``seconds`` is not positive, or ``jitter`` is negative.
    """

    def __init__(
        self,
        seconds: float,
        *,
        jitter: float = 0.0,
        slowdowns: Sequence[Slowdown] = (),
        seed: int = 0,
        rank: int = 0,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds must be positive, got {seconds!r}")
        if not (math.isfinite(jitter) and jitter >= 0):
            raise ValueError(f"jitter must not be negative, got {jitter!r}")
        self.seconds = seconds
        self.jitter = jitter
        self.slowdowns = tuple(slowdowns)
        self.rank = rank
        self.micro_batches = 0
        self.late = 0
        self._random = np.random.default_rng(seed)
        self._now = now
        self._sleep = sleep
        self._origin: float | None = None
        self._entered: float | None = None
        self._due = self._left = 0.0
        self._late_running = 0
        self._warned = False

    def __enter__(self) -> Pace:
        if self._entered is not None:
            raise RuntimeError("a Pace cannot be entered again before it is left: use one per rank")
        self._entered = self._now()
        if self._origin is None:
            self._origin = self._entered
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered, self._entered = self._entered, None
        if kind is not None or entered is None:
            return
        self.micro_batches += 1
        emulated = self._draw(entered)
        overshoot = min(max(self._left - self._due, 0.0), self.seconds)
        worked = self._now() - entered
        if worked > emulated:
            self._note_late(worked, emulated)
            return
        self._late_running = 0
        self._due = entered + emulated - overshoot
        if worked < emulated - overshoot:
            self._sleep(emulated - overshoot - worked)
        self._left = self._now()  # last of all: what comes after it would not be made up for

    def _draw(self, entered: float) -> float:
        emulated = self.seconds
        if self.jitter:
            emulated *= math.exp(self.jitter * self._random.standard_normal() - self.jitter**2 / 2)
        at = entered - (self._origin or 0.0)
        return emulated * math.prod(s.factor for s in self.slowdowns if s.begin <= at < s.end)

    def _note_late(self, worked: float, emulated: float) -> None:
        self.late += 1
        self._late_running += 1
        if self._late_running < _RUNNING_OVERRUNS or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"rank {self.rank}: a micro-batch really took {1e3 * worked:.1f} ms, more than the {1e3 * emulated:.1f} ms "
            "that it is emulated to take, so the rank is slower than it was asked to be. Emulate longer times, use a "
            "smaller model or micro-batch, or start fewer ranks on this machine.",
            RuntimeWarning,
            stacklevel=3,
        )


def from_speeds(speeds: Sequence[float], base_seconds: float, rank: int, *, jitter: float = 0.0, seed: int = 0) -> Pace:
    """The pace of one rank of a cluster.

    Args:
        speeds: By rank; 1 takes ``base_seconds`` for a micro-batch, 0.25 four times as long.
        base_seconds: Time of a micro-batch at speed 1.
        rank: Whose pace.
        jitter: As in :class:`Pace`.
        seed: Of the jitter; every rank gets a stream of its own.

    Raises:
        ValueError: a speed that is not positive, or no speed for this rank.
    """
    if any(not (math.isfinite(speed) and speed > 0) for speed in speeds):
        raise ValueError(f"speeds must be positive, got {list(speeds)}")
    if not 0 <= rank < len(speeds):
        raise ValueError(f"{len(speeds)} speeds were given, none for rank {rank}: give one for each rank")
    own_stream = np.random.SeedSequence([seed, rank]).generate_state(1)[0]
    return Pace(base_seconds / speeds[rank], jitter=jitter, seed=int(own_stream), rank=rank)
