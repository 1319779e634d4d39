"""The ways of training that are compared: ours, and those of the papers, each on a virtual cluster with a real model.

Ours run as they do in production: driver, engine, clocks and payloads are the same. So do synchronous SGD, dynamic
batches and local SGD, as rules on that engine (:mod:`horovod_abs.sim.baselines`). The asynchronous ones have a
simulator of their own (:mod:`horovod_abs.sim.servers`, :mod:`horovod_abs.sim.eager`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import nn

from horovod_abs.bench.learners import Central, Replicated
from horovod_abs.bench.tasks import Batches, Task
from horovod_abs.bench.variants import ErrorFeedback, Muon
from horovod_abs.bench.virtual import VirtualRank, VirtualTraining
from horovod_abs.core.clocks import Clock, CountClock, SyncClock
from horovod_abs.core.ledger import Entry, Ledger
from horovod_abs.exchanges import Exchange, Gradients, ModelUpdates
from horovod_abs.sim.baselines import ProportionalSteps, SharedBatches, by_epoch, by_steering
from horovod_abs.sim.eager import EagerSGD
from horovod_abs.sim.models import ClusterModel, Sampler
from horovod_abs.sim.network import Measured
from horovod_abs.sim.servers import (
    BACKWARD,
    AsynchronousSGD,
    BackupWorkers,
    DynamicStaleSynchronous,
    StaleSynchronous,
    Strategy,
)
from horovod_abs.sim.speeds import Cost, RankModel

P = functools.partial


class Trial(NamedTuple):
    """What is tuned.

    Attributes:
        rate: Learning rate.
        momentum: Of SGD.
        steps: Micro-batches of each rank in a round, where the algorithm has such a number.
    """

    rate: float
    momentum: float
    steps: int


class Training(Protocol):
    """A run that is about to begin."""

    @property
    def now(self) -> float:
        """Virtual seconds."""

    @property
    def samples(self) -> float:
        """That have entered the model."""

    def schedule(self, rate: Callable[[float], float]) -> None:
        """Have all optimizers' learning rate follow the samples that have entered the model."""

    def accuracy(self, of: Callable[[nn.Module], float]) -> float:
        """Of the central model."""

    def go(self, until: float, on_update: Callable[[], None]) -> None:
        """Train; ``on_update`` is called whenever the central model has changed."""


class Made(NamedTuple):
    """What a run is made of."""

    task: Task
    cluster: ClusterModel
    exchange: float
    trial: Trial
    seed: int
    train_set: Any
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return self.task.model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.kind(
            model.parameters(), self.trial.rate, momentum=self.trial.momentum, weight_decay=self.task.weight_decay
        )


@dataclass(frozen=True)
class Algorithm:
    """A way of training.

    Attributes:
        title: For people.
        make: Makes a run.
        source: Of the definition.
        steps: The number of micro-batches in a round that the search begins with; ``None`` if there is no such number.
        ours: Whether it is one of this package.
        paper: Whether [ABS-SGD] compares with it or builds on it.
        variant: Whether it is a variant that was tried once, and takes part only if it is named.
    """

    title: str
    make: Callable[[Made], Training]
    source: str
    steps: int | None = None
    ours: bool = False
    paper: bool = True
    variant: bool = False


# -- on the engine ---------------------------------------------------------------------------------------------------


MOST = 1024
"""Micro-batches of a rank in a round, where the algorithm says how many."""


class _OnEngine:
    """Ranks that run the production engine.

    Args:
        made: What the run is made of.
        exchange: What is averaged.
        clock: When a round ends.
        overlap: Whether the backward pass hides what it can of an exchange, from when all ranks are in their last one.
        batches: Of the ranks in each round, a micro-batch each; by default micro-batches are as the cluster's.
    """

    def __init__(
        self,
        made: Made,
        exchange: Exchange,
        clock: Clock,
        *,
        overlap: bool = False,
        batches: SharedBatches | None = None,
    ) -> None:
        first, data = made.model(), Batches(made.train_set, made.seed)
        speeds = made.cluster.sampler(made.seed)
        backward = [0.0] * made.cluster.size
        self._entries: list[Entry] = []

        def rank(number: int) -> VirtualRank:
            model = copy.deepcopy(first)
            samples = made.cluster.samples

            def seconds() -> float:
                nonlocal samples
                if batches is not None:
                    samples = batches.of(self._virtual.ranks[number].driver.engine.ledger.rounds, self._entries)[number]
                taken = speeds.seconds(number, samples, self._virtual.now)
                backward[number] = self._virtual.now + (1 - BACKWARD) * taken
                return taken

            return VirtualRank(model, made.optimizer(model), lambda: data.gradients(model, samples), seconds)

        def exchange_seconds(_: int) -> float:
            hidden = self._virtual.now - max(backward) if overlap else 0.0
            return max(made.exchange - hidden, 0.0)

        self._virtual = VirtualTraining(
            [rank(number) for number in range(made.cluster.size)],
            exchange,
            clock,
            exchange_seconds,
            max_micro_batches=MOST,
        )

    @property
    def now(self) -> float:
        return self._virtual.now

    @property
    def samples(self) -> float:
        return self._virtual.samples

    def schedule(self, rate: Callable[[float], float]) -> None:
        for rank in self._virtual.ranks:

            def follow(rank: VirtualRank = rank) -> None:  # each at its own merge, as production asks for
                _set_rate(rank.optimizer, rate(float(rank.driver.engine.ledger.weight.sum())))

            rank.driver.on_merge.append(follow)
            follow()

    def accuracy(self, of: Callable[[nn.Module], float]) -> float:
        with self._virtual.ranks[0].payload.authoritative():
            return of(self._virtual.ranks[0].model)

    def go(self, until: float, on_update: Callable[[], None]) -> None:
        for rank in self._virtual.ranks:
            rank.driver.on_merge.append(functools.partial(self._merged, rank.driver.engine.ledger))
        self._virtual.ranks[0].driver.on_merge.append(on_update)
        self._virtual.run(lambda rank: self._virtual.now < until)

    def _merged(self, ledger: Ledger) -> None:
        if ledger.rounds > len(self._entries):  # the first rank to merge it
            self._entries.append(ledger.recent[-1])


@dataclass(frozen=True, repr=False)
class _LocalSGD(ModelUpdates):
    """Model updates for which all wait."""

    delay: ClassVar[int] = 0


def _synchronous(made: Made) -> Training:
    return _OnEngine(made, Gradients(delay=0), CountClock(made.trial.steps), overlap=True)


def _dynamic(made: Made) -> Training:
    """Shared out anew at each epoch's end."""
    total = made.trial.steps * made.cluster.samples * made.cluster.size
    return _shared_out(made, by_epoch(made.cluster.size, total, max(len(made.train_set) // total, 1)))


def _steered(made: Made) -> Training:
    total = made.trial.steps * made.cluster.samples * made.cluster.size
    return _shared_out(made, by_steering([made.cluster.mean_rate(rank) for rank in range(made.cluster.size)], total))


def _shared_out(made: Made, batches: SharedBatches) -> Training:
    return _OnEngine(made, Gradients(delay=0), CountClock(1), overlap=True, batches=batches)


def _local(made: Made) -> Training:
    return _OnEngine(made, _LocalSGD(MOST, "workers"), CountClock(made.trial.steps))


def _proportional(made: Made, weighting: Literal["samples", "workers"] = "samples") -> Training:
    return _OnEngine(made, _LocalSGD(MOST, weighting), ProportionalSteps(made.trial.steps, made.cluster.size))


def _ours(exchange: Exchange, made: Made) -> Training:
    return _OnEngine(made, exchange, SyncClock())


def _cycles(made: Made) -> Training:
    return _OnEngine(made, ModelUpdates(2 * made.trial.steps, "workers"), CountClock(made.trial.steps))


# -- asynchronous ----------------------------------------------------------------------------------------------------


class _OnStrategy:
    """Workers of one of the strategies that have a simulator of their own."""

    def __init__(self, strategy: Strategy, learner: Central | Replicated) -> None:
        self._strategy = strategy
        self._learner = learner

    @property
    def now(self) -> float:
        return self._strategy.now

    @property
    def samples(self) -> float:
        return self._strategy.samples

    def schedule(self, rate: Callable[[float], float]) -> None:
        def follow() -> None:
            for optimizer in self._learner.optimizers:
                _set_rate(optimizer, rate(self._strategy.samples))

        self._strategy.on_update.append(follow)
        follow()

    def accuracy(self, of: Callable[[nn.Module], float]) -> float:
        return of(self._learner.model)

    def go(self, until: float, on_update: Callable[[], None]) -> None:
        self._strategy.on_update.append(on_update)
        self._strategy.run(until)


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _gradients(made: Made) -> Callable[[nn.Module], float]:
    batches = Batches(made.train_set, made.seed)
    return lambda model: batches.gradients(model, made.cluster.samples)


def _server(strategy: Callable[[Sampler, float, Central], Strategy], made: Made, **compensation: Any) -> Training:
    """The server is sharded over the workers: to push and to pull takes as long together as an allreduce in a ring."""
    learner = Central(made.model(), made.cluster.size, _gradients(made), made.optimizer, **compensation)
    return _OnStrategy(strategy(made.cluster.sampler(made.seed), made.exchange / 2, learner), learner)


def _one_server(made: Made) -> Training:
    """The whole model over one link, which serves one worker after the other."""
    size = made.cluster.size
    whole = made._replace(exchange=made.exchange * size / (size - 1))
    return _server(P(AsynchronousSGD, shared=True), whole)


def _eager(trigger: Any, made: Made) -> Training:
    learner = Replicated(made.model(), made.cluster.size, _gradients(made), made.optimizer)
    strategy = EagerSGD(made.cluster.sampler(made.seed), made.exchange, learner, trigger=trigger, seed=made.seed)
    return _OnStrategy(strategy, learner)


def ideal(cluster: ClusterModel) -> ClusterModel:
    """One worker as quick as all of this cluster's together."""
    cost = Cost(0.0, 1 / cluster.ideal)
    return replace(cluster, name="ideal", ranks=(RankModel(cost),), network=Measured(0.0), merge_seconds=0.0)


def _with(kind: Callable[..., torch.optim.Optimizer], make: Callable[[Made], Training], made: Made) -> Training:
    return make(made._replace(kind=kind))


def _on_ideal(made: Made) -> Training:
    return _synchronous(made._replace(cluster=ideal(made.cluster), exchange=0.0))


def _outer(rate: float, momentum: float, weighting: Literal["samples", "workers"], made: Made) -> Training:
    outer = P(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=True)
    return _ours(ModelUpdates(64, weighting, outer=outer), made)


def _variant(title: str, make: Callable[[Made], Training], source: str = "") -> Algorithm:
    return Algorithm(title, make, source, ours=True, paper=False, variant=True)


ALGORITHMS: Mapping[str, Algorithm] = {
    "ideal": Algorithm("the ideal machine", _synchronous, "", steps=4, paper=False),
    "synchronous": Algorithm("synchronous SGD", _synchronous, "Goyal et al., arXiv 1706.02677", steps=1),
    "dynamic": Algorithm("dynamic batches (DBS)", _dynamic, "Ye et al., arXiv 2007.11831", steps=1),
    "steered": Algorithm("dynamic batching, steered", _steered, "Tyagi and Sharma, arXiv 2305.12213", steps=1),
    "backup": Algorithm("backup workers, 3 + 1", P(_server, BackupWorkers), "Chen et al., arXiv 1604.00981"),
    "local": Algorithm("local SGD", _local, "Stich, arXiv 1805.09767", steps=8),
    "proportional": Algorithm("local SGD by speed", _proportional, "as local SGD", steps=8, paper=False),
    "asynchronous": Algorithm("asynchronous SGD", P(_server, AsynchronousSGD), "Lian et al., arXiv 1506.08272"),
    "one-server": Algorithm("asynchronous SGD, one server", _one_server, "as asynchronous SGD"),
    "dc": Algorithm(
        "DC-ASGD, constant λ",
        lambda made: _server(AsynchronousSGD, made, compensation="constant", strength=0.04),
        "Zheng et al., arXiv 1609.08326",
    ),
    "dc-adaptive": Algorithm(
        "DC-ASGD, adaptive λ",
        lambda made: _server(AsynchronousSGD, made, compensation="adaptive", strength=2.0),
        "Zheng et al., arXiv 1609.08326",
    ),
    "ssp": Algorithm("SSP, s = 3", P(_server, StaleSynchronous), "Ho et al., NIPS 2013", paper=False),
    "dssp": Algorithm("DSSP, s = 3 to 15", P(_server, DynamicStaleSynchronous), "Zhao et al., arXiv 1908.11848"),
    "eager-solo": Algorithm("eager-SGD, solo", P(_eager, "solo"), "Li et al., arXiv 1908.04207"),
    "eager-majority": Algorithm("eager-SGD, majority", P(_eager, "majority"), "Li et al., arXiv 1908.04207"),
    "abs": Algorithm("ABS-SGD as published", P(_ours, Gradients()), "Zhou et al., arXiv 2308.15164", ours=True),
    "taylor": Algorithm("ABS-SGD, taylor", P(_ours, Gradients(staleness="taylor")), "", ours=True),
    "lookahead": Algorithm("ABS-SGD, lookahead", P(_ours, Gradients(staleness="lookahead")), "", ours=True),
    "cycles": Algorithm("model updates, algorithm 2", _cycles, "Talyansky et al., 2019", steps=8, ours=True),
    "updates": Algorithm("model updates, SyncClock", P(_ours, ModelUpdates(64)), "both papers", ours=True),
    # tried beside them, and only if named
    "workers": _variant("updates, equal weights", P(_ours, ModelUpdates(64, "workers"))),
    "state": _variant("updates, mean momentum", P(_ours, ModelUpdates(64, average_state=True))),
    "outer-0.3": _variant("updates, outer 1, 0.3", P(_outer, 1.0, 0.3, "samples")),
    "outer-0.6": _variant("updates, outer 0.7, 0.6", P(_outer, 0.7, 0.6, "samples")),
    "outer-0.9": _variant("updates, outer 0.7, 0.9", P(_outer, 0.7, 0.9, "samples"), "arXiv 2502.12996"),
    "workers-outer": _variant("equal weights, outer 0.7, 0.6", P(_outer, 0.7, 0.6, "workers")),
    "feedback": _variant("ABS-SGD, error feedback", P(_with, ErrorFeedback, P(_ours, Gradients())), "arXiv 2606.30634"),
    "muon": _variant("ABS-SGD, Muon", P(_with, Muon, P(_ours, Gradients()))),
    "updates-muon": _variant("updates, Muon", P(_with, Muon, P(_ours, ModelUpdates(64)))),
    "workers-muon": _variant("equal weights, Muon", P(_with, Muon, P(_ours, ModelUpdates(64, "workers")))),
    "proportional-workers": replace(
        _variant("local SGD by speed, equal weights", P(_proportional, weighting="workers")), steps=8, ours=False
    ),
    "proportional-muon": replace(
        _variant("local SGD by speed, Muon", P(_with, Muon, _proportional)), steps=8, ours=False
    ),
    "ideal-muon": replace(_variant("the ideal machine, Muon", P(_with, Muon, _on_ideal)), steps=4),
}
"""By name. The ideal machine is no algorithm but the limit: one worker as quick as all together, and no exchange."""
