"""Command-line values, spelled alike by examples and benchmarks.

Each function raises :class:`ValueError` that says what is wanted, and imports what it makes only then: the command
line's help needs none of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horovod_abs.core.clocks import Clock
    from horovod_abs.exchanges import Exchange


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
    """When a round ends.

    ``"sync"``, ``"count:N"`` micro-batches, ``"interval:S"`` seconds, ``"target:N"`` samples of all ranks, or
    ``"replay:LOG"`` as in a recorded run.
    """
    from horovod_abs.core.clocks import CountClock, IntervalClock, ReplayClock, SyncClock, TargetBatchClock

    name, _, value = text.partition(":")
    if name == "sync" and not value:
        return SyncClock()
    if name == "count" and value.isdecimal():
        return CountClock(int(value))
    if name in ("interval", "target") and value:
        number = positive_numbers(value)[0]
        return IntervalClock(number) if name == "interval" else TargetBatchClock(number)
    if name == "replay" and value:
        from horovod_abs.observe.runlog import read_run_log

        return ReplayClock(read_run_log(value).entries)
    raise ValueError(
        f"{text!r} is not a clock: sync, or count:N for N micro-batches, such as count:4, interval:S for S seconds, "
        "target:N for N samples of all ranks, or replay:LOG as recorded"
    )


def exchange(text: str) -> Exchange:
    """What is averaged.

    ``"gradients"`` (as published), ``"taylor"`` or ``"lookahead"`` (gradients with a remedy for the delay),
    ``"waiting"`` (gradients without a delay), or ``"updates"``, with τ as in ``"updates:16"``.
    """
    from horovod_abs.exchanges import Gradients, ModelUpdates

    name, _, value = text.partition(":")
    if name == "updates" and (not value or value.isdecimal()):
        return ModelUpdates(int(value)) if value else ModelUpdates()
    plain = {
        "gradients": Gradients(),
        "taylor": Gradients(staleness="taylor"),
        "lookahead": Gradients(staleness="lookahead"),
        "waiting": Gradients(delay=0),
    }
    if text not in plain:
        raise ValueError(f"{text!r} is not an exchange: {', '.join(plain)}, updates, or updates:T for a staleness of T")
    return plain[text]
