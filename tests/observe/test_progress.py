from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from horovod_abs.driver import RoundRecord
from horovod_abs.observe import progress
from horovod_abs.observe.progress import LineStream, TrainingBar
from tests.observe.records import record


class FakeOptimizer:
    last_round: RoundRecord | None = None

    def on_merge(self, callback: Callable[[], object]) -> None:
        self.callback = callback

    def merge(self, merged: RoundRecord) -> None:
        self.last_round = merged
        self.callback()


@pytest.fixture(autouse=True)
def every_update_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LAUNCHED_INTERVAL", 0.0)


def test_shows_epoch_batch_rate_share_and_idle_time_of_the_merges() -> None:
    seconds = 0.0
    stream, optimizer = io.StringIO(), FakeOptimizer()
    with TrainingBar(1000, seconds=lambda: seconds, ideal=1000.0, stream=stream) as bar:
        bar.epoch = 3
        bar.watch(optimizer)
        for round in range(3):
            seconds += 0.1
            optimizer.merge(record(round, (64, 16), (0.08, 0.1)))
    last = stream.getvalue().splitlines()[-1]
    assert "epoch 3" in last
    assert "240/1000" in last
    assert "batch 80, 800 samples/s, 80% of ideal, idle 10%" in last


def test_figures_forget_what_is_long_past() -> None:
    seconds = 0.0
    stream = io.StringIO()
    with TrainingBar(10_000, seconds=lambda: seconds, stream=stream) as bar:
        for step in range(2 * TrainingBar.WINDOW):
            seconds += 1.0 if step < TrainingBar.WINDOW else 0.1
            bar.advance(10, 0.05)
    assert "100 samples/s, idle 50%" in stream.getvalue().splitlines()[-1]
    assert "of ideal" not in stream.getvalue()


def test_never_shows_more_than_everything() -> None:
    stream = io.StringIO()
    with TrainingBar(100, seconds=lambda: 1.0, stream=stream) as bar:
        bar.advance(80, 0.0)
        bar.advance(80, 0.0)
    assert "100/100" in stream.getvalue().splitlines()[-1]


def test_other_ranks_show_nothing() -> None:
    stream = io.StringIO()
    with TrainingBar(100, seconds=lambda: 1.0, enabled=False, stream=stream) as bar:
        bar.advance(80, 0.0)
    assert stream.getvalue() == ""


def test_under_a_launcher_every_redrawing_is_a_whole_line() -> None:
    stream = io.StringIO()
    lines = LineStream(stream)
    for text in ("\r 10%|# |", "\r 20%|##|", "\n", ""):
        lines.write(text)
    assert stream.getvalue() == "10%|# |\n20%|##|\n"
