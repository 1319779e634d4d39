"""Training time: what lies between the starts and stops of a stopwatch."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType


class Stopwatch:
    """Runs inside its ``with`` block and stands still outside, so that evaluating costs no training time.

    >>> now = iter([0.0, 2.5, 7.0, 8.0])  # stands in for the clock on the wall
    >>> watch = Stopwatch(lambda: next(now))
    >>> for epoch in range(2):
    ...     with watch:
    ...         pass  # train
    >>> watch.seconds
    3.5

    Args:
        now: Tells the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._before = 0.0
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds spent inside so far."""
        return self._before + (0.0 if self._started is None else self._now() - self._started)

    def __enter__(self) -> Stopwatch:
        if self._started is not None:
            raise RuntimeError("the stopwatch is running already")
        self._started = self._now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._before, self._started = self.seconds, None
