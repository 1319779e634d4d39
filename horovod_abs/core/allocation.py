"""Which samples each rank works on next: a pure function of the ledger.

An epoch is one pass of a permutation that all ranks share. Each rank has a queue of positions in it, append-only and
never taken back, in whole micro-batches except the last. At each merge every rank computes all queues from the
merged entry, without communication.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_abs.core.ledger import Column, Entry, Floats

ROUNDS_AHEAD = 2.5
"""Rounds of work that a queue is filled to: one is being computed, one may pass before the next merge is seen."""
FIRST_MICRO_BATCHES = 4
"""Micro-batches that a queue is filled to before there is a ledger."""
SECONDS_WINDOW = 3
"""Rounds over which the longest compute time is taken."""


@dataclass(frozen=True)
class Loading:
    """How one rank loads its data.

    Attributes:
        batch: Samples in a micro-batch.
        ahead: Samples that its loader draws before it hands out the first batch (workers × prefetch × batch).
    """

    batch: int
    ahead: int = 0


class Allocation:
    """Hands the positions of one or many epochs out to ranks.

    Rank i is filled to 2.5 · rate_i · T + ahead_i + batch_i, where the rate is drawn samples per compute second and T
    the longest compute time of a rank in the last three rounds. When what is left no longer reaches to give every rank
    as many seconds of work as the one with most, it is poured so that all finish at the same time, counting what each
    already holds.

    >>> allocation = Allocation(10_000, [Loading(batch=16), Loading(batch=8)])
    >>> allocation.queues  # before anything is known: four micro-batches each
    [[(0, 64)], [(64, 96)]]
    >>> rows = np.zeros((2, len(Column)))
    >>> rows[:, Column.DRAWN], rows[:, Column.COMPUTE_SECONDS] = (64, 16), 0.5
    >>> allocation.merge(Entry(0, rows))
    >>> [sum(end - begin for begin, end in queue) for queue in allocation.queues]  # a fast rank is given more
    [240, 64]

    Args:
        length: Samples in an epoch.
        loading: How each rank loads its data.
        endless: Go on with the next epoch when one has been handed out.

    Attributes:
        queues: For each rank, the half-open ranges of positions handed to it, in order. With ``endless`` position p
            is sample ``p % length`` of epoch ``p // length``.
        drawn: Samples that each rank has used up, shape ``(ranks,)``.

    Raises:
        ValueError: an empty epoch, or a micro-batch of less than one sample.
    """

    def __init__(self, length: int, loading: list[Loading], *, endless: bool = False) -> None:
        if length < 1:
            raise ValueError("an epoch needs at least one sample")
        if any(rank.batch < 1 or rank.ahead < 0 for rank in loading):
            raise ValueError(f"micro-batches must hold at least one sample: {loading}")
        self.length = length
        self.loading = loading
        self.endless = endless
        self.cursor = 0
        self.queues: list[list[tuple[int, int]]] = [[] for _ in loading]
        self.assigned: Floats = np.zeros(len(loading))
        self.drawn: Floats = np.zeros(len(loading))
        self._rates: Floats = np.zeros(len(loading))
        self._longest: deque[float] = deque(maxlen=SECONDS_WINDOW)
        self._fill()

    @property
    def exhausted(self) -> bool:
        """Whether everything has been handed out, so that an empty queue stays empty."""
        return not self.endless and self.cursor == self.length

    def merge(self, entry: Entry) -> None:
        """Fill the queues after a merge."""
        drawn, seconds = entry.column(Column.DRAWN), entry.column(Column.COMPUTE_SECONDS)
        self.drawn += drawn
        busy = (drawn > 0) & (seconds > 0)
        self._rates[busy] = drawn[busy] / seconds[busy]
        self._longest.append(float(seconds.max()))
        self._fill()

    def _fill(self) -> None:
        held, levels, rates = self.assigned - self.drawn, self._levels(), self._known_rates()
        batches = np.array([rank.batch for rank in self.loading])
        give = (np.ceil(np.maximum(levels - held, 0) / batches) * batches).astype(np.int64)
        rest = self.length - self.cursor
        level_with_most = np.maximum(rates * np.max(np.maximum(levels, held) / rates) - held, 0)
        if not self.endless and max(give.sum(), level_with_most.sum()) > rest:
            give = pour(rest, held, rates, batches)
        for rank, samples in enumerate(give):
            if samples > 0:
                self._append(rank, self.cursor, int(samples))

    def _append(self, rank: int, start: int, samples: int) -> None:
        queue, stop = self.queues[rank], start + samples
        if queue and queue[-1][1] == start:
            queue[-1] = (queue[-1][0], stop)
        else:
            queue.append((start, stop))
        self.assigned[rank] += samples
        self.cursor = stop

    def _levels(self) -> Floats:
        longest = max(self._longest, default=0.0)
        return np.array(
            [
                rank.ahead + (ROUNDS_AHEAD * rate * longest + rank.batch if rate else FIRST_MICRO_BATCHES * rank.batch)
                for rank, rate in zip(self.loading, self._rates, strict=True)
            ]
        )

    def _known_rates(self) -> Floats:
        """Rates, where a rank that has none yet is taken to be as fast as the mean of the others."""
        known = self._rates[self._rates > 0]
        return np.where(self._rates > 0, self._rates, known.mean() if len(known) else 1.0)

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "length": self.length,
            "loading": [(rank.batch, rank.ahead) for rank in self.loading],
            "endless": self.endless,
            "cursor": self.cursor,
            "queues": self.queues,
            "drawn": self.drawn.tolist(),
            "rates": self._rates.tolist(),
            "longest": list(self._longest),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Allocation:
        """The allocation that was saved."""
        self = cls(state["length"], [Loading(*rank) for rank in state["loading"]], endless=state["endless"])
        self.cursor = state["cursor"]
        self.queues = [[(int(a), int(b)) for a, b in queue] for queue in state["queues"]]
        self.assigned = np.array([float(sum(b - a for a, b in queue)) for queue in self.queues])
        self.drawn = np.asarray(state["drawn"], dtype=np.float64)
        self._rates = np.asarray(state["rates"], dtype=np.float64)
        self._longest = deque(state["longest"], maxlen=SECONDS_WINDOW)
        return self


def pour(rest: int, held: Floats, rates: Floats, batches: Any) -> Any:
    """Divide the last ``rest`` samples so that all ranks finish at about the same time.

    Whole micro-batches go, one after the other, to the rank that would finish them first; the last one may be
    smaller.

    Args:
        rest: Samples to divide.
        held: Samples that each rank still has to compute, shape ``(ranks,)``.
        rates: Samples that each rank computes per second, shape ``(ranks,)``, positive.
        batches: Samples in a micro-batch of each rank, shape ``(ranks,)``.

    Returns:
        Samples for each rank, int64 of shape ``(ranks,)``; their sum is ``rest``.
    """
    level = _common_finish(rest, held, rates)
    give = (np.maximum(rates * level - held, 0) // batches * batches).astype(np.int64)
    left = rest - int(give.sum())
    while left > 0:
        first = int(np.argmin((held + give + batches) / rates))
        give[first] += min(int(batches[first]), left)
        left = rest - int(give.sum())
    return give


def _common_finish(rest: int, held: Floats, rates: Floats) -> float:
    """The time at which ``rest`` samples are done if they could be divided at will."""
    order = np.argsort(held / rates)
    filled_held, filled_rate = 0.0, 0.0
    for position, rank in enumerate(order):
        filled_held += held[rank]
        filled_rate += rates[rank]
        level = (rest + filled_held) / filled_rate
        following = order[position + 1] if position + 1 < len(order) else None
        if following is None or level <= held[following] / rates[following]:
            return float(level)
    return math.inf
