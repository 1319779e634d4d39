"""What a cluster would do under several algorithms: timing only, by the production engine, in virtual time.

    result = simulate(cluster, "abs", megabytes=44.0)
    result.samples_per_second, result.share_of_ideal

Nothing is trained, so nothing is said of how many samples an accuracy takes: that depends on the batch, on the delay
and on the learning rate. ``horovod-abs bench convergence`` measures it. :mod:`horovod_abs.plan.report` shows results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from horovod_abs.core.clocks import Clock, CountClock, SyncClock
from horovod_abs.core.engine import Engine
from horovod_abs.core.ledger import Column, Entry
from horovod_abs.sim.baselines import ProportionalSteps, dynamic_batches
from horovod_abs.sim.cluster import Compute, Program, Starve, Stream, VirtualCluster
from horovod_abs.sim.models import ClusterModel, Sampler
from horovod_abs.sim.servers import BACKWARD

LOCAL_STEPS = 8
"""Micro-batches between two averages of local SGD."""
EPOCH = 50
"""Rounds after which dynamic batches are shared out anew."""


@dataclass(frozen=True)
class Algorithm:
    """How ranks work together.

    Attributes:
        title: For people.
        clock: When a round ends, for a cluster of so many ranks.
        delay: Rounds until a round's result is applied.
        max_staleness: Micro-batches that may be missing from the model; ``None`` for no bound.
        overlaps: Whether exchanges begin in the backward pass, as Horovod's do.
        dynamic: Whether every rank does one batch in a round, of a size by its speed.
        ours: Whether it is one of this package.
    """

    title: str
    clock: Callable[[int], Clock]
    delay: int = 1
    max_staleness: int | None = None
    overlaps: bool = False
    dynamic: bool = False
    ours: bool = True


ALGORITHMS: Mapping[str, Algorithm] = {
    "synchronous": Algorithm("synchronous Horovod", lambda _: CountClock(1), 0, overlaps=True, ours=False),
    "dynamic": Algorithm("dynamic batches", lambda _: CountClock(1), 0, overlaps=True, dynamic=True, ours=False),
    "local": Algorithm(f"local SGD, H = {LOCAL_STEPS}", lambda _: CountClock(LOCAL_STEPS), 0, ours=False),
    "proportional": Algorithm("local SGD by speed", lambda size: ProportionalSteps(LOCAL_STEPS, size), 0, ours=False),
    "abs": Algorithm("ABS-SGD", lambda _: SyncClock()),
    "updates": Algorithm("model updates", lambda _: SyncClock(), max_staleness=64),
}
"""By the names of the command line. Sources: :mod:`horovod_abs.sim.baselines`, [ABS-SGD], [NoDelay]."""


@dataclass(frozen=True)
class Simulated:
    """What came of it.

    Attributes:
        algorithm: Its name.
        rounds: Exchanges that were merged.
        seconds: Until the last of them.
        samples_per_second: Merged in that time.
        ideal: Samples a second if every rank always computed, as fast as it was in this run.
        idle: Part of its time in which each rank waited, shape ``(ranks,)``.
        batch: Mean samples of all ranks in a round.
        batch_deviation: Standard deviation of that.
        staleness: Micro-batches of a rank that are missing from the model when it merges: mean over rounds and ranks.
    """

    algorithm: str
    rounds: int
    seconds: float
    samples_per_second: float
    ideal: float
    idle: tuple[float, ...]
    batch: float
    batch_deviation: float
    staleness: float

    @property
    def share_of_ideal(self) -> float:
        """Of what the ranks could do alone."""
        return self.samples_per_second / self.ideal


def simulate(
    cluster: ClusterModel,
    algorithm: str,
    *,
    megabytes: float,
    seconds: float = 120.0,
    rounds: float = math.inf,
    seed: int = 0,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Simulated:
    """Let a cluster train for a while.

    Args:
        cluster: Its model.
        algorithm: One of :data:`ALGORITHMS`.
        megabytes: Of the gradient, 10⁶ bytes.
        seconds: How long, at most, in virtual time.
        rounds: How many exchanges, at most.
        seed: Of all that is random in the cluster.
        on_progress: Called now and then with the part that is done, from 0 to 1.

    Raises:
        ValueError: an unknown algorithm, a number that is not positive, or a time in which nothing was merged.
    """
    how = algorithm_named(algorithm)
    if not (megabytes > 0 and rounds > 0 and seconds > 0):
        raise ValueError(
            f"need more than 0 megabytes, seconds and rounds, got {megabytes:g}, {seconds:g} and {rounds:g}"
        )
    merged: list[tuple[float, Entry]] = []

    def on_merge(rank: int, entry: Entry) -> None:
        if rank > 0:
            return
        if virtual.now <= seconds:
            merged.append((virtual.now, entry))
            on_progress(min(max(len(merged) / rounds, virtual.now / seconds), 1.0))
        if virtual.now > seconds or len(merged) == rounds:
            raise _Enough

    speeds = cluster.sampler(seed)
    virtual = _build(cluster, how, megabytes, speeds, on_merge)
    with suppress(_Enough):
        virtual.run()
    return _summary(algorithm, merged, speeds, seconds)


def algorithm_named(name: str) -> Algorithm:
    """One of :data:`ALGORITHMS`. Raises :class:`ValueError` if there is none of that name."""
    if name not in ALGORITHMS:
        raise ValueError(f"{name!r} is not an algorithm: one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


class _Enough(Exception):
    """As much has happened as was asked for."""


def _build(
    cluster: ClusterModel,
    algorithm: Algorithm,
    megabytes: float,
    speeds: Sampler,
    on_merge: Callable[[int, Entry], None],
) -> VirtualCluster:
    """The cluster, about to begin; it goes on for ever."""
    batches = _Batches(cluster)

    def program(rank: int) -> Program:
        leaves = speeds.leaves(rank)
        if algorithm.dynamic:
            while virtual.now < leaves:
                samples = batches.of(virtual.ranks[rank].engine.ledger.rounds, virtual.entries)[rank]
                yield Compute(samples, speeds.seconds(rank, samples, virtual.now))
        yield Stream(cluster.samples, speeds.ranks[rank].until, leaves)
        while True:
            yield Starve()

    engines = [
        Engine(
            cluster.size,
            algorithm.clock(cluster.size),
            rank=rank,
            delay=algorithm.delay,
            max_staleness=algorithm.max_staleness,
        )
        for rank in range(cluster.size)
    ]
    exchange = exchange_seconds(cluster, algorithm, megabytes)
    virtual = VirtualCluster(
        engines,
        [program(rank) for rank in range(cluster.size)],
        lambda _: exchange,
        on_merge=on_merge,
        merge_seconds=cluster.merge_seconds,
        tick_seconds=0.0,
        max_events=1 << 60,
    )
    return virtual


class _Batches:
    """Dynamic batches of all ranks, shared out anew after every :data:`EPOCH` rounds."""

    def __init__(self, cluster: ClusterModel) -> None:
        self._by_epoch = [[cluster.samples] * cluster.size]

    def of(self, round: int, entries: Sequence[Entry]) -> list[int]:
        """In this round, before which all entries are known."""
        epoch = round // EPOCH
        if epoch == len(self._by_epoch):
            last = entries[round - EPOCH : round]
            seconds = np.mean([entry.column(Column.COMPUTE_SECONDS) for entry in last], axis=0)
            self._by_epoch.append(dynamic_batches(self._by_epoch[-1], seconds))
        return self._by_epoch[epoch]


def _summary(algorithm: str, merged: list[tuple[float, Entry]], speeds: Sampler, seconds: float) -> Simulated:
    merged = [(at, entry) for at, entry in merged if entry.weight > 0]
    if not merged:
        raise ValueError(f"in {seconds:g} virtual seconds no exchange was merged: simulate more of them")
    last = merged[-1][0]
    batches = np.array([entry.weight for _, entry in merged])
    computed, waited, counts = (
        np.mean([entry.column(column) for _, entry in merged], axis=0)
        for column in (Column.COMPUTE_SECONDS, Column.WAIT_SECONDS, Column.MICRO_BATCHES)
    )
    return Simulated(
        algorithm,
        rounds=len(merged),
        seconds=last,
        samples_per_second=float(batches.sum()) / last,
        ideal=speeds.ideal(0.0, last),
        idle=tuple((waited / (computed + waited)).tolist()),
        batch=float(batches.mean()),
        batch_deviation=float(batches.std()),
        staleness=float(counts.mean()) * ALGORITHMS[algorithm].delay,
    )


def exchange_seconds(cluster: ClusterModel, algorithm: Algorithm, megabytes: float) -> float:
    """From the last launch until all have the sum.

    What fits into the slowest rank's backward pass is hidden where the algorithm overlaps both, and the network does.
    """
    whole = cluster.network.allreduce_seconds(megabytes, cluster.size)
    if not (algorithm.overlaps and cluster.network.overlap):
        return whole
    slowest = max(rank.mean_seconds(cluster.samples) for rank in cluster.ranks)
    return max(whole - BACKWARD * slowest, 0.0)
