"""What ``DistributedOptimizer`` adds to a user's optimizer, whatever the framework."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from horovod_abs import mpi
from horovod_abs.checks import check_same_on_all_ranks
from horovod_abs.core.clocks import Clock
from horovod_abs.core.engine import Engine
from horovod_abs.core.ledger import Floats
from horovod_abs.core.scaling import Rule, Scaling
from horovod_abs.driver import Driver, Payload, RoundRecord
from horovod_abs.exchanges import Exchange, ModelUpdates
from horovod_abs.rollcall import RollCall
from horovod_abs.timing import Timer

FIRST_EXPECTED_WEIGHT = 1024.0
"""About how many samples the first sum is taken to hold, before there is a ledger that says so."""

_FAR_FROM_OVERFLOW = 1e37
"""Sums of float32 numbers that are in magnitude, all together, below this are finite, however they are rounded."""

_ROOM_FOR_UPDATES = 64.0
"""Compressed to float16, mean updates from about 1e-9 to this arrive: they are as small as learning rates make them."""
_LARGEST_FLOAT16 = 65504.0

_made: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)  # process set -> numbers of its optimizers
_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


def cannot_overflow(bound: float, scale: float) -> bool:
    """Whether a sum must be finite, because the ranks' bounds, added up, are far from the largest number.

    Args:
        bound: Sum of what each rank's elements do not exceed in magnitude, before they were scaled for the wire.
        scale: What they were multiplied by for it.
    """
    return bound < _FAR_FROM_OVERFLOW and scale <= 1.0


def weight_for_updates(expected_weight: float) -> float:
    """What a sum of updates is to be taken to weigh, for a scale that suits numbers as small as they are."""
    return (expected_weight or FIRST_EXPECTED_WEIGHT) * _ROOM_FOR_UPDATES / _LARGEST_FLOAT16


@dataclass(frozen=True)
class Options:
    """How things are accumulated, sent and applied; the names are those of ``DistributedOptimizer``.

    Raises:
        ValueError: an option out of range.
    """

    scaling: Scaling
    compression: Any = None
    clip_grad_norm: float | None = None
    loss_reduction: str = "mean"
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    digest_every: int = 100

    def __post_init__(self) -> None:
        if self.loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', not {self.loss_reduction!r}")
        if self.digest_every < 1:
            raise ValueError(f"digest_every must be at least 1, got {self.digest_every!r}")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be positive, got {self.clip_grad_norm!r}")
        if not (self.gradient_predivide_factor > 0 and math.isfinite(self.gradient_predivide_factor)):
            raise ValueError(f"gradient_predivide_factor must be positive, got {self.gradient_predivide_factor!r}")

    def named(self) -> Options:
        """The same with the compression's name in its place: a compressor's own ``repr`` may hold an address."""
        compression = self.compression
        named = (compression if isinstance(compression, type) else type(compression)).__qualname__
        return replace(self, compression=named)


def scaling_for(
    exchange: Exchange, rule: Rule, reference: float | None, warmup_samples: float, warmup_steps: int
) -> Scaling:
    """The scaling of learning rates that keywords of ``DistributedOptimizer`` ask for.

    Raises:
        ValueError: an unknown rule, a number out of range, or a keyword that is another exchange's.
    """
    if not isinstance(exchange, ModelUpdates):
        if warmup_steps:
            raise ValueError("warmup_steps= is for ModelUpdates: with Gradients use warmup_samples=")
        return Scaling(rule, reference, warmup_samples)
    if reference is not None or warmup_samples:
        raise ValueError(
            "reference_batch_size= and warmup_samples= are for Gradients: with ModelUpdates the learning rate is "
            "scaled by the number of ranks, and phased in over warmup_steps="
        )
    return Scaling(rule, 1.0, warmup_steps)


class ExchangedPayload(Payload, Protocol):
    """A payload whose run can be looked at, saved, and gone on with."""

    @property
    def state_is_own(self) -> bool:
        """Whether each rank's optimizer keeps a state of its own, unlike the others'."""

    def authoritative(self) -> AbstractContextManager[None]:
        """While inside, the parameters are those that all ranks share."""

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on besides the model and the user's optimizer."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""


@dataclass
class Rounds:
    """All that ``DistributedOptimizer`` adds to the user's optimizer, in one attribute of it.

    Attributes:
        driver: Runs this rank's rounds.
        payload: What is exchanged.
        user_class: The class of the user's optimizer.
        timer: Times micro-batches.
        announcer: Tells the others how far this rank has come; ``None`` for a rank by itself.
        wire: Between the ranks.
        name: Prefix of the names of all exchanges, the same on every rank.
        process_set: Horovod's.
        given: What was asked for, in words that must be the same on all ranks.
        samplers: Those made for this optimizer.
        epoch: The epoch that is under way, if something still holds it.
        buffers_averaged_at: Samples by rank when the model's statistics were averaged last.
    """

    driver: Driver
    payload: Any  # an ExchangedPayload, with the framework's way to hand over gradients
    user_class: type[Any]
    timer: Timer
    announcer: RollCall | None
    wire: Any  # a Gatherer, with the framework's tensors
    name: str
    process_set: Any
    given: dict[str, str]
    samplers: list[Any] = field(default_factory=list)
    epoch: weakref.ref[Generator[Any, None, None]] | None = None
    buffers_averaged_at: Floats | float = 0.0

    def check_same(self, parameters: str) -> None:
        """Raise :class:`Mismatch` if another rank has other parameters, described in words, or other options."""
        check_same_on_all_ranks({"parameters": parameters, **self.given}, self.wire, self.name)

    def gather(self, values: list[int], what: str) -> list[list[int]]:
        """Whole numbers of all ranks; a collective call."""
        gathered: list[list[int]] = self.wire.gather(values, f"{self.name}.{what}")
        return gathered

    def share_since_averaged(self) -> float:
        """This rank's part in the samples since the last call, which all ranks make together."""
        weight = self.driver.engine.ledger.weight
        since = weight - self.buffers_averaged_at
        self.buffers_averaged_at = weight.copy()
        return float(since[self.wire.rank] / since.sum()) if since.sum() else 1.0 / self.wire.size

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on, besides the state of the user's optimizer."""
        return {
            **self.driver.engine.state_dict(),
            "payload": self.payload.state_dict(),
            "samplers": [sampler.state_dict() for sampler in self.samplers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.driver.engine.load_state_dict(state)
        self.driver.log.restarted()
        self.payload.load_state_dict(state["payload"])
        self.buffers_averaged_at = self.driver.engine.ledger.weight.copy()
        for sampler, sampler_state in zip(self.samplers, state["samplers"], strict=False):
            sampler.load_state_dict(sampler_state)

    def refuse_pending(self, what: str) -> None:
        """Raise :class:`RuntimeError` while anything is pending."""
        if not self.driver.engine.closed:
            raise RuntimeError(f"{what} while rounds are pending: call synchronize() first, on every rank")

    def close_epoch_before(self) -> None:
        """End an epoch that was left by ``break`` while something, such as a progress bar, still holds it."""
        before = self.epoch() if self.epoch else None
        if before is not None:
            before.close()

    def timed(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        """``batches`` as the epoch that is under way."""
        epoch = self._timed(batches)
        self.epoch = weakref.ref(epoch)
        return epoch

    def _timed(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        self.timer.start()
        yield from batches


@dataclass(frozen=True)
class Identity:
    """Tells an optimizer apart from all others, the same on every rank.

    Attributes:
        process_set: Number of the process set.
        number: Number of the optimizer in it.
    """

    process_set: int
    number: int

    @classmethod
    def next(cls, process_set: Any) -> Identity:
        """That of the next optimizer of a process set."""
        return cls(process_set.process_set_id, next(_made[process_set.process_set_id]))

    @property
    def name(self) -> str:
        """Prefix of the names of its exchanges."""
        return f"horovod_abs.{self.process_set}.{self.number}"

    @property
    def code(self) -> int:
        """The same as a whole number."""
        return self.process_set * 1_000_000 + self.number


def open_rounds(
    identity: Identity,
    payload: ExchangedPayload,
    wire: Any,
    process_set: Any,
    *,
    user_class: type[Any],
    timer: Timer,
    exchange: Exchange,
    clock: Clock,
    options: Options,
    min_micro_batches: int,
    max_micro_batches: int,
    exchange_timeout: float,
) -> Rounds:
    """Make the engine and the driver of one rank's rounds.

    Args:
        identity: Of the optimizer.
        payload: What is exchanged.
        wire: Between the ranks.
        process_set: Horovod's.
        user_class: The class of the user's optimizer.
        timer: Times micro-batches.
        exchange, clock, options, min_micro_batches, max_micro_batches, exchange_timeout: As given by the user.

    Raises:
        ValueError: a bound or the clock is out of range.
    """
    engine = Engine(
        wire.size,
        clock,
        rank=wire.rank,
        delay=exchange.delay,
        min_micro_batches=min_micro_batches,
        max_micro_batches=max_micro_batches,
        max_staleness=exchange.max_staleness,
    )
    announcer = ticker = None
    if process_set.included():
        ranks = process_set.ranks or range(wire.size)
        announcer = RollCall(identity.code, wire.rank, ranks)
        control = mpi.control_plane()
        ticker = mpi.Ticker(control, identity.code, wire.rank, ranks) if control else None
    driver = Driver(
        engine,
        payload,
        rank=wire.rank,
        announcer=announcer,
        ticker=ticker,
        exchange_timeout=exchange_timeout,
        peers=_drivers,
    )
    _drivers.add(driver)
    given = {
        "exchange": repr(exchange),
        "clock": repr(clock),
        "options": f"{user_class.__name__} {options.named()!r} min_micro_batches={min_micro_batches} "
        f"max_micro_batches={max_micro_batches} exchange_timeout={exchange_timeout}",
    }
    return Rounds(driver, payload, user_class, timer, announcer, wire, identity.name, process_set, given)


def rounds_of(optimizer: Any) -> Rounds:
    """What was added to an optimizer. Raises :class:`RuntimeError` for a copy of one, which has none of it."""
    try:
        rounds: Rounds = optimizer.__dict__["_rounds"]
    except KeyError:
        raise RuntimeError(
            "this is a copy of a distributed optimizer, without its exchanges: pass a plain optimizer to "
            "DistributedOptimizer and load its state with load_state_dict"
        ) from None
    return rounds


class RoundsMixin:
    """What a distributed optimizer of any framework can do besides what the user's class can."""

    def synchronize(self) -> None:
        """Exchange what is pending and wait until all ranks have closed; a loop without ``epoch`` must end with it.

        Every rank must call it.
        """
        rounds = rounds_of(self)
        rounds.driver.close()
        for sampler in rounds.samplers:
            sampler.epochs.settle()
        rounds.timer.start()

    def log(self, **values: float | str) -> None:
        """Write numbers or text into the run log, with the time and the samples seen: ``log(accuracy=0.9)``.

        Any rank may call it; only the first one's is written, and only with ``record=``.

        Raises:
            TypeError: a value is neither a number nor text.
        """
        rounds_of(self).driver.log.event(values)

    def on_merge(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Call ``callback`` after each global update, wherever it happens, e.g. ``scheduler.step``."""
        rounds_of(self).driver.on_merge.append(callback)
        return callback

    @contextmanager
    def authoritative(self) -> Iterator[None]:
        """While inside, the model has the parameters that all ranks share, and the others know that this rank is busy.

        For evaluation, and for saving the model.
        """
        rounds = rounds_of(self)
        launches = rounds.driver.engine.launches
        if rounds.announcer:
            rounds.announcer.announce(launches, busy=True)
        try:
            with rounds.payload.authoritative():
                yield
        finally:
            if rounds.announcer:
                rounds.announcer.announce(launches, busy=False)
            rounds.timer.start()

    @property
    def samples_seen(self) -> float:
        """Samples that entered the model so far, over all ranks."""
        return float(rounds_of(self).driver.engine.ledger.weight.sum())

    @property
    def stopped(self) -> bool:
        """Whether the run was asked to stop (SIGTERM, with a ``Checkpointer``): no further epoch has batches."""
        return bool(rounds_of(self).driver.engine.stopped)

    @property
    def history(self) -> list[RoundRecord]:
        """The merged rounds, oldest first."""
        return list(rounds_of(self).driver.history)

    @property
    def last_round(self) -> RoundRecord | None:
        """The round merged last."""
        history = rounds_of(self).driver.history
        return history[-1] if history else None

    @property
    def dropped_rounds(self) -> tuple[int, ...]:
        """Rounds dropped because a rank's gradients were not finite, by rank."""
        return tuple(rounds_of(self).driver.nonfinite)
