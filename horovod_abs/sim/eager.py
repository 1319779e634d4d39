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
        self._initiator = self._choose()
        self._begun = self._done = self._averaged = 0
        self._latest: Any = None
        self._pending = 0  # micro-batches in the buffers
        self._at_average = 0

    def _worker(self, rank: int) -> Process:
        taken = averaged = 0
        while True:
            seconds = self._compute_seconds(rank)
            yield seconds
            self.replicas.compute(rank)
            self._pending += 1
            while self._done == taken:
                if self._begun == taken and self._trigger_of(rank):
                    yield from self._allreduce(self._backward * seconds)
                else:
                    yield None
            taken = self._done
            self.replicas.apply(rank, self._latest)
            if taken // self._every > averaged:
                averaged = taken // self._every
                yield from self._meet(averaged)

    def _trigger_of(self, rank: int) -> bool:
        return self._trigger == "solo" or rank == self._initiator

    def _allreduce(self, hidden: float) -> Process:
        self._begun += 1
        gradient, micro_batches = self.replicas.collect(), self._pending
        self._pending = 0
        yield max(self._exchange - hidden, 0.0)
        self._latest = gradient
        self._done += 1
        self._initiator = self._choose()
        self._updated(micro_batches * self.speeds.cluster.samples)
        self._happened()

    def _meet(self, number: int) -> Process:
        """Wait for all, and average the models."""
        self._at_average += 1
        if self._at_average == self.size * number:
            yield self._exchange
            self.replicas.average()
            self._averaged = number
            self._happened()
        while self._averaged < number:
            yield None

    def _choose(self) -> int:
        return int(self._random.integers(self.size))
