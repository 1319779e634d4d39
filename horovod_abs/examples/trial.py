"""What the ways of training that an example compares share: emulated speed, a training clock, and keeping the score."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Generic, TypeVar

from rich.console import Console

from horovod_abs import emulate
from horovod_abs.examples.arguments import PLAIN
from horovod_abs.exchanges import Exchange, ModelUpdates
from horovod_abs.observe.progress import TrainingBar
from horovod_abs.observe.results import Point, Result
from horovod_abs.observe.stopwatch import Stopwatch
from horovod_abs.observe.summary import Summary, to_table

Model = TypeVar("Model")
Kept = TypeVar("Kept")
Batches = list[tuple[float, ...]]
"""Samples of each global update, by rank."""


class Trial(Generic[Model, Kept]):
    """Keeps the score of one training run on this rank.

    Evaluating costs no training time: now and then rank 0 puts a copy of the model aside, which takes well under a
    millisecond, and tests the copies when training is over. No rank waits for that, and nothing needs to be drained.

    Args:
        args: The command line; see :mod:`horovod_abs.examples.arguments`.
        rank: This rank.
        size: Number of ranks.
        epoch_samples: Samples of all ranks in an epoch.
        copy: Copies a model.
        greatest: The greatest of all ranks' numbers; all ranks call it.

    Attributes:
        watch: The training clock, which runs inside each epoch.
        computing: Time that this rank has spent on forward and backward passes.
        bar: The progress bar, on rank 0.
        ideal: Samples per second of all ranks if none ever waited, where that is known.

    Raises:
        ValueError: no speed was given for this rank.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        rank: int,
        size: int,
        epoch_samples: int,
        copy: Callable[[Model], Kept],
        greatest: Callable[[float], float],
    ) -> None:
        self.watch = Stopwatch()
        self.computing = Stopwatch()
        self.ideal: float | None = None
        self._pace: AbstractContextManager[object] = nullcontext()
        if not args.no_emulation:
            seconds = 1e-3 * args.base_ms
            self._pace = emulate.from_speeds(args.speeds, seconds, rank, jitter=args.jitter, seed=args.seed)
            self.ideal = sum(args.micro_batch * speed / seconds for speed in args.speeds[:size])
        self._args = args
        self._rank = rank
        self._copy = copy
        self._greatest = greatest
        self._kept: list[tuple[float, float, Kept]] = []
        self.bar = TrainingBar(
            args.epochs * epoch_samples, seconds=lambda: self.watch.seconds, enabled=rank == 0, ideal=self.ideal
        )

    def wait_for_all(self) -> None:
        """No rank's clock starts while another is still loading."""
        self._greatest(0.0)

    def is_over(self) -> bool:
        """Whether the time is up, on any rank; all ranks call it after an epoch."""
        return self._greatest(self.watch.seconds) >= self._args.max_seconds

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs from 1, until there were enough or the time is up. All ranks end at the same."""
        self.wait_for_all()
        for epoch in range(1, self._args.epochs + 1):
            self.bar.epoch = epoch
            yield epoch
            if self.is_over():
                break
        self.bar.close()

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Around a forward and backward pass: stretches it to this rank's emulated time, and counts it."""
        with self.computing, self._pace:
            yield

    def is_due(self) -> bool:
        """Whether it is time to :meth:`keep` the model, on this rank."""
        last = self._kept[-1][0] if self._kept else 0.0
        return self._rank == 0 and self.watch.seconds - last >= self._args.eval_every

    def keep(self, model: Model, samples: float) -> None:
        """Put a copy of ``model`` aside, after so many samples of all ranks."""
        self._kept.append((self.watch.seconds, samples, self._copy(model)))

    def finish(self, model: Model, summary: Summary, batches: Batches, accuracy: Callable[[Kept], float]) -> None:
        """Training has ended: rank 0 tests what was kept, and reports.

        Args:
            model: As trained.
            summary: Of the run.
            batches: Samples of each global update, by rank.
            accuracy: Tests a copy of the model.
        """
        if self._rank != 0:
            return
        self.keep(model, summary.samples)
        curve = tuple(Point(seconds, samples, accuracy(kept)) for seconds, samples, kept in self._kept)
        args = self._args
        run_with = {name: value if isinstance(value, int | float) else str(value) for name, value in vars(args).items()}
        label = "synchronous Horovod" if args.algorithm == PLAIN else label_of(args.exchange)
        report(Result(label, curve, tuple(batches), summary, run_with), args.target_accuracy, args.json)


def label_of(exchange: Exchange) -> str:
    """What a run with this exchange is called in tables and legends."""
    if isinstance(exchange, ModelUpdates):
        return "model updates"
    if exchange.delay == 0:
        return "ABS-SGD, waiting"
    return "ABS-SGD" if exchange.staleness is None else f"ABS-SGD, {exchange.staleness}"


def report(result: Result, target: float | None, path: Path | None) -> None:
    """Print the table of a run and its accuracy, and write it to ``path``."""
    console = Console(force_terminal=False, width=100)  # a launcher passes it on: plain text, not a terminal's
    console.print(to_table(result.summary, result.label))
    if result.curve:
        last = result.curve[-1]
        console.print(f"test accuracy {last.accuracy:.1%} after {last.seconds:.1f} s of training")
    if target is not None:
        reached = result.seconds_to(target)
        console.print(f"time to {target:.1%}: {'not reached' if reached is None else f'{reached:.1f} s'}")
    if path is not None:
        result.write(path)
