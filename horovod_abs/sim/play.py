"""Plays a small cluster through in virtual time, to look at: who computes when, who waits, how large batches become.

Every rank runs the production engine and clock; nothing is computed, and a second takes some milliseconds::

    adaptive = play(SyncClock(), [1, 1, 0.5, 0.25])
    lanes({"ABS-SGD": adaptive.blocks}, seconds=0.5)
    adaptive.share_of_ideal
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from horovod_abs.core.clocks import Clock
from horovod_abs.core.engine import Engine
from horovod_abs.core.ledger import Column, Floats
from horovod_abs.sim.cluster import Compute, Program, Synchronize, VirtualCluster

_TICK_SECONDS = 0.0005
"""How long a tick of rank 0 takes to the others."""


What = Literal["compute", "wait", "exchange"]


@dataclass(frozen=True, slots=True)
class Block:
    """Something that takes time.

    Attributes:
        what: What it is.
        rank: Whose; ``None`` for an exchange, which is everybody's.
        round: To which round it belongs.
        begin: Seconds.
        end: Seconds.
    """

    what: What
    rank: int | None
    round: int
    begin: float
    end: float


@dataclass(frozen=True)
class Play:
    """What happened.

    Attributes:
        blocks: What every rank and the network did, and when.
        batches: Samples of each rank in each round that was merged in time, shape ``(rounds, ranks)``.
        merged_at: When rank 0 merged those rounds, in seconds, shape ``(rounds,)``.
        speeds: Of the ranks.
        seconds: How long it lasted.
    """

    blocks: tuple[Block, ...]
    batches: Floats
    merged_at: Floats
    speeds: tuple[float, ...]
    seconds: float

    @property
    def global_batches(self) -> Floats:
        """Samples of all ranks together, by round."""
        return np.asarray(self.batches.sum(axis=1))

    @property
    def computing(self) -> Floats:
        """The part of its time in which each rank computed, from 0 to 1."""
        shares = np.zeros(len(self.speeds))
        for block in self.blocks:
            if block.what == "compute" and block.rank is not None:
                shares[block.rank] += max(min(block.end, self.seconds) - block.begin, 0.0) / self.seconds
        return shares

    @property
    def share_of_ideal(self) -> float:
        """What the ranks did of what they could do if none ever waited, from 0 to 1: a fast rank's time counts more."""
        return float(np.average(self.computing, weights=self.speeds))


def play(
    clock: Clock,
    speeds: Sequence[float],
    *,
    delay: int = 1,
    micro_batch: float = 0.02,
    samples: int = 16,
    exchange: float = 0.01,
    seconds: float = 2.0,
    jitter: float = 0.0,
    seed: int = 0,
) -> Play:
    """Play a cluster through.

    Args:
        clock: When a round ends.
        speeds: Of the ranks; one of speed 1 takes ``micro_batch`` seconds for a micro-batch.
        delay: 1, or 0 to wait for every exchange; with ``CountClock(1)`` that is synchronous training.
        micro_batch: Seconds of a micro-batch.
        samples: In a micro-batch.
        exchange: Seconds of an exchange, from the last rank's launch on.
        seconds: How long to play.
        jitter: Standard deviation of the logarithm of a micro-batch's time.
        seed: Of the jitter.

    Raises:
        ValueError: a number that is not positive.
    """
    if not speeds or min(*speeds, micro_batch, samples, exchange, seconds) <= 0 or jitter < 0:
        raise ValueError("speeds and times must be positive, and there must be at least one rank")
    size = len(speeds)
    engines = [Engine(size, clock, rank=rank, delay=delay, max_micro_batches=10_000) for rank in range(size)]
    blocks: list[Block] = []

    def program(rank: int) -> Program:
        random = np.random.default_rng((seed, rank))
        ended = 0.0
        while cluster.now < seconds:
            begin = cluster.now
            if begin > ended:
                blocks.append(Block("wait", rank, engines[rank].launches, ended, begin))
            took = micro_batch / speeds[rank] * np.exp(jitter * random.standard_normal() - jitter**2 / 2)
            ended = begin + took
            blocks.append(Block("compute", rank, engines[rank].launches, begin, ended))
            yield Compute(samples, took)
        yield Synchronize()

    cluster = VirtualCluster(
        engines, [program(rank) for rank in range(size)], lambda _: exchange, tick_seconds=_TICK_SECONDS
    )
    cluster.run()
    merges = [(at, number) for at, number in cluster.ranks[0].merges if at <= seconds]
    batches = [cluster.entries[number].column(Column.WEIGHT) for _, number in merges]
    return Play(
        blocks=(*blocks, *_exchanges(cluster, exchange)),
        batches=np.array(batches).reshape(-1, size),
        merged_at=np.array([at for at, _ in merges]),
        speeds=tuple(speeds),
        seconds=seconds,
    )


def _exchanges(cluster: VirtualCluster, seconds: float) -> list[Block]:
    """From the last rank's launch until all have the sum."""
    launched: dict[int, float] = {}
    for rank in cluster.ranks:
        for at, number in rank.launches:
            launched[number] = max(at, launched.get(number, at))
    return [Block("exchange", None, number, at, at + seconds) for number, at in launched.items()]
