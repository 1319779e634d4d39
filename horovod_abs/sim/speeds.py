"""How long a rank's micro-batches take: what is random, what comes and goes, and what was recorded.

A micro-batch of b samples takes ``(fixed + b · per_sample) / speed`` seconds, times a random factor of its own
(:class:`Noise`), times what slows the rank down at the moment at which it begins (:class:`Bursts`, :class:`Drift`,
:class:`Trace`). Every rank has random streams of its own, so that what one rank does changes nothing for another.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Cost:
    """What a micro-batch costs at speed 1.

    Args:
        fixed: Seconds, whatever its size.
        per_sample: Seconds for each sample.

    Raises:
        ValueError: a micro-batch that takes no time.
    """

    fixed: float
    per_sample: float

    def __post_init__(self) -> None:
        if min(self.fixed, self.per_sample) < 0 or self.fixed + self.per_sample <= 0:
            raise ValueError(f"a micro-batch must take some time, got {self}")

    def seconds(self, samples: float) -> float:
        """Time of a micro-batch of so many samples."""
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True, slots=True)
class Noise:
    """A random factor of each micro-batch's time.

    Args:
        jitter: Standard deviation of its logarithm; its mean is 1.
        straggling: Probability that a micro-batch is a straggler besides.
        factor: How many times as long stragglers take, on average.
        spread: Standard deviation of the logarithm of that; 0 for stragglers that are all alike.

    Raises:
        ValueError: a number is out of range.
    """

    jitter: float = 0.0
    straggling: float = 0.0
    factor: float = 4.0
    spread: float = 0.5

    def __post_init__(self) -> None:
        if min(self.jitter, self.spread) < 0 or not 0 <= self.straggling <= 1 or self.factor <= 0:
            raise ValueError(f"need jitter, spread >= 0, a probability of straggling and a factor > 0, got {self}")

    @property
    def mean(self) -> float:
        """The mean factor."""
        return 1 - self.straggling + self.straggling * self.factor

    @property
    def none(self) -> bool:
        """Whether there is none, so that every factor is 1."""
        return self.jitter == 0 and self.straggling == 0

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """So many factors."""
        factors = np.exp(self.jitter * random.standard_normal(count) - self.jitter**2 / 2)
        if self.straggling:
            late = self.factor * np.exp(self.spread * random.standard_normal(count) - self.spread**2 / 2)
            factors *= np.where(random.random(count) < self.straggling, late, 1.0)
        return factors


class Load(Protocol):
    """Something that slows a rank down for stretches of time; describes it, and makes it happen."""

    @property
    def mean_speed(self) -> float:
        """The mean over time of 1 / factor, in the long run."""

    def begin(self, random: np.random.Generator) -> Loaded:
        """Let it happen."""


class Loaded(Protocol):
    """A load as it happens to one rank."""

    def at(self, now: float) -> tuple[float, float]:
        """By what a micro-batch takes longer that begins now, and until when that is so."""


@dataclass(frozen=True, slots=True)
class Bursts:
    """Other work that comes and goes, each for a random (exponential) time.

    Args:
        every: Mean seconds from the end of a burst to the next.
        lasting: Mean seconds of a burst.
        factor: How many times as long micro-batches take meanwhile.

    Raises:
        ValueError: a number that is not positive.
    """

    every: float
    lasting: float
    factor: float

    def __post_init__(self) -> None:
        if min(self.every, self.lasting, self.factor) <= 0:
            raise ValueError(f"every number of bursts must be positive, got {self}")

    @property
    def mean_speed(self) -> float:
        return (self.every + self.lasting / self.factor) / (self.every + self.lasting)

    def begin(self, random: np.random.Generator) -> Loaded:
        return _Bursting(self, random)


class _Bursting:
    def __init__(self, bursts: Bursts, random: np.random.Generator) -> None:
        self._bursts = bursts
        self._random = random
        burning = random.random() < bursts.lasting / (bursts.every + bursts.lasting)  # it went on before the run began
        self._first = int(burning)
        self._ends: list[float] = []

    def at(self, now: float) -> tuple[float, float]:
        while not self._ends or self._ends[-1] <= now:
            burst = (len(self._ends) + self._first) % 2
            mean = self._bursts.lasting if burst else self._bursts.every
            self._ends.append((self._ends[-1] if self._ends else 0.0) + mean * self._random.standard_exponential())
        stretch = bisect.bisect_right(self._ends, now)
        return self._bursts.factor if (stretch + self._first) % 2 else 1.0, self._ends[stretch]


@dataclass(frozen=True, slots=True)
class Drift:
    """A rank becomes slower, or quicker, little by little, and stays so.

    Args:
        factor: How many times as long micro-batches take in the end.
        over: Seconds from the beginning until then.

    Raises:
        ValueError: a number that is not positive.
    """

    STEPS = 100

    factor: float
    over: float

    def __post_init__(self) -> None:
        if min(self.factor, self.over) <= 0:
            raise ValueError(f"every number of a drift must be positive, got {self}")

    @property
    def mean_speed(self) -> float:
        return 1 / self.factor

    def begin(self, random: np.random.Generator) -> Loaded:
        return self

    def at(self, now: float) -> tuple[float, float]:
        """As :meth:`Loaded.at`, in :attr:`STEPS` steps."""
        step = math.floor(now / self.over * self.STEPS)
        if step >= self.STEPS:
            return self.factor, math.inf
        until = max((step + 1) * self.over / self.STEPS, math.nextafter(now, math.inf))
        return 1 + (self.factor - 1) * (step + 0.5) / self.STEPS, until


@dataclass(frozen=True, slots=True)
class Trace:
    """What was recorded, over and over again.

    Args:
        ends: When each stretch ends, in seconds since the beginning, ascending.
        factors: How many times as long micro-batches take in each.

    Raises:
        ValueError: no stretch, or not in order, or a factor that is not positive.
    """

    ends: tuple[float, ...]
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        ordered = all(a < b for a, b in zip((0.0, *self.ends), self.ends, strict=False))
        if not self.ends or len(self.ends) != len(self.factors) or not ordered or min(self.factors) <= 0:
            raise ValueError("a trace needs stretches in order of time, each with a positive factor")

    @property
    def mean_speed(self) -> float:
        lengths = np.diff(self.ends, prepend=0.0)
        return float(np.sum(lengths / np.array(self.factors)) / self.ends[-1])

    def begin(self, random: np.random.Generator) -> Loaded:
        return self

    def at(self, now: float) -> tuple[float, float]:
        """As :meth:`Loaded.at`."""
        turns, within = divmod(now, self.ends[-1])
        stretch = min(bisect.bisect_right(self.ends, within), len(self.ends) - 1)
        until = turns * self.ends[-1] + self.ends[stretch]
        return self.factors[stretch], max(until, math.nextafter(now, math.inf))


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank does nothing for a while: the first micro-batch that it begins from then on takes so much longer.

    Args:
        at: When, in seconds.
        lasting: For how long.
    """

    at: float
    lasting: float


@dataclass(frozen=True)
class RankModel:
    """One rank.

    Args:
        cost: Of a micro-batch at speed 1.
        speed: How many times as quick as that it is.
        noise: Of each micro-batch.
        loads: What slows it down for a while.
        stalls: When it does nothing.
        leaves: Seconds after which it begins no further micro-batch.

    Raises:
        ValueError: a speed that is not positive.
    """

    cost: Cost
    speed: float = 1.0
    noise: Noise = Noise()
    loads: tuple[Load, ...] = ()
    stalls: tuple[Stall, ...] = ()
    leaves: float = math.inf

    def __post_init__(self) -> None:
        if not (self.speed > 0 and math.isfinite(self.speed)):
            raise ValueError(f"a speed must be positive, got {self.speed!r}")

    def mean_seconds(self, samples: float) -> float:
        """Time that a micro-batch takes on average, when nothing slows the rank down."""
        return self.cost.seconds(samples) / self.speed * self.noise.mean

    def mean_rate(self, samples: float) -> float:
        """Samples a second in the long run, alone, in micro-batches of so many; without stalls and leaving."""
        return samples / self.mean_seconds(samples) * math.prod(load.mean_speed for load in self.loads)


class RankSpeed:
    """One rank as it happens; made by :meth:`Sampler`.

    Args:
        model: Of the rank.
        seed: Of its random streams.
    """

    def __init__(self, model: RankModel, seed: Sequence[int]) -> None:
        streams = np.random.SeedSequence(seed).spawn(1 + len(model.loads))
        self.model = model
        self._random = np.random.default_rng(streams[0])
        self._loads = [
            load.begin(np.random.default_rng(stream)) for load, stream in zip(model.loads, streams[1:], strict=True)
        ]
        self._stalls = sorted(model.stalls, key=lambda stall: stall.at)
        self._stalled = 0
        self._sums = [0.0]  # of the factors ahead
        self._next = 0

    def seconds(self, samples: float, now: float) -> float:
        """Time of the next micro-batch, begun at ``now``."""
        if self._next + 1 >= len(self._sums):
            self._draw()
        factor = self._sums[self._next + 1] - self._sums[self._next]
        self._next += 1
        base = self.model.cost.seconds(samples) / self.model.speed
        return base * factor * self._load(now)[0] + self._stall(now)

    def until(self, samples: float, begin: float, end: float, most: int) -> tuple[int, float]:
        """As many micro-batches, one after the other, as it takes to reach ``end``, and at most ``most``.

        Returns:
            How many, and when the last of them is over.
        """
        base = self.model.cost.seconds(samples) / self.model.speed
        done, now = 0, begin
        while done < most and now < end:
            load, changes = self._load(now)
            if self._stalled < len(self._stalls):
                if self._stalls[self._stalled].at <= now:
                    now += self.seconds(samples, now)
                    done += 1
                    continue
                changes = min(changes, self._stalls[self._stalled].at)
            if self._next + 1 >= len(self._sums):
                self._draw()
            sums, first = self._sums, self._next
            scale = base * load
            last = bisect.bisect_left(sums, sums[first] + (min(end, changes) - now) / scale, first + 1)
            last = min(last, first + most - done, len(sums) - 1)
            now += scale * (sums[last] - sums[first])
            done += last - first
            self._next = last
        return done, now

    def mean_rate(self, samples: float, begin: float, end: float) -> float:
        """Samples a second from ``begin`` to ``end``, alone, with the loads and stalls of this run."""
        now, speed = begin, 0.0
        last = min(end, self.model.leaves)
        while now < last:
            factor, until = self._load(now)
            speed += (min(until, last) - now) / factor
            now = until
        lost = sum(stall.lasting for stall in self._stalls if begin <= stall.at < last)
        share = max(speed - lost, 0.0) / (end - begin)
        return samples / self.model.mean_seconds(samples) * share

    def _load(self, now: float) -> tuple[float, float]:
        factor, until = 1.0, math.inf
        for load in self._loads:
            own, changes = load.at(now)
            factor, until = factor * own, min(until, changes)
        return factor, until

    def _stall(self, now: float) -> float:
        lasting = 0.0
        while self._stalled < len(self._stalls) and self._stalls[self._stalled].at <= now:
            lasting += self._stalls[self._stalled].lasting
            self._stalled += 1
        return lasting

    def _draw(self) -> None:
        if self.model.noise.none:
            self._sums = list(map(float, range(_CHUNK + 1)))
        else:
            self._sums = [0.0, *np.cumsum(self.model.noise.draw(self._random, _CHUNK)).tolist()]
        self._next = 0
