from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from horovod_abs.observe.results import Point, Result
from horovod_abs.observe.summary import summarise_totals

RESULT = Result(
    label="ABS-SGD",
    curve=tuple(Point(float(n), 1000.0 * n, accuracy) for n, accuracy in enumerate([0.6, 0.9, 0.9, 0.99, 0.9, 0.93])),
    batches=((64.0, 16.0), (80.0, 16.0)),
    summary=summarise_totals([144.0, 32.0], [0.18, 0.16], 0.2, rounds=2),
    options={"lr": 0.1, "clock": "SyncClock()"},
)


def test_one_lucky_evaluation_does_not_reach_an_accuracy() -> None:
    assert [point.seconds for point in RESULT.smooth] == [2.0, 3.0, 4.0, 5.0]
    assert [point.accuracy for point in RESULT.smooth] == pytest.approx([0.8, 0.93, 0.93, 0.94])
    assert RESULT.seconds_to(0.79) == 2.0
    assert RESULT.seconds_to(0.92) == 3.0
    assert RESULT.seconds_to(0.935) == 5.0
    assert RESULT.seconds_to(0.95) is None
    assert RESULT.best_accuracy == pytest.approx(0.94)


def test_too_few_evaluations_reach_nothing() -> None:
    short = replace(RESULT, curve=RESULT.curve[:2])
    assert short.seconds_to(0.1) is None
    assert short.best_accuracy == 0.0


def test_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "result.json"
    RESULT.write(path)
    assert Result.read(path) == RESULT


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"label": "x", "curve": [1]}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"result\.json is not the result of a training run"):
        Result.read(path)
