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


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """The merged rows of one exchange, the same on every rank.

    Attributes:
        round: Number of the exchange, from 0.
        rows: Float64 array of shape ``(ranks, len(Column))``.
    """

    round: int
    rows: Floats

    def column(self, column: Column) -> Floats:
        """One number of every rank, shape ``(ranks,)``."""
        return self.rows[:, column]

    @property
    def weight(self) -> float:
        """N: the samples in this exchange's average, over all ranks."""
        return float(self.column(Column.WEIGHT).sum())

    def ranks_with(self, flag: Flag) -> tuple[int, ...]:
        """The ranks that raised ``flag``."""
        flags = self.rows[:, Column.FLAGS]
        if not flags.any():
            return ()
        return tuple(rank for rank, raised in enumerate(flags.tolist()) if int(raised) & flag)

    def all_raised(self, flag: Flag) -> bool:
        """Whether every rank raised ``flag``."""
        return len(self.ranks_with(flag)) == len(self.rows)


class Ledger:
    """Running totals over all merged exchanges, and the last few entries.

    Attributes:
        size: Number of ranks.
        rounds: Exchanges merged so far, empty ones included.
        weight: Samples that entered an average, by rank, shape ``(size,)``.
        drawn: Indices used up, by rank, shape ``(size,)``.
        recent: The last :attr:`KEPT` entries, oldest first.
    """

    KEPT = 1024

    def __init__(self, size: int) -> None:
        self.size = size
        self.rounds = 0
        self.weight: Floats = np.zeros(size)
        self.drawn: Floats = np.zeros(size)
        self.recent: deque[Entry] = deque(maxlen=self.KEPT)

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
        self.weight += entry.column(Column.WEIGHT)
        self.drawn += entry.column(Column.DRAWN)
        self.recent.append(entry)

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
        self.weight = np.asarray(state["weight"], dtype=np.float64)
        self.drawn = np.asarray(state["drawn"], dtype=np.float64)
        self.recent = deque(
            (Entry(round, np.asarray(rows, dtype=np.float64)) for round, rows in state["recent"]), maxlen=self.KEPT
        )
