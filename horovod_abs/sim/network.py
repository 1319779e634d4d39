"""How long exchanges take: latency and bandwidth of each rank's link, and what passes over it.

Megabytes are 10⁶ bytes, megabits 10⁶ bits. Formulas are the usual ones of first order: no congestion inside the
network, whose only limit is each rank's own link, equally fast in both directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Algorithm = Literal["ring", "tree"]


@dataclass(frozen=True)
class Network:
    """The ranks' links.

    Args:
        latency: Seconds of a message, besides its length.
        mbit: Megabits a second of each rank's link: one number for all, or one a rank.
        algorithm: Of the allreduce. A ring passes 2 (P−1) / P of the data over every link, in 2 (P−1) steps; a binary
            tree all of it twice, in 2 ⌈log₂ P⌉ steps.
        overlap: Whether synchronous training exchanges gradients while the backward pass goes on.

    Raises:
        ValueError: a number is out of range, or there is no such algorithm.
    """

    latency: float = 0.0
    mbit: float | tuple[float, ...] = 1000.0
    algorithm: Algorithm = "ring"
    overlap: bool = True

    def __post_init__(self) -> None:
        if not (0 <= self.latency < math.inf and min(self._links) > 0):
            raise ValueError(f"need latency >= 0 and links of more than 0 Mbit/s, got {self}")
        if self.algorithm not in get_args(Algorithm):
            raise ValueError(f"an allreduce is a ring or a tree, not {self.algorithm!r}")

    @property
    def _links(self) -> tuple[float, ...]:
        return self.mbit if isinstance(self.mbit, tuple) else (self.mbit,)

    def link(self, rank: int | None = None) -> float:
        """Megabytes a second of a rank's link; of the slowest without a rank."""
        return (min(self._links) if rank is None or len(self._links) == 1 else self._links[rank]) / 8

    def allreduce_seconds(self, megabytes: float, size: int) -> float:
        """From the last rank's launch until all have the sum.

        Args:
            megabytes: That each rank puts in.
            size: How many ranks there are.
        """
        if size == 1:
            return 0.0
        if self.algorithm == "ring":
            return 2 * (size - 1) * (self.latency + megabytes / size / self.link())
        return 2 * math.ceil(math.log2(size)) * (self.latency + megabytes / self.link())

    def server_seconds(self, megabytes: float, size: int, *, sharded: bool = True, rank: int | None = None) -> float:
        """A worker hands its gradient to the parameter server and fetches the parameters, when nobody else does.

        Args:
            megabytes: Of the gradient, and of the parameters.
            size: How many workers there are.
            sharded: Every worker is also the server of its share, 2 M (P−1) / P over its link; otherwise one server
                holds all, and serves one worker after the other, 2 M over the slower of both links, which this is the
                service time of.
            rank: Whose link; the slowest by default. A single server has the quickest.
        """
        share = (size - 1) / size if sharded else 1.0
        return 2 * (self.latency + share * megabytes / self.link(rank))


@dataclass(frozen=True)
class Measured:
    """A network of which nothing is known but how long the exchanges of one model took.

    Args:
        seconds: Of an exchange, from the last rank's launch until all have the sum.
        overlap: As of :class:`Network`.

    Raises:
        ValueError: a negative time.
    """

    seconds: float
    overlap: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"an exchange takes a time of at least 0, not {self.seconds}")

    def allreduce_seconds(self, megabytes: float, size: int) -> float:
        """The same for every model, and for every number of ranks, as around a ring."""
        return self.seconds if size > 1 else 0.0

    def server_seconds(self, megabytes: float, size: int, *, sharded: bool = True) -> float:
        """As of :class:`Network`: as long as around a ring if the server is sharded over the workers."""
        return self.allreduce_seconds(megabytes, size) * (1.0 if sharded or size == 1 else size / (size - 1))
