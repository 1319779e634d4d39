"""eager-SGD, in virtual time: the allreduce begins without those who are late."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np

from horovod_abs.sim.models import Sampler
from horovod_abs.sim.servers import Process, Strategy


class Replicas(Protocol):
    """A model and an optimizer on each worker, and the buffer that its gradients are added to."""

    def compute(self, rank: int) -> None:
        """Add the gradient of the worker's next micro-batch to its buffer."""

    def collect(self) -> Any:
        """The sum of all buffers divided by their number; they are empty then."""

    def apply(self, rank: int, gradient: Any) -> None:
        """The worker's optimizer does a step with it."""

    def average(self) -> None:
        """All models become their mean."""


class EagerSGD(Strategy):
    """Partial allreduces: whoever triggers one takes along what the others' buffers hold, be it nothing or stale.

    A worker that comes late finds the last result, takes it and goes on; what it has missed before that is lost to it,
    and its own gradient goes into the next sum. So models drift apart, and are averaged from time to time; for that all
    wait.

    Args:
        speeds: Of the workers.
        exchange: Seconds of an allreduce.
        replicas: What is trained.
        trigger: ``solo``: the first that arrives; ``majority``: one chosen at random for each allreduce.
        average_every: Allreduces between two averages of the models.
        seed: Of the choice.
        overlap: As of :class:`horovod_abs.sim.servers.Strategy`; of whoever triggers.

    References:
        Li et al., "Taming unbalanced training workloads in deep learning with partial collective operations",
        arXiv 1908.04207, section 4.
    """

    def __init__(
        self,
        speeds: Sampler,
        exchange: float,
        replicas: Replicas,
        *,
        trigger: Literal["solo", "majority"] = "solo",
        average_every: int = 250,
        seed: int = 0,
        overlap: bool = True,
    ) -> None:
        super().__init__(speeds, overlap=overlap)
        self.replicas = replicas
        self._exchange = exchange
        self._trigger = trigger
        self._every = average_every
        self._random = np.random.default_rng(seed)
        self._members = list(range(self.size))
        self._initiator = self._choose()
        self._begun = self._done = self._averaged = 0
        self._latest: Any = None
        self._pending: list[int] = []  # of each micro-batch in the buffers, the allreduces begun when its rank began it
        self._met = 0  # workers that wait for the models' mean

    def _worker(self, rank: int) -> Process:
        taken = averaged = 0
        leaves, merge_seconds = self.speeds.leaves(rank), self.speeds.cluster.merge_seconds
        while self.now < leaves:
            seconds = self._compute_seconds(rank)
            begun = self._begun
            yield seconds
            self.replicas.compute(rank)
            self._pending.append(begun)
            while self._done == taken:
                if self._begun == taken and self._trigger_of(rank):
                    yield from self._allreduce(self._backward * seconds)
                else:
                    yield None
            taken, latest = self._done, self._latest
            if merge_seconds:
                yield merge_seconds
            self.replicas.apply(rank, latest)
            if taken // self._every > averaged:
                averaged = taken // self._every
                yield from self._meet(averaged)
        self._members.remove(rank)
        if rank == self._initiator and self._members:
            self._initiator = self._choose()
        self._happened()

    def _trigger_of(self, rank: int) -> bool:
        return self._trigger == "solo" or rank == self._initiator

    def _allreduce(self, hidden: float) -> Process:
        gradient, pending = self.replicas.collect(), self._pending
        self._pending = []
        self._gradients += len(pending)
        self._ages += sum(self._begun - begun for begun in pending)
        self._begun += 1
        yield max(self._exchange - hidden, 0.0)
        self._latest = gradient
        self._done += 1
        self._initiator = self._choose()
        self._updated(len(pending) * self.speeds.cluster.samples)
        self._happened()

    def _meet(self, number: int) -> Process:
        """Wait for all, and average the models."""
        self._met += 1
        while self._averaged < number:
            if self._met == len(self._members):
                self._met = 0
                yield self._exchange
                self.replicas.average()
                self._averaged = number
                self._happened()
            else:
                yield None

    def _choose(self) -> int:
        return self._members[int(self._random.integers(len(self._members)))]
