"""Trains real models on many ranks in one process, in virtual time.

Driver, engine and payload of each rank are those of production; only what is between the ranks is not: the wire adds
tensors up in this process, and each exchange takes as long as it is said to take. Everything is deterministic::

    training = VirtualTraining(
        [VirtualRank(model, optimizer, gradients, seconds) for …],
        exchange=ModelUpdates(), clock=SyncClock(), exchange_seconds=lambda k: 0.1,
    )
    training.run(lambda rank: rank.micro_batches < 100)
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from horovod_abs.core.clocks import Clock
from horovod_abs.core.engine import Engine
from horovod_abs.core.scaling import Scaling
from horovod_abs.driver import Driver
from horovod_abs.torch.exchanges import Exchange, ModelUpdates
from horovod_abs.torch.gradients import GradientPayload
from horovod_abs.torch.payloads import Options
from horovod_abs.torch.updates import UpdatePayload


@dataclass
class VirtualRank:
    """One rank, before and during its training.

    Attributes:
        model: Its model, with the same parameters on every rank.
        optimizer: A plain optimizer of it.
        gradients: Computes the gradients of a micro-batch of the model, and says how many samples it has.
        seconds: How long the next micro-batch takes.
        micro_batches: How many it has computed.
        computing: Seconds that it has spent computing.
        waiting: Seconds that it has spent waiting, in mid-training.
        closing: Seconds that it has spent closing, at the end of each run.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    gradients: Callable[[], float]
    seconds: Callable[[], float]
    micro_batches: int = 0
    computing: float = 0.0
    waiting: float = 0.0
    closing: float = 0.0
    driver: Driver = field(init=False)
    payload: GradientPayload | UpdatePayload = field(init=False)


class VirtualTraining:
    """Trains all ranks.

    Args:
        ranks: What each of them has.
        exchange: What is averaged.
        clock: When a round ends.
        exchange_seconds: How long exchange k takes, from its last launch until it is complete.
        options: How gradients are accumulated, sent and applied.
        min_micro_batches, max_micro_batches: As of ``DistributedOptimizer``.
        update_payload: The payload of model updates; for tests.

    Attributes:
        now: Virtual seconds.
    """

    def __init__(
        self,
        ranks: Sequence[VirtualRank],
        exchange: Exchange,
        clock: Clock,
        exchange_seconds: Callable[[int], float],
        *,
        options: Options | None = None,
        min_micro_batches: int = 1,
        max_micro_batches: int = 64,
        update_payload: type[UpdatePayload] = UpdatePayload,
    ) -> None:
        self.ranks = list(ranks)
        self.now = 0.0
        self._exchange_seconds = exchange_seconds
        self._exchanges: list[_Exchange] = []
        self._events: list[tuple[float, int, Iterator[float | None]]] = []
        self._waiting: list[Iterator[float | None]] = []
        self._order = itertools.count()
        for number, rank in enumerate(self.ranks):
            wire = _Wire(self, number)
            options = options or Options(Scaling())
            given = (rank.optimizer, rank.optimizer.step, wire, "virtual")
            if isinstance(exchange, ModelUpdates):
                rank.payload = update_payload(*given, exchange, options)
            else:
                rank.payload = GradientPayload(*given, exchange, options)
            engine = Engine(
                len(self.ranks),
                clock,
                rank=number,
                delay=exchange.delay,
                min_micro_batches=min_micro_batches,
                max_micro_batches=max_micro_batches,
                max_staleness=exchange.max_staleness,
            )
            rank.driver = _Driver(
                engine, rank.payload, rank=number, exchange_timeout=math.inf, seconds=lambda: self.now
            )

    def run(self, goes_on: Callable[[VirtualRank], bool]) -> None:
        """Train until every rank has closed.

        Args:
            goes_on: Whether a rank computes another micro-batch; asked at each boundary. One that does not closes.

        Raises:
            RuntimeError: all ranks wait, and nothing will happen.
        """
        for rank in self.ranks:
            self._go_on(self._program(rank, goes_on))
        while self._events:
            self.now, _, program = heapq.heappop(self._events)
            self._go_on(program)
        if self._waiting:
            raise RuntimeError(f"{len(self._waiting)} ranks wait for what will never happen")

    @property
    def samples(self) -> float:
        """Samples that have entered the model."""
        return float(self.ranks[0].driver.engine.ledger.weight.sum())

    # -- the ranks' programs ---------------------------------------------------------------------------------------

    def _program(self, rank: VirtualRank, goes_on: Callable[[VirtualRank], bool]) -> Iterator[float | None]:
        """What a rank does: yields seconds to pass, or ``None`` to wait for an exchange."""
        while goes_on(rank):
            seconds = rank.seconds()
            yield seconds
            samples = rank.gradients()
            rank.micro_batches += 1
            rank.computing += seconds
            if samples:
                rank.payload.accumulate(samples)
            rank.waiting += yield from self._drive(rank, rank.driver.micro_batch_done, samples, seconds)
        rank.closing += yield from self._drive(rank, rank.driver.close)

    def _drive(
        self, rank: VirtualRank, action: Callable[..., object], *arguments: float
    ) -> Generator[float | None, None, float]:
        """Do it, and whatever the engine asks for then; returns the seconds waited."""
        waited = 0.0
        while True:
            try:
                action(*arguments)
                return waited
            except _Waits:
                began = self.now
                yield None
                rank.driver.engine.waited(self.now - began)
                waited += self.now - began
                action, arguments = rank.driver.boundary, ()

    def _go_on(self, program: Iterator[float | None]) -> None:
        for seconds in program:
            if seconds is None:
                self._waiting.append(program)
            else:
                heapq.heappush(self._events, (self.now + seconds, next(self._order), program))
            break

    # -- exchanges -------------------------------------------------------------------------------------------------

    def _join(self, rank: int, number: int, tensors: list[torch.Tensor]) -> None:
        """A rank launches exchange ``number``; the last one to do so starts it."""
        if number == len(self._exchanges):
            self._exchanges.append(_Exchange(len(self.ranks)))
        exchange = self._exchanges[number]
        exchange.given[rank] = tensors
        if all(given is not None for given in exchange.given):
            exchange.add_up()
            exchange.done = self.now + self._exchange_seconds(number)
            heapq.heappush(self._events, (exchange.done, next(self._order), self._wake()))

    def _wake(self) -> Iterator[float | None]:
        """An exchange is complete: those who wait look."""
        waiting, self._waiting = self._waiting, []
        for program in waiting:
            self._go_on(program)
        yield from ()


class _Waits(Exception):
    """A rank must wait for an exchange."""


class _Driver(Driver):
    def _wait(self) -> None:
        raise _Waits


@dataclass
class _Exchange:
    size: int
    done: float = math.inf
    given: list[list[torch.Tensor] | None] = field(init=False)
    sums: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.given = [None] * self.size

    def add_up(self) -> None:
        by_rank = [given for given in self.given if given is not None]
        self.sums = [tensor.clone() for tensor in by_rank[0]]
        for given in by_rank[1:]:
            torch._foreach_add_(self.sums, given)

    def deliver(self, rank: int) -> None:
        tensors, self.given[rank] = self.given[rank], None
        torch._foreach_copy_(tensors or [], self.sums)
        if all(given is None for given in self.given):
            self.sums = []


class _Wire:
    """One rank's end of the wire."""

    takes_threads = False

    def __init__(self, training: VirtualTraining, rank: int) -> None:
        self.rank = rank
        self.size = len(training.ranks)
        self._training = training
        self._launched = 0

    def sum_(self, tensors: list[torch.Tensor], name: str) -> int:
        self._training._join(self.rank, self._launched, tensors)
        self._launched += 1
        return self._launched - 1

    def poll(self, handle: int) -> bool:
        return self._training._exchanges[handle].done <= self._training.now

    def finish(self, handle: int) -> None:
        self._training._exchanges[handle].deliver(self.rank)

    def broadcast_(self, tensors: list[torch.Tensor], name: str) -> None:
        raise RuntimeError("the virtual ranks' parameters have drifted apart: give all the same")

    def gather(self, values: list[int], name: str) -> list[list[int]]:
        raise NotImplementedError
