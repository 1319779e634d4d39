"""Predictions of the simulator against real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from horovod_abs.bench.cli import app
from horovod_abs.bench.prediction import Setting, predict
from horovod_abs.core.ledger import Column
from tests.observe.test_timeline import EXCHANGE, log_of


def test_setting_reaches_the_ranks_as_it_is() -> None:
    setting = Setting(steps=3, repeats=2)
    assert Setting.from_json(setting.to_json()) == setting


@pytest.mark.parametrize(
    ("values", "message"),
    [({"rounds": 0}, "positive"), ({"recorded_ms": (20.0, 0.0)}, "positive"), ({"recorded_ms": (20.0,)}, "1 ranks")],
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting(**values)  # type: ignore[arg-type]


def test_ranks_are_as_much_quicker_as_their_times_say(tmp_path: Path) -> None:
    """Local SGD, which can be worked out: 8 steps of the slowest, an exchange and a merge."""
    log = log_of(tmp_path / "run.jsonl", rounds=6)
    rows = log.rounds[0].rows
    steps = [16 * row[Column.COMPUTE_SECONDS] / row[Column.WEIGHT] for row in rows]
    merge = 1.0 - rows[0][Column.COMPUTE_SECONDS] - rows[0][Column.WAIT_SECONDS]
    setting = Setting((20.0, 20.0, 20.0), {"some": (10.0, 10.0, 20.0)})
    for times in ((20.0, 20.0, 20.0), (10.0, 10.0, 10.0), (40.0, 20.0, 10.0)):
        slowest = max(step * ms / 20.0 for step, ms in zip(steps, times, strict=True))
        expected = 3 * 8 * 16 / (8 * slowest + EXCHANGE - 0.02 + merge)
        assert predict(log, setting, times, "local") == pytest.approx(expected, rel=0.02)


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_what_is_predicted_comes_true(tmp_path: Path) -> None:
    path = tmp_path / "prediction.json"
    outcome = CliRunner().invoke(app, ["prediction", "--quick", "--json", str(path)])
    assert outcome.exit_code == 0, outcome.output
    for row in json.loads(path.read_text())["rows"]:
        # 5 % on a quiet machine; the tests share theirs
        assert abs(row["error"]) < 0.15, row
