"""Runs the engine of one rank against real time and a real exchange. Shared by the PyTorch and TensorFlow bindings.

The engine decides, the payload moves tensors, and the driver between them does as it is told: polls, waits, measures,
keeps the history, and turns what goes wrong into a message that names rank, cause and remedy.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from horovod_abs import shutdown
from horovod_abs.core.engine import Action, Engine
from horovod_abs.core.ledger import Column, Entry, Flag, Floats, Ledger
from horovod_abs.errors import ExchangeTimeout, Mismatch, RunError, name_ranks

logger = logging.getLogger("horovod_abs")
Batch = TypeVar("Batch")


class Payload(Protocol):
    """What is exchanged, and how: the tensors of one framework."""

    @property
    def launches_first(self) -> bool:
        """Whether the next exchange may start before the result of the last one is applied."""

    def launch(self, row: Floats, ledger: Ledger) -> None:
        """Start the exchange of what was accumulated.

        Args:
            row: This rank's row, shape ``(len(Column),)``. A sum that is not finite is dropped, and the row that
                travels says so.
            ledger: What was merged before.
        """

    def poll(self) -> bool:
        """Whether the exchange in flight is complete."""

    def read(self) -> Floats:
        """Take the completed exchange over; the rows of all ranks, shape ``(ranks, len(Column))``."""

    def apply(self, entry: Entry, samples_before: float) -> bool:
        """Update the model with the exchange last read. False if its result is not finite and was dropped."""

    def settle(self, closed: bool) -> None:
        """No launch follows the merge; ``closed`` if nothing is pending on any rank."""

    def agree(self) -> None:
        """Take over the model of rank 0; all ranks call it at the same merge."""

    def options(self) -> int:
        """Fingerprint of the optimizer's hyper-parameters, below 2**52."""


class Announcer(Protocol):
    """Tells the other ranks how far this one has come, and knows how far they have come."""

    def announce(self, launches: int, *, busy: bool = False) -> None:
        """Tell all ranks that this one has launched so many exchanges, or is busy with something long."""

    def behind(self, launches: int) -> tuple[list[int], list[int]]:
        """Ranks not known to have launched so many exchanges, and those of them that said they are busy."""


class Ticker(Protocol):
    """Rank 0's timer, which calls the end of rounds on all ranks."""

    def schedule(self, round: int, seconds: float) -> None:
        """On rank 0: call the end of ``round`` in so many seconds. On the others: nothing."""

    def latest(self) -> int:
        """The last round whose end was called; -1 if none was."""


@dataclass(frozen=True)
class RoundRecord:
    """One merged round, as this rank saw it.

    Attributes:
        round: Its number, from 0.
        samples: Samples in the average, by rank.
        micro_batches: Micro-batches computed, by rank.
        compute_seconds: Seconds computing, by rank.
        wait_seconds: Seconds waiting for an exchange, by rank.
        exchange_seconds: Seconds from this rank's launch until it saw the exchange complete.
        merged_at: Seconds from the optimizer's first epoch (without one: its first boundary) until the merge on
            this rank.
    """

    round: int
    samples: tuple[float, ...]
    micro_batches: tuple[int, ...]
    compute_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    exchange_seconds: float
    merged_at: float

    @classmethod
    def of(cls, entry: Entry, exchange_seconds: float, merged_at: float) -> RoundRecord:
        """The record of a merged entry."""
        return cls(
            round=entry.round,
            samples=tuple(entry.column(Column.WEIGHT).tolist()),
            micro_batches=tuple(int(n) for n in entry.column(Column.MICRO_BATCHES)),
            compute_seconds=tuple(entry.column(Column.COMPUTE_SECONDS).tolist()),
            wait_seconds=tuple(entry.column(Column.WAIT_SECONDS).tolist()),
            exchange_seconds=exchange_seconds,
            merged_at=merged_at,
        )

    @property
    def batch(self) -> float:
        """Samples of all ranks."""
        return sum(self.samples)


class Log:
    """Is told how a run goes on, and keeps nothing; :class:`horovod_abs.observe.recorder.Recorder` writes it down."""

    def round(self, entry: Entry, record: RoundRecord) -> None:
        """A round was merged and applied; what the program does at a merge comes after."""

    def closed(self) -> None:
        """All ranks have closed: nothing is pending, and all is applied."""

    def epoch_begins(self, sampler: Mapping[str, Any] | None) -> None:
        """An epoch begins, with an adaptive sampler that is described so, or without one."""

    def epoch_ends(self) -> None:
        """The epoch has ended."""

    def restarted(self) -> None:
        """The run goes on from a state that was loaded."""

    def event(self, values: Mapping[str, Any]) -> None:
        """The program tells something."""


class Driver:
    """Drives one rank's engine.

    Args:
        engine: The rank's engine.
        payload: What it exchanges.
        rank: The rank's number among those that exchange.
        announcer: Names the missing ranks when an exchange does not complete.
        ticker: Calls the end of rounds; without one each rank takes the time itself.
        exchange_timeout: Seconds without completion after which the rank gives up.
        peers: The drivers of all optimizers in this process. While this one has no work, they take part in their
            exchanges without any, or a rank that waits for one of those would never come to this one's.
        seconds: A clock that does not go backwards.

    Attributes:
        history: The last merged rounds, oldest first.
        nonfinite: Rounds dropped because of non-finite values, by rank.
        overflows: Merges dropped because the sum itself was not finite.
        corrections: Merges at which the ranks' parameters had drifted apart and were put right.
        failed: Whether an exchange has failed, so that no other may be tried.
        on_merge: Called, without arguments, after each global update.
        on_entry: Called with each merged entry, empty ones included, before the next launch.
        on_checkpoint: Called, without arguments, on all ranks with nothing pending, when a checkpoint or a stop was
            asked for.
        log: Is told how the run goes on.
    """

    POLL_SECONDS = 0.0003
    """How long a waiting rank sleeps between two looks: short against a micro-batch, long against a look."""

    def __init__(
        self,
        engine: Engine,
        payload: Payload,
        *,
        rank: int,
        announcer: Announcer | None = None,
        ticker: Ticker | None = None,
        exchange_timeout: float = 60.0,
        peers: Collection[Driver] = (),
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        if exchange_timeout <= 0:
            raise ValueError(f"exchange_timeout must be positive, got {exchange_timeout!r}")
        self.engine = engine
        self.payload = payload
        self.rank = rank
        self.history: deque[RoundRecord] = deque(maxlen=100_000)
        self.nonfinite = [0] * engine.ledger.size
        self.overflows = 0
        self.corrections = 0
        self.failed = False
        self.on_merge: list[Callable[[], object]] = []
        self.on_entry: list[Callable[[Entry], object]] = []
        self.on_checkpoint: list[Callable[[], object]] = []
        self.log = Log()
        self.batch_size: int | None = None
        self._announcer = announcer
        self._ticker = ticker if engine.clock.interval is not None else None  # to look for ticks takes MPI's lock
        self._scheduled = -1
        self._commands: deque[Flag] = deque()
        self._timeout = exchange_timeout
        self._peers = peers
        self._seconds = seconds
        self._began: float | None = None
        self._launched_at = 0.0
        self._completed_at: float | None = None
        self._announced = -1
        self._in_epoch = self._adaptive = False
        self._stepped = False
        self._counted = True
        self._put_off = False
        self._owes_checkpoint = False
        self._is_last: Callable[[], bool] = lambda: False

    # -- rounds ----------------------------------------------------------------------------------------------------

    def micro_batch_done(self, weight: float, seconds: float) -> bool:
        """Tell the engine of a micro-batch and do what follows. True if a merge did.

        Args:
            weight: Samples that it adds to the average.
            seconds: Time that it took to compute.

        Raises:
            RunError: another optimizer is in use, and the two could wait for one another.
        """
        if self.engine.closed:
            self._refuse_deadlocks()
        merged = self._put_off and self.boundary()
        self.engine.fed()
        if not self.engine.unasked:  # it has taken part without work meanwhile, and not all ranks have yet
            merged = self.boundary() or merged
        self.engine.micro_batch_done(weight, 0.0 if self._in_epoch else weight, seconds)
        self._stepped = True
        self._put_off = self._in_epoch and self._is_last()
        return merged if self._put_off else self.boundary() or merged

    def boundary(self, *, wait: bool = True) -> bool:
        """Do what the engine asks for until the rank may compute, or all ranks have closed. True if it merged.

        Args:
            wait: Whether to wait for an exchange if the rank may not compute.
        """
        merged, self.failed, self._put_off = False, True, False
        while self._commands:
            self.engine.raise_flag(self._commands.popleft())
        while True:
            self._look()
            match self.engine.next_action(self._now()):
                case Action.WAIT:
                    if not wait:
                        break
                    self._wait()
                case Action.MERGE:
                    self._merge()
                    merged = True
                case Action.LAUNCH:
                    self._launch()
                case Action.COMPUTE:
                    self._schedule_tick()
                    break
                case Action.CLOSED:
                    break
        self.failed = False
        if merged and self.engine.closed:
            self.log.closed()
        return merged

    @property
    def elapsed(self) -> float:
        """Seconds since the first epoch began (without one: since the first boundary); 0 before."""
        return 0.0 if self._began is None else self._seconds() - self._began

    def command(self, flag: Flag) -> None:
        """Ask all ranks to stop or to take a checkpoint; may be called from a signal handler."""
        self._commands.append(flag)

    def close(self, flags: Flag | None = None) -> None:
        """Close, and wait until all ranks have. What was handed out and stepped on is counted as drawn."""
        if self._stepped:
            self._count_drawn()
        self.engine.close(flags)
        self.boundary()

    def starve(self, *, for_good: bool = False) -> None:
        """Take part without data until the next merge; ``for_good`` if there will be none in this epoch."""
        self.engine.starve(for_good=for_good)
        self.boundary()
        self._checkpoint_if_due()

    # -- epochs ----------------------------------------------------------------------------------------------------

    def epoch(
        self,
        batches: Iterable[Batch],
        count: Callable[[Batch], int],
        *,
        drawn: float = float("inf"),
        rounds: float = float("inf"),
        exact: bool = False,
        is_last: Callable[[], bool] = lambda: False,
        sampler: Mapping[str, Any] | None = None,
    ) -> Iterator[Batch]:
        """Yield batches until the epoch ends, on all ranks at the same exchange.

        A rank whose batches run out takes part with weight 0 until then. Leaving early ends the epoch for all.

        Args:
            batches: This rank's batches; may be endless.
            count: Number of samples in a batch.
            drawn: The epoch ends when all ranks together have drawn this many samples.
            rounds: The epoch ends after so many rounds.
            exact: No rank can hold anything back at that moment; see :meth:`Engine.open`.
            is_last: Whether the batch handed out last is this rank's last of the epoch. Its boundary is then put off
                until it counts as drawn, so that one launch carries both; it would take another exchange otherwise.
            sampler: What the log is told of an adaptive sampler.
        """
        engine = self.engine
        if engine.stopped:
            return
        if not engine.closed:
            raise RunError(
                self.rank,
                "an epoch begins while rounds are pending",
                "End a loop without epoch() with synchronize(), on every rank",
            )
        self._adaptive = sampler is not None
        self._refuse_deadlocks()
        drawn_target = engine.ledger.total_drawn + drawn
        engine.open(drawn_target, rounds_target=engine.ledger.rounds + rounds, exact=exact)
        self._in_epoch, self._is_last = True, is_last
        self._now()
        self.log.epoch_begins(sampler)
        try:
            for batch in batches:
                if engine.ending or not engine.epoch_open:
                    break
                self.batch_size, self._stepped, self._counted = count(batch), False, False
                yield batch
                self._requested()
                self._checkpoint_if_due()
            self._end_epoch()
        except GeneratorExit:
            if engine.epoch_open and not self.failed:
                self._leave()
            raise
        finally:
            self._in_epoch = self._adaptive = False
            self.batch_size = None
            self.log.epoch_ends()

    def _end_epoch(self) -> None:
        """Take part until the epoch ends on all ranks, and close."""
        while self.engine.epoch_open and not self.engine.ending:
            self.starve(for_good=True)
        if self.engine.epoch_open:
            self.close()
        if self._owes_checkpoint:
            self._checkpoint()

    def _requested(self) -> None:
        """The batch handed out last is used up, whether it was stepped on or dropped."""
        self._count_drawn()
        if not self._stepped:
            self.micro_batch_done(0.0, 0.0)

    def _count_drawn(self) -> None:
        if not self._counted:
            self.engine.data_drawn(self.batch_size or 0)
            self._counted = True

    def _checkpoint_if_due(self) -> None:
        if self.engine.checkpoint_due and not self.engine.ending:
            self.close()
            self._checkpoint()

    def _checkpoint(self) -> None:
        self._owes_checkpoint = False
        for callback in self.on_checkpoint:
            callback()

    def _leave(self) -> None:
        """The user's loop was left by ``break`` or by an exception: end the epoch on all ranks."""
        try:
            self._requested()
            if self.engine.epoch_open:
                self.close(Flag.LEAVING)
        except RunError as error:
            logger.error("%s", error)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        now = self._seconds()
        if self._began is None:
            self._began = self._launched_at = now
        return now

    def _schedule_tick(self) -> None:
        interval = self.engine.clock.interval
        if self._ticker is not None and interval is not None and self._scheduled != self.engine.launches:
            self._scheduled = self.engine.launches
            self._ticker.schedule(self._scheduled, interval)

    def _look(self) -> None:
        if self._ticker is not None:
            self.engine.tick(self._ticker.latest())
        if not self.engine.in_flight or self._completed_at is not None:
            return
        if self.payload.poll():
            self._completed_at = self._now()
            self.engine.exchange_complete()
        elif self._now() - self._launched_at > self._timeout / 2 and self._announced < self.engine.launches:
            self._announce()

    def _announce(self) -> None:
        self._announced = self.engine.launches
        if self._announcer:
            self._announcer.announce(self.engine.launches)

    def _launch(self) -> None:
        row = self.engine.row(self.payload.options())
        row[Column.LAUNCHED_AT] = time.time()
        self.payload.launch(row, self.engine.ledger)
        self.engine.launched()
        now = self._now()
        if now - self._launched_at > self._timeout / 2:  # who launched long ago might take this rank for missing
            self._announce()
        self._launched_at = now
        self._completed_at = None

    def _merge(self) -> None:
        entry = Entry(self.engine.ledger.rounds, self.payload.read())
        self._check_options(entry)
        samples_before = float(self.engine.ledger.weight.sum())
        now = self._now()
        entry = self.engine.merged(entry, now)
        record = self._record(entry, now)
        self._owes_checkpoint |= entry.any_raised(Flag.STOP | Flag.CHECKPOINT)
        for told in self.on_entry:
            told(entry)
        if (
            self.payload.launches_first and self.engine.next_action(now) is Action.LAUNCH
        ):  # the next exchange runs while this result is applied
            self._launch()
        finite = self.payload.apply(entry, samples_before)
        self._agree_if_apart(entry)
        self.log.round(entry, record)
        if not finite:
            self.overflows += 1
            logger.warning("rank %d: the sum of round %d is not finite and was dropped", self.rank, entry.round)
        elif entry.weight:
            for callback in self.on_merge:
                callback()
        if not self.engine.in_flight and self.engine.next_action(now) is not Action.LAUNCH:
            self.payload.settle(self.engine.closed)

    def _agree_if_apart(self, entry: Entry) -> None:
        """Unlike processors round differently: where parameters have drifted apart, take over those of rank 0."""
        others = np.flatnonzero(entry.column(Column.DIGEST) != entry.rows[0, Column.DIGEST])
        if not len(others):
            return
        self.payload.agree()
        self.corrections += 1
        if self.rank == 0:
            why = "call hvd.broadcast_parameters before training" if entry.round == 0 else "unlike processors"
            logger.warning(
                "parameters of %s had drifted from rank 0's and were put right (%s)", name_ranks(others), why
            )

    def _record(self, entry: Entry, now: float) -> RoundRecord:
        for rank in entry.ranks_with(Flag.NONFINITE):
            self.nonfinite[rank] += 1
            if rank == self.rank:
                logger.warning("rank %d: its gradients of round %d are not finite and were dropped", rank, entry.round)
        seen = now if self._completed_at is None else self._completed_at
        merged_at = now - (now if self._began is None else self._began)
        record = RoundRecord.of(entry, seen - self._launched_at, merged_at)
        self.history.append(record)
        return record

    def _check_options(self, entry: Entry) -> None:
        options = entry.column(Column.OPTIONS)
        others = np.flatnonzero(options != options[0])
        if len(others):
            raise Mismatch(
                self.rank,
                f"the optimizer's hyper-parameters (learning rate, …) on {name_ranks(others)} differ from those on "
                f"rank 0 in round {entry.round}",
                "Ranks pass a point of the loop at different rounds: change hyper-parameters only in "
                "optimizer.on_merge(…), e.g. optimizer.on_merge(scheduler.step), or between epochs",
            )

    def _wait(self) -> None:
        began = self._now()
        patience = max(began, self._launched_at) + self._timeout
        before: tuple[list[int], list[int]] | None = None
        while self._completed_at is None:
            time.sleep(self.POLL_SECONDS)
            self._look()
            if self.engine.closing or self.engine.starved:
                for peer in self._open_peers():
                    peer.engine.starve()
                    peer.boundary(wait=False)
            if self._completed_at is None and self._now() > patience:
                missing, busy = self._behind()
                all_excused = missing == busy and (bool(missing) or before is None)
                if not all_excused and before in (None, (missing, busy)):  # and nobody has moved meanwhile
                    raise self._give_up(missing)
                before = missing, busy
                patience = self._now() + self._timeout
        self.engine.waited(self._now() - began)

    def _open_peers(self) -> list[Driver]:
        return [peer for peer in self._peers if peer is not self and not peer.engine.closed and not peer.failed]

    def _refuse_deadlocks(self) -> None:
        """One rank must not wait in this optimizer's exchange while another waits in another optimizer's."""
        for peer in self._open_peers():
            for one, other in ((self, peer), (peer, self)):
                if one.engine.delay == 1 or (other.engine.delay == 1 and other.engine.max_staleness == math.inf):
                    continue
                if one.engine.clock.interval is not None:
                    raise RunError(
                        self.rank,
                        f"two optimizers are in use that wait for exchanges, one of them, with Gradients(delay=0), for "
                        f"those that {one.engine.clock!r} calls: ranks would wait for one another",
                        "Use SyncClock or CountClock for both, or Gradients(delay=1) for one of them",
                    )
                if one._adaptive and other.engine.delay == 0:
                    raise RunError(
                        self.rank,
                        "two optimizers with Gradients(delay=0) are in use in an epoch of an adaptive sampler, in "
                        "which ranks run out of data at different times: they would wait for one another",
                        "Use Gradients(delay=1) for one of them, or another sampler",
                    )

    def _behind(self) -> tuple[list[int], list[int]]:
        """Ranks that are not known to have launched, and those of them that are busy."""
        if self._announcer is None:
            return [rank for rank in range(self.engine.ledger.size) if rank != self.rank], []
        return self._announcer.behind(self.engine.launches)

    def _give_up(self, missing: list[int]) -> ExchangeTimeout:
        who = "every rank has launched it, so it is the network or Horovod that does not get on"
        if missing:
            who = f"{name_ranks(missing)} {'have' if len(missing) > 1 else 'has'} not launched it"
        shutdown.expect_no_answer()
        return ExchangeTimeout(
            self.rank,
            f"exchange {self.engine.launches - 1} did not complete within {self._timeout:g} s: {who}",
            "See what that rank is doing (frozen, swapping, in a debugger, or in a collective of its own). If it is "
            "busy for good reason, do that inside optimizer.authoritative() or raise exchange_timeout",
        )
