"""A progress bar for training: samples, epoch, global batch, rate, share of the ideal, idle time."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Protocol, TextIO

from tqdm import tqdm

from horovod_abs.driver import RoundRecord

if TYPE_CHECKING:
    _Bar = tqdm[NoReturn]
else:
    _Bar = tqdm

_LAUNCHED_INTERVAL = 2.0


class Observable(Protocol):
    """An optimizer that tells of its merges."""

    @property
    def last_round(self) -> RoundRecord | None:
        """The round merged last."""

    def on_merge(self, callback: Callable[[], object]) -> object:
        """Have ``callback`` called after each global update."""


class LineStream:
    """Ends every redrawing of a bar with a newline.

    A launcher passes on whole lines only: under ``mpirun`` a bar that redraws itself in place appears when the
    program ends, and under Gloo every redrawing gets the rank's prefix.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a redrawing, if there is anything in it, as a line of its own."""
        line = text.strip()
        if line:
            self._stream.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def open_bar(total: int, stream: TextIO | None = None, *, enabled: bool = True) -> _Bar:
    """A bar that also shows under a launcher.

    Args:
        total: How far it goes.
        stream: Where to; standard error by default.
        enabled: Shows nothing otherwise.
    """
    stream = sys.stderr if stream is None else stream
    launched = not stream.isatty()
    return tqdm(
        total=total,
        disable=not enabled,
        file=LineStream(stream) if launched else stream,
        mininterval=_LAUNCHED_INTERVAL if launched else 0.1,
        miniters=1,
        ncols=110 if launched else None,
        bar_format="{desc}{percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
    )


class TrainingBar:
    """Shows how a run is getting on, on one rank.

    >>> bar = TrainingBar(epochs * len(train_set), enabled=hvd.rank() == 0, seconds=lambda: watch.seconds)
    >>> bar.watch(optimizer)
    >>> bar.close()  # after training

    The figures are means over the last :attr:`WINDOW` rounds.

    Args:
        total: Samples of all ranks that the run will take.
        seconds: Training time so far.
        enabled: Shows nothing otherwise.
        ideal: Samples per second if no rank ever waited; without it the share is left out.
        stream: Where to; standard error by default.

    Attributes:
        epoch: Shown in front; set it as the run goes on.
    """

    WINDOW = 20

    def __init__(
        self,
        total: float,
        *,
        seconds: Callable[[], float],
        enabled: bool = True,
        ideal: float | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.epoch = 0
        self._total = round(total)
        self._seconds = seconds
        self._enabled = enabled
        self._ideal = ideal
        self._stream = stream
        self._window: deque[tuple[float, float, float]] = deque(maxlen=self.WINDOW)
        self._since = seconds()
        self._bar: _Bar | None = None

    def watch(self, optimizer: Observable) -> None:
        """Advance at every global update of ``optimizer``."""
        optimizer.on_merge(lambda: self._take(optimizer.last_round))

    def advance(self, batch: float, compute_seconds: float) -> None:
        """One more global update.

        Args:
            batch: Samples of all ranks in it.
            compute_seconds: Spent computing since the one before, mean of the ranks that are known.
        """
        if not self._enabled:
            return
        bar = self._bar = self._bar or open_bar(self._total, self._stream)
        now = self._seconds()
        self._window.append((now - self._since, batch, compute_seconds))
        self._since = now
        bar.set_description_str(f"epoch {self.epoch} ", refresh=False)
        bar.set_postfix_str(self._describe(batch), refresh=False)
        bar.update(min(round(batch), self._total - bar.n))

    def close(self) -> None:
        """Draw it a last time."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> TrainingBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, record: RoundRecord | None) -> None:
        if record is not None:
            self.advance(record.batch, sum(record.compute_seconds) / len(record.compute_seconds))

    def _describe(self, batch: float) -> str:
        elapsed = sum(entry[0] for entry in self._window) or float("inf")
        rate = sum(entry[1] for entry in self._window) / elapsed
        idle = max(1 - sum(entry[2] for entry in self._window) / elapsed, 0.0)
        share = f", {rate / self._ideal:.0%} of ideal" if self._ideal else ""
        return f"batch {batch:.0f}, {rate:,.0f} samples/s{share}, idle {idle:.0%}"
