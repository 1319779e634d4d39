"""Workers and a parameter server, in virtual time: the asynchronous baselines, and synchronous SGD with backup workers.

Each strategy is a rule for when a worker may start, and for what the server does with a gradient that has arrived. What
is trained is the caller's (:class:`Learner`): a real model, or nothing where only time matters. A worker pulls the
model, computes one micro-batch and pushes its gradient; the push begins with the backward pass, as in synchronous
training, and ends no sooner than that pass.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator
from typing import Protocol

from horovod_abs.sim.models import Sampler

BACKWARD = 2 / 3
"""Share of the backward pass in a micro-batch's time."""

Process = Generator[float | None, None, None]
"""What a worker does: yields seconds to pass, or ``None`` to wait until something has happened."""


class Learner(Protocol):
    """A central model, and a copy of it on each worker."""

    def pull(self, rank: int) -> None:
        """The worker's copy becomes the central model."""

    def compute(self, rank: int) -> None:
        """The gradient of the worker's next micro-batch, at its copy."""

    def give(self, rank: int) -> None:
        """The server adds up the worker's gradient."""

    def update(self, count: int) -> None:
        """The server's optimizer does a step with what was added up, divided by ``count``."""


class Nothing:
    """A learner that learns nothing, where only time matters."""

    def pull(self, rank: int) -> None:
        pass

    def compute(self, rank: int) -> None:
        pass

    def give(self, rank: int) -> None:
        pass

    def update(self, count: int) -> None:
        pass

    def collect(self) -> None:
        pass

    def apply(self, rank: int, gradient: object) -> None:
        pass

    def average(self) -> None:
        pass


class Link:
    """The network to the server, in one direction.

    Args:
        seconds: Of one transfer, alone.
        shared: Whether one transfer waits for the other; otherwise, with a sharded server, each has a link of its own.
    """

    def __init__(self, seconds: float, *, shared: bool) -> None:
        self.seconds = seconds
        self._shared = shared
        self._free = 0.0

    def take(self, now: float) -> float:
        """When a transfer is over that begins now, or as soon as the link is free."""
        ends = (max(now, self._free) if self._shared else now) + self.seconds
        self._free = ends
        return ends


class Strategy(ABC):
    """Workers in virtual time.

    Args:
        speeds: Of the workers.
        overlap: Whether gradients are sent during the backward pass.

    Attributes:
        now: Virtual seconds.
        samples: That have entered the model.
        computing: Seconds that each worker has computed.
        staleness: Micro-batches of a worker that the model lacked, on average, at which a gradient was taken.
        on_update: Called, without arguments, whenever the model has changed.
    """

    def __init__(self, speeds: Sampler, *, overlap: bool = True) -> None:
        self.speeds = speeds
        self.now = 0.0
        self.samples = 0.0
        self.size = speeds.cluster.size
        self.computing = [0.0] * self.size
        self.on_update: list[Callable[[], None]] = []
        self._ages = self._gradients = 0
        self._backward = BACKWARD if overlap else 0.0
        self._events: list[tuple[float, int, Process]] = []
        self._waiting: list[Process] = []
        self._order = itertools.count()

    def run(self, until: float) -> None:
        """Let all workers work.

        Args:
            until: Virtual seconds; nothing that happens later is seen.

        Raises:
            RuntimeError: all workers wait, and nothing will happen.
        """
        for rank in range(self.size):
            heapq.heappush(self._events, (0.0, next(self._order), self._worker(rank)))
        while self._events:
            self.now, _, process = heapq.heappop(self._events)
            if self.now > until:
                return
            self._start(process)
        raise RuntimeError(f"{len(self._waiting)} workers wait for what will never happen")

    @property
    def staleness(self) -> float:
        return self._ages / max(self._gradients, 1)

    @abstractmethod
    def _worker(self, rank: int) -> Process:
        """What a worker does, for ever."""

    def _compute_seconds(self, rank: int) -> float:
        seconds = self.speeds.seconds(rank, self.speeds.cluster.samples, self.now)
        self.computing[rank] += seconds
        return seconds

    def _start(self, process: Process) -> None:
        for seconds in process:
            if seconds is None:
                self._waiting.append(process)
            else:
                heapq.heappush(self._events, (self.now + seconds, next(self._order), process))
            break

    def _happened(self) -> None:
        """Those who wait look again, at this moment."""
        waiting, self._waiting = self._waiting, []
        for process in waiting:
            heapq.heappush(self._events, (self.now, next(self._order), process))

    def _updated(self, samples: float) -> None:
        self.samples += samples
        for call in self.on_update:
            call()


class AsynchronousSGD(Strategy):
    """The server applies each gradient as it arrives; nobody waits for anybody.

    Args:
        speeds: Of the workers.
        transfer: Seconds in which the model, or a gradient, passes to or from the server.
        learner: What is trained.
        shared: Whether one server holds all and serves one worker after the other.
        overlap: As of :class:`Strategy`.

    References:
        Lian et al., "Asynchronous parallel stochastic gradient for nonconvex optimization", arXiv 1506.08272.
    """

    def __init__(
        self, speeds: Sampler, transfer: float, learner: Learner, *, shared: bool = False, overlap: bool = True
    ) -> None:
        super().__init__(speeds, overlap=overlap)
        self.learner = learner
        self.steps = [0] * self.size
        self.updates = 0
        self._has = [-1] * self.size  # how many updates were in each worker's model
        self._pushes, self._pulls = Link(transfer, shared=shared), Link(transfer, shared=shared)

    @property
    def staleness(self) -> float:
        return super().staleness / self.size

    def _worker(self, rank: int) -> Process:
        leaves = self.speeds.leaves(rank)
        while self.now < leaves:
            while not self._may_start(rank):
                yield None
            yield self._pulls.take(self.now) - self.now + self.speeds.cluster.merge_seconds
            self.learner.pull(rank)
            self._has[rank] = self.updates
            seconds = self._compute_seconds(rank)
            yield (1 - self._backward) * seconds
            ends = self.now + self._backward * seconds
            yield max(self._pushes.take(self.now), ends) - self.now
            self.learner.compute(rank)
            self.steps[rank] += 1
            self._arrived(rank)
        self._left(rank)

    def _may_start(self, rank: int) -> bool:
        return True

    def _arrived(self, rank: int) -> None:
        self._give(rank)
        self._update(1)

    def _left(self, rank: int) -> None:
        """The worker takes part no longer."""

    def _give(self, rank: int) -> None:
        self.learner.give(rank)
        self._gradients += 1
        self._ages += self.updates - self._has[rank]

    def _update(self, count: int) -> None:
        self.learner.update(count)
        self.updates += 1
        self._updated(count * self.speeds.cluster.samples)


class StaleSynchronous(AsynchronousSGD):
    """SSP: a worker starts step c only if it is at most ``bound`` steps ahead of the slowest.

    References:
        Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013.
    """

    bound = 3

    def __init__(self, speeds: Sampler, transfer: float, learner: Learner, **options: bool) -> None:
        super().__init__(speeds, transfer, learner, **options)
        self._least = 0
        self._done = Counter({0: self.size})  # workers, by their number of steps

    def _may_start(self, rank: int) -> bool:
        return self.steps[rank] - self._least <= self.bound

    def _arrived(self, rank: int) -> None:
        self._done[self.steps[rank] - 1] -= 1
        self._done[self.steps[rank]] += 1
        super()._arrived(rank)
        self._go_on()

    def _left(self, rank: int) -> None:
        self._done[self.steps[rank]] -= 1
        self._go_on()

    def _go_on(self) -> None:
        """The slowest may have moved."""
        before = self._least
        while not self._done[self._least] and any(self._done.values()):
            del self._done[self._least]
            self._least += 1
        if self._least > before:
            self._happened()


class DynamicStaleSynchronous(StaleSynchronous):
    """DSSP: past the lower bound the server grants extra steps, as many as make the predicted wait shortest.

    Of 0 to ``most − bound`` further steps it takes the number after which the worker, at its last pace, would wait the
    shortest for the slowest worker's next push, at that worker's last pace.

    References:
        Zhao et al., "Dynamic stale synchronous parallel distributed training for deep learning", arXiv 1908.11848.
    """

    most = 15

    def __init__(self, speeds: Sampler, transfer: float, learner: Learner, **options: bool) -> None:
        super().__init__(speeds, transfer, learner, **options)
        self._pushed = [[0.0, 0.0] for _ in range(self.size)]  # the last two moments
        self._granted = [0] * self.size

    def _arrived(self, rank: int) -> None:
        self._pushed[rank] = [self._pushed[rank][1], self.now]
        if self._granted[rank]:
            self._granted[rank] -= 1
        elif self.steps[rank] - self._least > self.bound:
            self._granted[rank] = self._grant(rank)
        super()._arrived(rank)

    def _may_start(self, rank: int) -> bool:
        ahead = self.steps[rank] - self._least
        return ahead <= self.bound or (self._granted[rank] > 0 and ahead <= self.most)

    def _grant(self, rank: int) -> int:
        slowest = self.steps.index(self._least)
        before, last = self._pushed[slowest]
        own_before, own_last = self._pushed[rank]
        pace, own = last - before, own_last - own_before
        if pace <= 0:
            return 0  # the slowest has not pushed yet: nothing to predict from

        def wait(extra: int) -> float:
            ready = own_last + extra * own
            pushes = max(-(-(ready - last) // pace), 1)
            return float(last + pushes * pace - ready)

        return min(range(self.most - self.bound + 1), key=wait)


class BackupWorkers(AsynchronousSGD):
    """Synchronous SGD that updates with the first gradients of each round; the others' are thrown away.

    Who comes late finishes its micro-batch, and then takes the fresh model.

    Args:
        spare: b, of N + b workers.

    References:
        Chen et al., "Revisiting distributed synchronous SGD", arXiv 1604.00981.
    """

    def __init__(
        self, speeds: Sampler, transfer: float, learner: Learner, *, spare: int = 1, overlap: bool = True
    ) -> None:
        super().__init__(speeds, transfer, learner, overlap=overlap)
        if not 0 <= spare < self.size:
            raise ValueError(f"of {self.size} workers at most {self.size - 1} can be spare, not {spare}")
        self._remaining = self.size
        self._needed = self.size - spare
        self._here = 0

    def _may_start(self, rank: int) -> bool:
        return self._has[rank] < self.updates

    def _arrived(self, rank: int) -> None:
        if self._has[rank] < self.updates:
            return
        self._give(rank)
        self._here += 1
        self._update_if_enough()

    def _left(self, rank: int) -> None:
        self._remaining -= 1
        self._needed = min(self._needed, self._remaining)
        self._update_if_enough()

    def _update_if_enough(self) -> None:
        if 0 < self._needed <= self._here:
            count, self._here = self._here, 0
            self._update(count)
            self._happened()
