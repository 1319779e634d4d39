from __future__ import annotations

from pathlib import Path

import pytest

import horovod_abs.torch as hvd
from horovod_abs import options
from horovod_abs.core.clocks import CountClock, IntervalClock, ReplayClock, SyncClock, TargetBatchClock
from tests.observe.recorded import recorded


def test_numbers() -> None:
    assert options.positive_numbers("1,1,0.5,2e1") == (1.0, 1.0, 0.5, 20.0)


@pytest.mark.parametrize("text", ["", "1,,2", "a", "1;2", "0,1", "-1", "inf", "nan"])
def test_not_numbers(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a list of numbers|must be positive"):
        options.positive_numbers(text)


def test_clocks() -> None:
    assert options.clock("sync") == SyncClock()
    assert options.clock("count:4") == CountClock(4)
    assert options.clock("interval:0.5") == IntervalClock(0.5)
    assert options.clock("target:256") == TargetBatchClock(256)


def test_the_clock_of_a_recorded_run(tmp_path: Path) -> None:
    log = recorded(tmp_path / "run.jsonl")
    clock = options.clock(f"replay:{log.path}")
    assert isinstance(clock, ReplayClock)
    assert len(clock.entries) == len(log.entries)


@pytest.mark.parametrize(
    "text", ["", "sync:1", "count", "replay:", "count:", "count:x", "count:-1", "count:1.5", "tick"]
)
def test_not_clocks(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a clock: sync, or count:N"):
        options.clock(text)


@pytest.mark.parametrize("text", ["interval:0", "interval:x", "target:-5"])
def test_clocks_of_no_length(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a list of numbers|must be positive"):
        options.clock(text)


def test_a_clock_that_never_ends_a_round_is_refused() -> None:
    with pytest.raises(ValueError, match=">= 1"):
        options.clock("count:0")


def test_exchanges() -> None:
    assert options.exchange("gradients") == hvd.Gradients()
    assert options.exchange("lookahead") == hvd.Gradients(staleness="lookahead")
    assert options.exchange("waiting") == hvd.Gradients(delay=0)
    assert options.exchange("updates:8") == hvd.ModelUpdates(max_staleness=8)


@pytest.mark.parametrize("text", ["mail", "updates:x", "gradients:2", ""])
def test_what_is_not_an_exchange_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an exchange"):
        options.exchange(text)
