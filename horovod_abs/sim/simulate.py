"""What a cluster would do under several algorithms: timing only, by the production engine, in virtual time.

    result = simulate(cluster, "abs", megabytes=44.0)
    result.samples_per_second, result.share_of_ideal

Nothing is trained, so nothing is said of how many samples an accuracy takes: that depends on the batch, on the delay
and on the learning rate. ``horovod-abs bench convergence`` measures it. :mod:`horovod_abs.plan.comparison`
shows results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np

from horovod_abs.core.clocks import Clock, CountClock, SyncClock
from horovod_abs.core.engine import Engine
from horovod_abs.core.ledger import Column, Entry
from horovod_abs.sim.baselines import ProportionalSteps, SharedBatches, by_epoch, by_steering
from horovod_abs.sim.cluster import Compute, Program, Starve, Stream, VirtualCluster
from horovod_abs.sim.eager import EagerSGD
from horovod_abs.sim.models import ClusterModel, Sampler
from horovod_abs.sim.servers import (
    BACKWARD,
    AsynchronousSGD,
    BackupWorkers,
    DynamicStaleSynchronous,
    Nothing,
    StaleSynchronous,
    Strategy,
)

LOCAL_STEPS = 8
"""Micro-batches between two averages of local SGD."""
EPOCH = 50
"""Rounds after which dynamic batches are shared out anew."""


@dataclass(frozen=True)
class Algorithm:
    """How ranks work together: on the engine by default.

    Attributes:
        title: For people.
        clock: When a round ends, for a cluster of so many ranks.
        delay: Rounds until a round's result is applied.
        max_staleness: Micro-batches that may be missing from the model; ``None`` for no bound.
        overlaps: Whether exchanges begin in the backward pass, as Horovod's do.
        batches: Of sizes that change, one a rank and round.
        strategy: In place of the engine, a strategy of workers of these speeds, whose exchange takes so many seconds,
            and may begin in the backward pass or not.
        sharded: Whether the server of such a strategy, if it has one, is spread over the workers.
        ours: Whether it is one of this package.
    """

    title: str
    clock: Callable[[int], Clock] = lambda _: CountClock(1)
    delay: int = 0
    max_staleness: int | None = None
    overlaps: bool = False
    batches: Callable[[ClusterModel], SharedBatches] | None = None
    strategy: Callable[[Sampler, float, bool], Strategy] | None = None
    sharded: bool = True
    ours: bool = False


def _server(kind: Callable[..., Strategy], **options: bool) -> Callable[[Sampler, float, bool], Strategy]:
    return lambda speeds, seconds, overlap: kind(speeds, seconds / 2, Nothing(), overlap=overlap, **options)


def _eager(trigger: Literal["solo", "majority"]) -> Callable[[Sampler, float, bool], Strategy]:
    return lambda speeds, seconds, overlap: EagerSGD(speeds, seconds, Nothing(), trigger=trigger, overlap=overlap)


def _steered(cluster: ClusterModel) -> SharedBatches:
    return by_steering([cluster.mean_rate(rank) for rank in range(cluster.size)], cluster.samples * cluster.size)


ALGORITHMS: Mapping[str, Algorithm] = {
    "synchronous": Algorithm("synchronous Horovod", overlaps=True),
    "dynamic": Algorithm(
        "dynamic batches",
        overlaps=True,
        batches=lambda cluster: by_epoch(cluster.size, cluster.samples * cluster.size, EPOCH),
    ),
    "steered": Algorithm("steered batches", overlaps=True, batches=_steered),
    "backup": Algorithm("backup workers", strategy=_server(BackupWorkers)),
    "local": Algorithm(f"local SGD, H = {LOCAL_STEPS}", lambda _: CountClock(LOCAL_STEPS)),
    "proportional": Algorithm("local SGD by speed", lambda size: ProportionalSteps(LOCAL_STEPS, size)),
    "asynchronous": Algorithm("asynchronous SGD", strategy=_server(AsynchronousSGD)),
    "one-server": Algorithm("one server", strategy=_server(AsynchronousSGD, shared=True), sharded=False),
    "ssp": Algorithm("SSP, s = 3", strategy=_server(StaleSynchronous)),
    "dssp": Algorithm("DSSP, s = 3 to 15", strategy=_server(DynamicStaleSynchronous)),
    "eager-solo": Algorithm("eager-SGD, solo", strategy=_eager("solo")),
    "eager-majority": Algorithm("eager-SGD, majority", strategy=_eager("majority")),
    "abs": Algorithm("ABS-SGD", lambda _: SyncClock(), 1, ours=True),
    "updates": Algorithm("model updates", lambda _: SyncClock(), 1, max_staleness=64, ours=True),
}
"""By the names of the command line. Sources: :mod:`horovod_abs.sim.baselines`, :mod:`horovod_abs.sim.servers`,
:mod:`horovod_abs.sim.eager`, [ABS-SGD], [NoDelay].
"""


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
    speeds = cluster.sampler(seed)
    steps: list[tuple[float, float]] = []

    def stepped(now: float, samples: float) -> None:
        if now <= seconds:
            steps.append((now, samples))
            on_progress(min(max(len(steps) / rounds, now / seconds), 1.0))
        if now > seconds or len(steps) == rounds:
            raise _Enough

    run = _on_strategy if how.strategy else _on_engine
    idle, staleness = run(cluster, how, megabytes, speeds, seconds, stepped)
    steps = [(now, samples) for now, samples in steps if samples > 0]
    if not steps:
        raise ValueError(f"in {seconds:g} virtual seconds no exchange was merged: simulate more of them")
    last = steps[-1][0]
    batches = np.array([samples for _, samples in steps])
    return Simulated(
        algorithm,
        rounds=len(steps),
        seconds=last,
        samples_per_second=float(batches.sum()) / last,
        ideal=speeds.ideal(0.0, last),
        idle=idle,
        batch=float(batches.mean()),
        batch_deviation=float(batches.std()),
        staleness=staleness,
    )


def algorithm_named(name: str) -> Algorithm:
    """One of :data:`ALGORITHMS`. Raises :class:`ValueError` if there is none of that name."""
    if name not in ALGORITHMS:
        raise ValueError(f"{name!r} is not an algorithm: one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


class _Enough(Exception):
    """As much has happened as was asked for."""


_Waste = tuple[tuple[float, ...], float]
"""Idle share of each rank, and mean staleness."""


def _on_engine(
    cluster: ClusterModel,
    algorithm: Algorithm,
    megabytes: float,
    speeds: Sampler,
    seconds: float,
    stepped: Callable[[float, float], None],
) -> _Waste:
    merged: list[Entry] = []

    def on_merge(rank: int, entry: Entry) -> None:
        if rank == 0:
            if virtual.now <= seconds and entry.weight > 0:
                merged.append(entry)
            stepped(virtual.now, entry.weight)

    virtual = _build(cluster, algorithm, megabytes, speeds, on_merge)
    with suppress(_Enough):
        virtual.run()
    if not merged:
        return (), 0.0
    computed, waited, counts = (
        np.mean([entry.column(column) for entry in merged], axis=0)
        for column in (Column.COMPUTE_SECONDS, Column.WAIT_SECONDS, Column.MICRO_BATCHES)
    )
    return tuple((waited / (computed + waited)).tolist()), float(counts.mean()) * algorithm.delay


def _on_strategy(
    cluster: ClusterModel,
    algorithm: Algorithm,
    megabytes: float,
    speeds: Sampler,
    seconds: float,
    stepped: Callable[[float, float], None],
) -> _Waste:
    assert algorithm.strategy is not None
    network = cluster.network
    exchange = network.server_seconds(megabytes, cluster.size, sharded=algorithm.sharded)
    strategy = algorithm.strategy(speeds, exchange, network.overlap)
    before = 0.0

    def on_update() -> None:
        nonlocal before
        samples, before = strategy.samples - before, strategy.samples
        stepped(strategy.now, samples)

    strategy.on_update.append(on_update)
    with suppress(_Enough):
        strategy.run(seconds)
    end = min(strategy.now, seconds)
    return tuple(max(1 - computing / end, 0.0) for computing in strategy.computing), strategy.staleness


def _build(
    cluster: ClusterModel,
    algorithm: Algorithm,
    megabytes: float,
    speeds: Sampler,
    on_merge: Callable[[int, Entry], None],
) -> VirtualCluster:
    """The cluster, about to begin; it goes on for ever."""
    batches = algorithm.batches(cluster) if algorithm.batches else None

    def program(rank: int) -> Program:
        leaves = speeds.leaves(rank)
        if batches is not None:
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


def exchange_seconds(cluster: ClusterModel, algorithm: Algorithm, megabytes: float) -> float:
    """From the last launch until all have the sum.

    What fits into the slowest rank's backward pass is hidden where the algorithm overlaps both, and the network does.
    """
    whole = cluster.network.allreduce_seconds(megabytes, cluster.size)
    if not (algorithm.overlaps and cluster.network.overlap):
        return whole
    slowest = max(rank.mean_seconds(cluster.samples) for rank in cluster.ranks)
    return max(whole - BACKWARD * slowest, 0.0)
