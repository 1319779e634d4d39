"""Who contributed what: the row that each rank adds to every exchange, and the running totals.

The rows travel inside the exchange itself, as float64 and never compressed. A rank therefore knows, at the merge,
what every rank contributed, and every decision that must come out the same on all ranks is a pure function of
merged rows (design rule 5). Averages follow ``WEIGHT``, epochs follow ``DRAWN``: a batch that was drawn and then
dropped (non-finite, skipped by a GradScaler) has been used up although it weighs nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Column(IntEnum):
    """What each of the numbers in a row means."""

    WEIGHT = 0
    """Samples in the average."""
    DRAWN = 1
    """Indices of the data set used up."""
    MICRO_BATCHES = 2
    """Micro-batches computed."""
    COMPUTE_SECONDS = 3
    """Seconds spent computing them."""
    WAIT_SECONDS = 4
    """Seconds spent waiting for an exchange since the launch before."""
    FLAGS = 5
    """A :class:`Flag`."""
    OPTIONS = 6
    """Fingerprint of the optimizer's hyper-parameters, an integer below 2**52."""
    DIGEST = 7
    """Fingerprint of the parameters, an integer below 2**52; 0 in rounds that do not compare them."""
    LAUNCHED_AT = 8
    """When the rank launched, in seconds since 1970 by its own clock; for timelines only."""


class Flag(IntFlag):
    """What a rank asks of all ranks; acted upon at the merge that shows it."""

    CLOSING = 1
    """Contributes nothing after this exchange."""
    LEAVING = 2
    """Left its epoch early; all ranks end theirs."""
    STOP = 4
    """Asked to end the run."""
    CHECKPOINT = 8
    """Asked for a checkpoint."""
    NONFINITE = 16
    """Had an infinity or a NaN in its sum, which was dropped (weight 0)."""
    BOUNDED = 32
    """Ended its round because it had done as much as it may, whatever the clock says."""
    EXHAUSTED = 64
    """Has no more data in this epoch, which ends when no rank has."""


@dataclass(frozen=True, eq=False)
class Entry:
    """The merged rows of one exchange, the same on every rank.

    What is computed from them is computed once: where many ranks live in one process, they share it.

    >>> rows = np.zeros((2, len(Column)))
    >>> rows[:, Column.WEIGHT] = 32, 16
    >>> rows[1, Column.FLAGS] = Flag.CLOSING
    >>> entry = Entry(round=0, rows=rows)
    >>> entry.weight, entry.ranks_with(Flag.CLOSING), entry.all_raised(Flag.CLOSING)
    (48.0, (1,), False)

    Attributes:
        round: Number of the exchange, from 0.
        rows: Float64 array of shape ``(ranks, len(Column))``.
    """

    round: int
    rows: Floats

    def column(self, column: Column) -> Floats:
        """One number of every rank, shape ``(ranks,)``."""
        return self.rows[:, column]

    @cached_property
    def weight(self) -> float:
        """N: the samples in this exchange's average, over all ranks."""
        return float(self.column(Column.WEIGHT).sum())

    @cached_property
    def drawn(self) -> float:
        """Indices used up, over all ranks."""
        return float(self.column(Column.DRAWN).sum())

    def ranks_with(self, flag: Flag) -> tuple[int, ...]:
        """The ranks that raised ``flag``, or any of several."""
        return tuple(np.flatnonzero(self._flags & int(flag)).tolist())

    def any_raised(self, flag: int) -> bool:
        """Whether a rank raised ``flag``, or any of several."""
        return self._by_any != 0 and bool(self._by_any & flag)

    def all_raised(self, flag: int) -> bool:
        """Whether every rank raised ``flag``."""
        return self._by_all != 0 and bool(self._by_all & flag)

    @cached_property
    def _flags(self) -> NDArray[np.int64]:
        return self.column(Column.FLAGS).astype(np.int64)

    @cached_property
    def _by_any(self) -> int:
        return int(np.bitwise_or.reduce(self._flags))

    @cached_property
    def _by_all(self) -> int:
        return int(np.bitwise_and.reduce(self._flags))


class Ledger:
    """Running totals over all merged exchanges, and the last few entries.

    >>> ledger = Ledger(size=2)
    >>> for number in range(3):
    ...     rows = np.zeros((2, len(Column)))
    ...     rows[:, Column.WEIGHT] = 32, 16
    ...     ledger.append(Entry(number, rows))
    >>> ledger.rounds, ledger.weight.tolist()
    (3, [96.0, 48.0])

    Attributes:
        size: Number of ranks.
        rounds: Exchanges merged so far, empty ones included.
        total_drawn: Indices used up, over all ranks.
        recent: The last :attr:`KEPT` entries, oldest first.
    """

    KEPT = 1024

    def __init__(self, size: int) -> None:
        self.size = size
        self.rounds = 0
        self.total_drawn = 0.0
        self.recent: deque[Entry] = deque(maxlen=self.KEPT)
        self._weight: Floats = np.zeros(size)
        self._drawn: Floats = np.zeros(size)
        self._not_added: list[Entry] = []  # to the two above, which nobody may ask for

    @property
    def weight(self) -> Floats:
        """Samples that entered an average, by rank, shape ``(size,)``."""
        self._add_up()
        return self._weight

    @property
    def drawn(self) -> Floats:
        """Indices used up, by rank, shape ``(size,)``."""
        self._add_up()
        return self._drawn

    @property
    def last_weight(self) -> float:
        """Samples in the last merged exchange that was not empty; 0 if there was none."""
        return next((entry.weight for entry in reversed(self.recent) if entry.weight), 0.0)

    def append(self, entry: Entry) -> None:
        """Add a merged entry. Raises :class:`ValueError` if it is not the next one or has another shape."""
        if entry.round != self.rounds or entry.rows.shape != (self.size, len(Column)):
            raise ValueError(
                f"expected exchange {self.rounds} of {self.size} ranks, got exchange {entry.round} "
                f"with rows of shape {entry.rows.shape}"
            )
        self.rounds += 1
        self.total_drawn += entry.drawn
        self.recent.append(entry)
        self._not_added.append(entry)

    def state_dict(self) -> dict[str, Any]:
        """Totals and recent entries, as plain values that load on any machine."""
        return {
            "rounds": self.rounds,
            "weight": self.weight.tolist(),
            "drawn": self.drawn.tolist(),
            "recent": [(entry.round, entry.rows.tolist()) for entry in self.recent],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over totals saved by :meth:`state_dict`.

        Raises :class:`ValueError` if they are of another number of ranks.
        """
        if len(state["weight"]) != self.size:
            raise ValueError(
                f"the checkpoint was written by {len(state['weight'])} ranks, this run has {self.size}: "
                "resume with as many ranks"
            )
        self.rounds = int(state["rounds"])
        self._weight = np.array(state["weight"], dtype=np.float64)
        self._drawn = np.array(state["drawn"], dtype=np.float64)
        self._not_added = []
        self.total_drawn = float(self._drawn.sum())
        self.recent = deque(
            (Entry(round, np.asarray(rows, dtype=np.float64)) for round, rows in state["recent"]), maxlen=self.KEPT
        )

    def _add_up(self) -> None:
        for entry in self._not_added:
            self._weight += entry.column(Column.WEIGHT)
            self._drawn += entry.column(Column.DRAWN)
        self._not_added.clear()
