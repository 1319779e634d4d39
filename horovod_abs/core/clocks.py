"""When a round ends: the clocks, as rules over a rank's progress.

The engine asks a clock only when the round may end at all: the previous exchange is complete and the rank has done
its least number of micro-batches. A clock never blocks and never looks at the time itself; it is shown it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one rank has come in its current round.

    Attributes:
        round: Number of the round, from 0.
        micro_batches: Micro-batches done in it.
        elapsed: Seconds since the rank's last merge.
    """

    round: int
    micro_batches: int
    elapsed: float


class Clock(ABC):
    """Decides when a round ends. Two ranks' clocks are the same if their ``repr`` is."""

    @abstractmethod
    def is_due(self, progress: Progress) -> bool:
        """Whether a rank that has come this far ends its round now."""

    def validate(self, max_micro_batches: int) -> None:  # noqa: B027  (most clocks have no bound)
        """Raise :class:`ValueError` if the clock cannot work within the bound on a round."""


@dataclass(frozen=True)
class SyncClock(Clock):
    """Ends the round as soon as the next exchange can start: the published rule, no parameter.

    References:
        [ABS-SGD] Zhou, Chen, Wu, arXiv 2308.15164, section 3.
    """

    def is_due(self, progress: Progress) -> bool:
        return True


@dataclass(frozen=True)
class CountClock(Clock):
    """Ends the round after a fixed number of micro-batches. Deterministic; for baselines and tests.

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

    def validate(self, max_micro_batches: int) -> None:
        if self.micro_batches > max_micro_batches:
            raise ValueError(
                f"{self} asks for more micro-batches than a round may hold ({max_micro_batches}): "
                f"pass max_micro_batches={self.micro_batches} or more"
            )
