"""Command-line values, spelled alike by examples and benchmarks.

Each function raises :class:`ValueError` that says what is wanted.
"""

from __future__ import annotations

import math

from horovod_abs.core.clocks import Clock, CountClock, ReplayClock, SyncClock
from horovod_abs.observe.runlog import read_run_log


def positive_numbers(text: str) -> tuple[float, ...]:
    """Numbers separated by commas: ``"1,1,0.5,0.25"``."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers separated by commas, such as 1,1,0.5,0.25") from None
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ValueError(f"every number in {text!r} must be positive")
    return numbers


def clock(text: str) -> Clock:
    """When a round ends: ``"sync"``, ``"count:N"``, or ``"replay:LOG"`` as in a recorded run."""
    name, _, count = text.partition(":")
    if name == "sync" and not count:
        return SyncClock()
    if name == "count" and count.isdecimal():
        return CountClock(int(count))
    if name == "replay" and count:
        return ReplayClock(read_run_log(count).entries)
    raise ValueError(
        f"{text!r} is not a clock: sync, or count:N for N micro-batches, such as count:4, or replay:LOG as recorded"
    )
