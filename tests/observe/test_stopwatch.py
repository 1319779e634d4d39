from __future__ import annotations

import contextlib

import pytest

from horovod_abs.observe.stopwatch import Stopwatch


def test_runs_only_inside() -> None:
    seconds = 0.0
    watch = Stopwatch(lambda: seconds)
    seconds = 5.0
    with watch:
        seconds = 7.0
        assert watch.seconds == 2.0
    seconds = 20.0
    assert watch.seconds == 2.0
    with watch:
        seconds = 21.0
    assert watch.seconds == 3.0


def test_stops_when_the_block_raises() -> None:
    seconds = 0.0
    watch = Stopwatch(lambda: seconds)
    with contextlib.suppress(KeyError), watch:
        seconds = 1.0
        raise KeyError
    seconds = 9.0
    assert watch.seconds == 1.0


def test_cannot_run_twice() -> None:
    watch = Stopwatch()
    with watch, pytest.raises(RuntimeError, match="running already"):
        watch.__enter__()
