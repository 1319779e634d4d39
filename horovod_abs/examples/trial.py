"""What the ways of training that an example compares share: emulated speed, a training clock, and keeping the score."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import horovod.torch as hvd
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

from horovod_abs.emulate import Pace
from horovod_abs.examples import mnist
from horovod_abs.exchanges import Exchange, ModelUpdates
from horovod_abs.observe.progress import TrainingBar
from horovod_abs.observe.results import Point, Result
from horovod_abs.observe.stopwatch import Stopwatch
from horovod_abs.observe.summary import to_table


class Trial:
    """Keeps the score of one training run on this rank.

    Evaluating costs no training time: now and then rank 0 puts a copy of the model aside, which takes well under a
    millisecond, and tests the copies when training is over. No rank waits for that, and nothing needs to be drained.

    Args:
        epochs: How many at most.
        epoch_samples: Samples of all ranks in one.
        max_seconds: The run ends with the epoch in which any rank's training clock passes this.
        eval_every: Seconds of training between two copies.
        pace: Stretches computing to an emulated time; ``None`` leaves it as it is.
        ideal: Samples per second of all ranks if none ever waited, where that is known.

    Attributes:
        watch: The training clock, which runs inside each epoch.
        computing: Time that this rank has spent on forward and backward passes.
        bar: The progress bar, on rank 0.
        ideal: As given.
    """

    def __init__(
        self,
        *,
        epochs: int,
        epoch_samples: int,
        max_seconds: float = math.inf,
        eval_every: float = 1.0,
        pace: Pace | None = None,
        ideal: float | None = None,
    ) -> None:
        self.watch = Stopwatch()
        self.computing = Stopwatch()
        self.ideal = ideal
        self._epochs = epochs
        self._max_seconds = max_seconds
        self._eval_every = eval_every
        self._pace: AbstractContextManager[object] = nullcontext() if pace is None else pace
        self._kept: list[tuple[float, float, nn.Module]] = []
        self.bar = TrainingBar(
            epochs * epoch_samples, seconds=lambda: self.watch.seconds, enabled=hvd.rank() == 0, ideal=ideal
        )

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs from 1, until there were enough or the time is up. All ranks end at the same."""
        hvd.barrier()  # no rank's clock starts while another is still loading
        for epoch in range(1, self._epochs + 1):
            self.bar.epoch = epoch
            yield epoch
            longest = hvd.allreduce(torch.tensor(self.watch.seconds), op=hvd.Max, name="seconds")
            if float(longest) >= self._max_seconds:
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
        return hvd.rank() == 0 and self.watch.seconds - last >= self._eval_every

    def keep(self, model: nn.Module, samples: float) -> None:
        """Put a copy of ``model`` aside, after so many samples of all ranks."""
        self._kept.append((self.watch.seconds, samples, copy.deepcopy(model)))

    def curve(self, test_set: TensorDataset) -> tuple[Point, ...]:
        """Test what was kept."""
        return tuple(Point(seconds, samples, mnist.accuracy(model, test_set)) for seconds, samples, model in self._kept)


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
